"""The walk over candidates against the same walk in torch, its candidates, the scores that it keeps, and how far it is from the exact walk."""

from __future__ import annotations

import importlib.util
import sys
from typing import ClassVar

import pytest
import torch

from kernels.agreement import Agreement, check, stray_logits
from kernels.backends.candidate_walk import CandidateOptions, CandidatePrepared, CandidateWalk, bias_table
from kernels.candidates import CandidateHead
from kernels.device import DeviceSpec, load
from kernels.heads.markov import MarkovHead
from kernels.reference import Approximation, walk
from kernels.registry import create
from kernels.synthetic import synthetic_inputs
from kernels.walk import Draft, Limits, NoiseRule, Rounding, SampledWalk, Unsupported, WalkInputs

CPU = load("cpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy talks about the NaN that the interpreter makes
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton; install it with: pip install -e '.[gpu]'"
)
TEMPERATURES = [1.0, 0.0, 0.3, torch.nan, 2.0, -1.0]


def backend(base: int, bias: int) -> CandidateWalk:
    made = create("candidate_walk", {"base_candidates": base, "bias_candidates": bias})
    assert isinstance(made, CandidateWalk)
    return made


def drawn(vocab: int, steps: int, batch: int, seed: int) -> WalkInputs:
    """Inputs whose requests have all kinds of temperatures."""
    plain = synthetic_inputs(vocab, steps, batch, seed, DEVICE)
    temperature = torch.tensor((TEMPERATURES * batch)[:batch], device=DEVICE)
    return WalkInputs(plain.base_logits, plain.anchor, temperature, plain.seed + 2**40 * plain.seed)


def verdict(made: CandidateWalk, head: MarkovHead, inputs: WalkInputs, tokens: torch.Tensor, round: int | None = None) -> Agreement:
    noise = None if round is None else NoiseRule.HASH
    return check(tokens, made.restricted(head), inputs, made.within, made.nan_rule, noise=noise, round=round or 0)


@needs_triton
@pytest.mark.parametrize(
    ("vocab", "rank", "base", "bias", "steps", "batch"),
    [(1, 3, 64, 16, 2, 2), (13, 16, 5, 2, 3, 3), (300, 16, 1, 1, 4, 2), (1000, 600, 64, 128, 2, 1), (2500, 48, 16, 16, 5, 3)],
)
def test_tokens_are_those_of_the_restricted_head(vocab: int, rank: int, base: int, bias: int, steps: int, batch: int) -> None:
    head, made = MarkovHead.synthetic(vocab, rank, vocab, DEVICE, w2_std=0.3), backend(base, bias)
    prepared, inputs = made.prepare(head, Limits(batch, steps), CPU), synthetic_inputs(vocab, steps, batch, 1, DEVICE)
    before, draft = inputs.base_logits.clone(), Draft.like(inputs)
    prepared.launch(inputs, draft)
    agreement = verdict(made, head, inputs, draft.tokens)
    assert agreement.ok, agreement.reason
    assert torch.equal(inputs.base_logits, before), "a walk leaves its inputs as they were"


@needs_triton
def test_with_every_token_a_candidate_it_is_the_exact_walk() -> None:
    head, inputs = MarkovHead.synthetic(60, 16, 0, DEVICE, w2_std=0.5), synthetic_inputs(60, 6, 3, 1, DEVICE)
    draft = Draft.like(inputs)
    backend(64, 8).prepare(head, Limits(3, 6), CPU).launch(inputs, draft)
    assert check(draft.tokens, head, inputs, Rounding.NEVER).ok


@needs_triton
def test_draws_rounds_and_kept_scores_of_mixed_batches() -> None:
    """Three rounds of one walk, then fewer requests and steps: tokens by the host's noise, and scores without a trace of the launch before."""
    head, made = MarkovHead.synthetic(700, 32, 0, DEVICE, w2_std=0.3), backend(16, 8)
    prepared = made.prepare(head, Limits(6, 3, sampling=True), CPU)
    assert isinstance(prepared, SampledWalk)
    for round, (steps, batch) in enumerate([(3, 6), (3, 6), (3, 6), (2, 4), (3, 6)]):
        assert prepared.round() == round
        inputs = drawn(700, steps, batch, round)
        draft = Draft.like(inputs)
        prepared.launch(inputs, draft)
        agreement = verdict(made, head, inputs, draft.tokens, round)
        assert agreement.ok, agreement.reason
        scores = prepared.scores[:batch, :steps]
        assert stray_logits(scores, draft.tokens, made.restricted(head), inputs, Rounding.NEVER) == 0
        counts = scores.isfinite().sum(2)
        assert ((counts >= 16) & (counts <= 24)).all(), "as many scores as candidates: none of an earlier launch, none twice"


@needs_triton
def test_a_seed_draws_the_same_in_any_slot_and_another_in_the_next_round() -> None:
    head, made = MarkovHead.synthetic(400, 16, 0, DEVICE, w2_std=0.3), backend(32, 8)
    one = synthetic_inputs(400, 4, 1, 5, DEVICE, temperature=2.0)
    two = WalkInputs(*(getattr(one, name).repeat_interleave(2, 0) for name in ("base_logits", "anchor", "temperature", "seed")))
    prepared, seen = made.prepare(head, Limits(2, 4, sampling=True), CPU), []
    for _ in range(3):
        draft = Draft.like(two)
        prepared.launch(two, draft)
        assert torch.equal(draft.tokens[0], draft.tokens[1])
        seen.append(draft.tokens[0])
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    two.seed[1] += 2**32  # the seed's high word counts too
    draft = Draft.like(two)
    prepared.launch(two, draft)
    assert not torch.equal(draft.tokens[0], draft.tokens[1])


@pytest.mark.gpu
@needs_triton
def test_draws_follow_the_softmax_of_the_kept_scores() -> None:
    """Chi-square over eight candidates, 16,384 draws of one step: 24.32 is the 0.1 % point at 7 degrees of freedom."""
    head, made = MarkovHead(torch.ones(300, 16, dtype=BF16, device=DEVICE), torch.zeros(300, 16, dtype=BF16, device=DEVICE)), backend(8, 1)
    base = torch.linspace(-1, 1, 300, device=DEVICE).to(BF16).expand(64, 1, 300).contiguous()
    base[:, :, :7] = torch.tensor([2.0, 2.5, 3.0, 1.5, 2.75, 1.75, 2.25], dtype=BF16, device=DEVICE)
    zero, seed = torch.zeros(64, dtype=torch.int64, device=DEVICE), torch.arange(64, device=DEVICE)
    inputs, prepared = WalkInputs(base, zero, torch.full((64,), 0.7, device=DEVICE), seed), made.prepare(head, Limits(64, 1, True), CPU)
    counts = torch.zeros(300, dtype=torch.float64, device=DEVICE)
    for _ in range(256):
        draft = Draft.like(inputs)
        prepared.launch(inputs, draft)
        counts += draft.tokens.flatten().bincount(minlength=300)
    expected = 256 * 64 * (prepared.scores[0, 0].double() / 0.7).softmax(0)
    alive = expected > 0
    assert int(alive.sum()) == 8
    assert int(counts[~alive].sum()) == 0
    assert ((counts - expected)[alive] ** 2 / expected[alive]).sum() < 24.32


@needs_triton
@pytest.mark.parametrize("sampling", [False, True])
def test_ties_nan_and_infinities(sampling: bool) -> None:
    rows = [
        ([3.0, 5.0, 5.0, 1.0], 501),
        ([1.0, torch.nan, 3.0, torch.nan], 502),
        ([-torch.inf] * 4, 0),
        ([torch.nan] * 4, 0),
        ([1.0, torch.inf, torch.inf, -torch.inf], 501),
        ([-torch.inf, -3e38, -torch.inf, -torch.inf], 501),
    ]
    base = torch.full((1, len(rows), 600), -torch.inf, dtype=BF16)
    base[0, :, 500:504] = torch.tensor([row for row, _ in rows], dtype=BF16)
    w2 = torch.zeros(600, 16, dtype=BF16)
    w2[599] = 1.0  # the table's only candidate, so that token 0 is none where four logits are NaN
    head = MarkovHead(torch.ones(600, 16, dtype=BF16), w2).to(DEVICE)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    inputs = WalkInputs(base.to(DEVICE), zero, torch.zeros(1, device=DEVICE), zero)
    prepared, draft = backend(4, 1).prepare(head, Limits(1, len(rows), sampling), CPU), Draft.like(inputs)
    for _ in range(2):
        prepared.launch(inputs, draft)
        assert draft.tokens.tolist() == [[token for _, token in rows]]
    if sampling:
        void = prepared.scores[0, 3]
        assert (void[0].item(), int(void.isfinite().sum())) == (0.0, 1), "a step with nobody to draw from is a point mass"
        inputs.base_logits[:, :, 500:508] = 1.0
        prepared.launch(inputs, draft)
        assert prepared.scores[0, :, 0].tolist() == [-torch.inf] * len(rows), "and no trace is left of it"


@needs_triton
def test_a_token_in_both_halves_has_the_tables_bias() -> None:
    """Every token is in both halves, and the table says what no product of W1 and W2 is."""
    head, inputs = MarkovHead.synthetic(30, 16, 0, DEVICE, w2_std=0.5), synthetic_inputs(30, 4, 3, 1, DEVICE)
    prepared, draft = backend(64, 128).prepare(head, Limits(3, 4), CPU), Draft.like(inputs)
    tokens, biases = prepared._table
    biases.copy_(-9.0 * (tokens % 7))
    prepared.launch(inputs, draft)
    penalty = -9.0 * (torch.arange(30, device=DEVICE) % 7)
    assert torch.equal(draft.tokens, (inputs.base_logits.float() + penalty).argmax(2))


@needs_triton
def test_strided_base_and_wild_anchors() -> None:
    head, plain, made = MarkovHead.synthetic(200, 16, 0, DEVICE, w2_std=0.5), synthetic_inputs(200, 5, 3, 0, DEVICE), backend(8, 8)
    padded = torch.full((3, 5, 208), 1e4, dtype=BF16, device=DEVICE)
    padded[..., :200] = plain.base_logits
    inputs = WalkInputs(padded[..., :200], torch.tensor([-5, 10**12, 7], device=DEVICE), plain.temperature, plain.seed)
    draft = Draft.like(inputs)
    made.prepare(head, Limits(3, 5), CPU).launch(inputs, draft)
    agreement = verdict(made, head, inputs, draft.tokens)
    assert agreement.ok, agreement.reason


def test_the_table_holds_the_largest_biases_of_every_token() -> None:
    head = MarkovHead.synthetic(90, 16, 0, w2_std=0.3)
    tokens, biases = bias_table(head.w1, head.w2, 7)
    exact = head.w1.double() @ head.w2.double().T
    assert (tokens.dtype, biases.dtype, tokens.shape) == (torch.int32, torch.float32, (90, 7))
    assert torch.equal(tokens.long().sort(1).values, exact.topk(7, dim=1).indices.sort(1).values)
    assert torch.allclose(biases.double(), exact.gather(1, tokens.long()), atol=1e-5)


def test_who_is_surely_a_candidate_and_who_may_be_one() -> None:
    """Of base logits 5, 3, 3, 3, 1 the top two are 5 and any 3: a token 3 may win, and none must."""
    head = MarkovHead(torch.zeros(5, 4, dtype=BF16), torch.zeros(5, 4, dtype=BF16))
    base = torch.tensor([[3.0, 5.0, 3.0, 1.0, 3.0]], dtype=BF16)
    restricted = CandidateHead(head, 2, 5)
    zero = torch.zeros(1, dtype=torch.int64)
    assert (restricted.step_interval(zero, base, Rounding.NEVER)[0] > -torch.inf).all(), "all biases count: all are candidates"
    w2 = torch.tensor([0, 0, 0, 1, 0], dtype=BF16)[:, None]
    by_bias = CandidateHead(MarkovHead(torch.ones(5, 1, dtype=BF16), w2.contiguous()), 2, 1)
    lowest, highest = by_bias.step_interval(zero, base, Rounding.NEVER)
    assert (lowest > -torch.inf).tolist() == [[False, True, False, True, False]]
    assert (highest > -torch.inf).tolist() == [[True, True, True, True, True]]
    assert int((by_bias.step_logits(zero, base, Rounding.NEVER) > -torch.inf).sum()) == 3


def test_tokens_outside_the_candidates_are_mismatches() -> None:
    head, inputs, made = MarkovHead.synthetic(500, 16, 3, w2_std=0.8), synthetic_inputs(500, 8, 4, 3), backend(2, 1)
    right = walk(made.restricted(head), inputs, Rounding.NEVER).tokens
    exact = walk(head, inputs, Rounding.NEVER, teacher=right).tokens
    assert verdict(made, head, inputs, right).ok
    assert 0 < int((right != exact).sum()) < right.numel(), "pruned so far, some tokens are not the exact walk's"
    place = tuple((right != exact).nonzero()[0].tolist())
    wrong = right.clone()
    wrong[place] = exact[place]
    assert not verdict(made, head, inputs, wrong).ok, "not even the exact walk's token is right where it is no candidate"


class OtherHead:
    kind: ClassVar[str] = "gated"
    vocab, rank, device = 8, 4, torch.device("cpu")


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    made, head = backend(4, 2), MarkovHead.synthetic(8, 4, device=DEVICE)
    assert isinstance(made, Approximation)
    assert made.rounding is Rounding.APPROXIMATE
    for base, bias in ((0, 1), (65, 1), (1, 0), (1, 129)):
        with pytest.raises(ValueError, match=f"1 to 64 and bias_candidates from 1 to 128; got {base} and {bias}"):
            CandidateOptions(base, bias)
    for bad, limits, message in (
        (OtherHead(), Limits(), r"'markov' head only; got 'gated'"),
        (head, Limits(max_batch=0), "at least 1; got 0 and 16"),
        (head, Limits(max_steps=33), "up to 32 steps; got rank 4 and max_steps 33"),
        (MarkovHead.synthetic(2, 1025), Limits(), "ranks up to 1024 .* got rank 1025"),
    ):
        with pytest.raises(Unsupported, match=message):
            made.prepare(bad, limits, CPU)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"candidate_walk needs Triton, which is not installed"):
        made.prepare(head, Limits(), CPU)


@needs_triton
def test_what_a_launch_refuses() -> None:
    head, inputs = MarkovHead.synthetic(8, 4, device=DEVICE), synthetic_inputs(8, 3, 2, device=DEVICE)
    prepared = backend(4, 2).prepare(head, Limits(2, 3), CPU)
    assert isinstance(prepared, CandidatePrepared)
    for bad, message in (
        (synthetic_inputs(8, 4, 2), "steps 4"),
        (synthetic_inputs(8, 3, 3), "batch 3"),
        (synthetic_inputs(9, 3, 2), "vocab 9"),
    ):
        with pytest.raises(ValueError, match=message):
            prepared.launch(bad, Draft.like(bad))
    with pytest.raises(ValueError, match="writes no bf16 logits"):
        prepared.launch(inputs, Draft.like(inputs, logits=True))
    with pytest.raises(ValueError, match="prepared greedy"):
        prepared.round()


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "sampling"), [(1, False), (3, True), (64, False)])
def test_graph_replay_on_the_gpu(batch: int, sampling: bool) -> None:
    head, made = MarkovHead.synthetic(151_936, 256, 0, "cuda"), backend(64, 16)
    inputs = drawn(151_936, 7, batch, 1) if sampling else synthetic_inputs(151_936, 7, batch, 1, "cuda")
    prepared = made.prepare(head, Limits(batch, 7, sampling), DeviceSpec("live", "sm_90a"))
    draft, stream = Draft.like(inputs), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the table takes long; a walk that reads it before it is there follows wild tokens
    with torch.cuda.stream(stream):
        prepared.launch(inputs, draft)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            prepared.launch(inputs, draft)
    torch.cuda.synchronize()
    for seed in (1, 2):
        inputs.base_logits.copy_(synthetic_inputs(151_936, 7, batch, seed, "cuda").base_logits)
        draft.tokens.fill_(-1)
        round = prepared.round() if sampling else None
        graph.replay()
        agreement = verdict(made, head, inputs, draft.tokens, round)
        assert agreement.ok, agreement.reason


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [1, 7])
def test_the_walk_itself_is_one_kernel_whatever_its_length(steps: int) -> None:
    head, inputs = MarkovHead.synthetic(10_007, 256, 0, "cuda"), synthetic_inputs(10_007, steps, 2, 1, "cuda")
    prepared, draft = backend(64, 16).prepare(head, Limits(2, steps), DeviceSpec("live", "sm_90a")), Draft.like(inputs)
    prepared.launch(inputs, draft)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        prepared.launch(inputs, draft)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() or []]
    assert sum("_walk" in name for name in names) == 1
    assert len(names) <= 16, f"beside it only the kernels of one top-k: {names}"
