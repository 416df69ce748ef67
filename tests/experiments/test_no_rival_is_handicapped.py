"""Every rival is at least as fast as the same semantics written plainly in torch and captured in a graph, on the same inputs, interleaved.

Not here: sglang_greedy and vllm_addmm, which are plain torch; `sglang_markov_greedy_step` beyond one request, since the original reads W2
once for each; persistent walks, which no torch code matches (they are held to sglang_greedy by the records).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from experiments.stopwatch import Replay, Shot
from kernels.agreement import check
from kernels.backends.candidate_walk import CandidateOptions, bias_table
from kernels.device import load
from kernels.heads.markov import MarkovHead
from kernels.reference import Approximation
from kernels.registry import create
from kernels.synthetic import synthetic_inputs
from kernels.walk import Draft, Limits, NanRule, WalkInputs

pytestmark = pytest.mark.gpu
VOCAB, STEPS, REPLAYS = 151_936, 7, 15
NOISE = 1.03  # of two medians of interleaved replays
Choice = Callable[[Tensor, Tensor], Tensor]  # logits [batch, vocab], temperatures [batch, 1] -> tokens [batch]


def _greedy(logits: Tensor, temperature: Tensor) -> Tensor:
    return logits.argmax(dim=1)


def _race(logits: Tensor, temperature: Tensor) -> Tensor:
    weights = torch.softmax(logits.float() / temperature, dim=1)
    return (weights / torch.empty_like(weights).exponential_()).argmax(dim=1)


def _gumbel(logits: Tensor, temperature: Tensor) -> Tensor:
    noise = torch.rand(logits.shape, device=logits.device).log_().neg_().log_().neg_()
    return (logits.float() / temperature + noise).argmax(dim=1)


def _inverse_cdf(logits: Tensor, temperature: Tensor) -> Tensor:
    masses = torch.softmax(logits.float() / temperature, dim=1).cumsum(dim=1)
    return torch.searchsorted(masses, torch.rand(len(logits), 1, device=logits.device)).clamp_(max=logits.shape[1] - 1)[:, 0]


def _walk(head: MarkovHead, inputs: WalkInputs, draft: Draft, choose: Choice, sum_type: torch.dtype = torch.bfloat16) -> None:
    """The walk of all whole-vocabulary ways: gather, product, sum, choice; corrected logits where the draft has them."""
    temperature, previous = inputs.temperature[:, None], inputs.anchor.clamp(0, inputs.vocab - 1)
    for step in range(inputs.steps):
        latent = functional.embedding(previous, head.w1)
        bias = functional.linear(latent, head.w2) if sum_type == torch.bfloat16 else torch.mm(latent, head.w2.T, out_dtype=sum_type)
        logits = inputs.base_logits[:, step] + bias
        if draft.logits is not None:
            draft.logits[:, step] = logits
        previous = choose(logits, temperature)
        draft.tokens[:, step] = previous


def _candidate_walk(head: MarkovHead, inputs: WalkInputs, draft: Draft, table: tuple[Tensor, Tensor], count: int) -> None:
    """The largest base logits of every step and the largest biases after every token; who is in both counts twice, which changes no maximum."""
    ids, biases = table
    tops = inputs.base_logits.float().topk(count, dim=2)
    previous = inputs.anchor.clamp(0, inputs.vocab - 1)
    for step in range(inputs.steps):
        latent = functional.embedding(previous, head.w1).float()
        by_base = torch.bmm(head.w2[tops.indices[:, step]].float(), latent[:, :, None])[:, :, 0] + tops.values[:, step]
        by_bias = biases[previous] + inputs.base_logits[:, step].gather(1, ids[previous].long()).float()
        tokens = torch.cat([tops.indices[:, step], ids[previous].long()], dim=1)
        best = torch.cat([by_base, by_bias], dim=1).argmax(dim=1, keepdim=True)
        previous = tokens.gather(1, best)[:, 0]
        draft.tokens[:, step] = previous


PLAIN = {
    "sglang_folded": (_race, True),
    "sglang_markov_greedy_step": (_greedy, False),
    "vllm_loop_greedy": (_greedy, False),
    "vllm_loop_gumbel": (_gumbel, True),
    "vllm_two_launch": (_gumbel, True),
    "vllm_inverse_cdf": (_inverse_cdf, True),
    "candidate_walk": (_greedy, False),
}
CASES = [(name, batch) for name in PLAIN for batch in (1, 16, 64) if name != "sglang_markov_greedy_step" or batch == 1]


def _medians_us(launches: Sequence[Callable[[], None]]) -> list[float]:
    """Of complete calls with cold L2."""
    from experiments.cuda_stopwatch import CudaStopwatch

    stopwatch = CudaStopwatch(load("h200"))
    replays: list[Replay] = [stopwatch.capture(launch, warmup=3) for launch in launches]
    readings = stopwatch.time_calls([Shot(replay, "cold") for replay in replays] * REPLAYS)
    return [median(reading.time_us for reading in readings[first :: len(replays)]) for first in range(len(replays))]


@pytest.mark.parametrize(("name", "batch"), CASES)
def test_a_rival_is_no_slower_than_plain_torch(name: str, batch: int) -> None:
    choose, sampling = PLAIN[name]
    head = MarkovHead.synthetic(VOCAB, 256, 0, "cuda")
    drawn = synthetic_inputs(VOCAB, STEPS, batch, 1, "cuda")
    inputs = WalkInputs(drawn.base_logits, drawn.anchor, torch.full_like(drawn.temperature, float(sampling)), drawn.seed)
    backend = create(name)
    walk = backend.prepare(head, Limits(batch, STEPS, sampling), load("h200"))
    ours, theirs = (Draft.like(inputs, logits=sampling) for _ in range(2))
    if name == "candidate_walk":
        options = CandidateOptions()
        table = bias_table(head.w1, head.w2, options.bias_candidates)

        def plain() -> None:
            _candidate_walk(head, inputs, theirs, table, options.base_candidates)
    else:

        def plain() -> None:
            _walk(head, inputs, theirs, choose, torch.float32 if name == "sglang_markov_greedy_step" else torch.bfloat16)

    own_us, plain_us = _medians_us([lambda: walk.launch(inputs, ours), plain])
    if not sampling:
        held, rounding = (backend.restricted(head), backend.within) if isinstance(backend, Approximation) else (head, backend.rounding)
        assert check(theirs.tokens, held, inputs, rounding, NanRule.WINS).ok, "the plain walk is another walk"
    assert own_us <= NOISE * plain_us, f"{name}, batch {batch}: {own_us:.1f} us, plain torch {plain_us:.1f} us"
