"""vLLM's inverse CDF walk: the twin's draws, the loop's greedy tokens, kept logits, corner cases, refusals; on the GPU graphs."""

from __future__ import annotations

import importlib.util
import sys
from typing import ClassVar

import pytest
import torch

from kernels.agreement import check, stray_logits
from kernels.backends.vllm_inverse_cdf import InverseCdfPrepared, VllmInverseCdf
from kernels.device import load
from kernels.heads.markov import MarkovHead
from kernels.synthetic import synthetic_inputs
from kernels.walk import Draft, Limits, NoiseRule, Rounding, SampledWalk, Unsupported, WalkInputs
from tests.kernels.mixed import mixed

CPU = load("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy talks about the NaN that the interpreter makes
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton; install it with: pip install -e '.[gpu]'")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def prepared(head: MarkovHead, batch: int, steps: int) -> InverseCdfPrepared:
    return VllmInverseCdf(VllmInverseCdf.Options()).prepare(head, Limits(batch, steps, sampling=True), CPU)


def one_step(logits: torch.Tensor, temperature: list[float], seed: list[int]) -> torch.Tensor:
    """[batch] tokens of [batch, vocab] bf16 logits without any bias."""
    batch, vocab = logits.shape
    head = MarkovHead(torch.zeros(vocab, 16, dtype=torch.bfloat16), torch.zeros(vocab, 16, dtype=torch.bfloat16)).to(DEVICE)
    anchor = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    inputs = WalkInputs(logits[:, None].to(DEVICE), anchor, torch.tensor(temperature, device=DEVICE), torch.tensor(seed, device=DEVICE))
    draft = Draft.like(inputs)
    prepared(head, batch, 1).launch(inputs, draft)
    return draft.tokens[:, 0].cpu()


@needs_triton
@pytest.mark.parametrize(("vocab", "rank", "steps", "batch"), [(1, 4, 2, 3), (13, 5, 3, 2), (1024, 16, 2, 3), (2500, 24, 3, 8)])
def test_tokens_are_the_twins_in_every_round(vocab: int, rank: int, steps: int, batch: int) -> None:
    head, inputs = MarkovHead.synthetic(vocab, rank, vocab, DEVICE, w2_std=0.3), mixed(vocab, steps, batch)
    walk, before = prepared(head, batch, steps), inputs.base_logits.clone()
    assert isinstance(walk, SampledWalk)
    assert walk.noise is NoiseRule.UNIFORM
    assert walk.resources.streamed_bytes == vocab * rank * 2
    for launch in range(4):
        draft = Draft.like(inputs, logits=True)
        assert walk.round() == launch
        walk.launch(inputs, draft)
        agreement = check(draft.tokens, head, inputs, Rounding.TWICE, noise=walk.noise, round=launch)
        assert agreement.ok, agreement.reason
        assert draft.logits is not None
        assert stray_logits(draft.logits, draft.tokens, head, inputs, Rounding.TWICE) == 0
    assert torch.equal(inputs.base_logits, before), "a walk leaves its inputs as they were"


@needs_triton
def test_a_round_decides_and_its_bits_wrap() -> None:
    head, inputs = MarkovHead.synthetic(300, 16, 0, DEVICE, w2_std=0.3), mixed(300, 3, 4)
    walk, drawn = prepared(head, 4, 3), []
    for launch in (0, 1, 2**32 - 1, 2**24, 1):  # 2^24 rounds of 256 positions are all there are: it repeats round 0
        walk._rounds.fill_(launch)
        draft = Draft.like(inputs)
        walk.launch(inputs, draft)
        assert check(draft.tokens, head, inputs, Rounding.TWICE, noise=walk.noise, round=launch).ok
        drawn.append(draft.tokens.tolist())
    assert drawn[1] == drawn[4]
    assert drawn[0] == drawn[3]
    assert drawn[0][1:4] != drawn[1][1:4]
    assert drawn[0][0] == drawn[1][0], "a greedy row has no noise"


@needs_triton
def test_a_seed_decides_and_a_slot_does_not() -> None:
    head, inputs = MarkovHead.synthetic(1100, 16, 0, DEVICE, w2_std=0.3), mixed(1100, 3, 4)
    order = torch.tensor([2, 0, 3, 1], device=DEVICE)
    moved = WalkInputs(inputs.base_logits[order], inputs.anchor[order], inputs.temperature[order], inputs.seed[order])
    other = WalkInputs(inputs.base_logits, inputs.anchor, inputs.temperature, inputs.seed + (1 << 32))
    here, there, elsewhere = (Draft.like(inputs) for _ in range(3))
    for source, draft in ((inputs, here), (moved, there), (other, elsewhere)):
        prepared(head, 4, 3).launch(source, draft)
    assert torch.equal(here.tokens[order], there.tokens)
    assert not torch.equal(here.tokens[1:], elsewhere.tokens[1:]), "the seed's upper half counts"


@needs_triton
def test_one_prepared_walk_serves_smaller_and_strided_ones() -> None:
    head = MarkovHead.synthetic(37, 16, 0, DEVICE, w2_std=0.5)
    walk = prepared(head, 3, 5)
    for launch, (steps, batch) in enumerate(((5, 3), (1, 1), (4, 2))):
        plain = mixed(37, steps, batch, steps)
        padded = torch.full((batch, steps, 48), 1e4, dtype=torch.bfloat16, device=DEVICE)
        padded[..., :37] = plain.base_logits
        anchor = torch.tensor([-5, 10**12, 7], device=DEVICE)[:batch]
        inputs = WalkInputs(padded[..., :37], anchor, plain.temperature, plain.seed)
        draft = Draft.like(inputs)
        walk.launch(inputs, draft)
        assert check(draft.tokens, head, inputs, Rounding.TWICE, noise=walk.noise, round=launch).ok


@needs_triton
def test_without_a_place_in_the_draft_the_cache_keeps_the_logits() -> None:
    head, inputs = MarkovHead.synthetic(300, 16, 0, DEVICE, w2_std=0.3), mixed(300, 2, 3)
    walk, draft = prepared(head, 4, 3), Draft.like(inputs)
    walk.launch(inputs, draft)
    assert stray_logits(walk._cache[:3, :2], draft.tokens, head, inputs, Rounding.TWICE) == 0
    assert not walk._cache[3].any(), "rows beyond the batch are left alone"
    assert not walk._cache[:, 2].any()


@needs_triton
@pytest.mark.parametrize(
    ("place", "greedy", "drawable"),
    [
        ({5: torch.nan, 9: 1.0}, 9, {9}),
        ({1030: 2.0, 2050: 1.0}, 1030, {1030, 2050}),  # the first block is empty
        ({}, 0, {0}),
        ({5: torch.nan, 2049: torch.nan}, 0, {0}),
        ({7: torch.inf, 2049: torch.inf, 1500: 3e38}, 7, {7, 2049}),  # inf - inf is no NaN here
        ({7: -3e38, 2049: torch.nan}, 7, {7}),
        ({1: -100.0, 2049: 100.0}, 2049, {2049}),  # the first block's mass underflows when brought to the row's top
        ({2499: 1.0}, 2499, {2499}),
        ({3: 5.0, 1025: 5.0, 2047: 5.0}, 3, {3, 1025, 2047}),
    ],
)
def test_corner_cases_of_the_logits(place: dict[int, float], greedy: int, drawable: set[int]) -> None:
    logits = torch.full((8, 2500), -torch.inf, dtype=torch.bfloat16)
    for index, value in place.items():
        logits[:, index] = value
    logits[0] = -torch.inf
    logits[0, 3] = 1.0  # another row, to see that rows do not mix
    tokens = one_step(logits, [1.0, 0.0, 1.0, 0.5, 1e-30, 1.0, 1.0, torch.inf], list(range(8))).tolist()
    assert tokens[:2] == [3, greedy]
    assert set(tokens[2:]) <= drawable


@needs_triton
def test_both_ends_of_the_cdf() -> None:
    """Logits that fall or rise steeply: nearly all weight on the first or the last token of the vocabulary, whatever the uniform."""
    steep = torch.arange(2500.0).mul(-40).bfloat16()
    logits = torch.stack([steep, steep.flip(0)] * 4)
    assert one_step(logits, [1.0] * 8, list(range(8))).tolist() == [0, 2499] * 4


@pytest.mark.gpu  # the interpreter takes minutes for so many rows
@needs_triton
def test_draws_follow_the_softmax() -> None:
    """Chi-square over 4 tokens in two blocks, 30,000 draws: 16.27 is the 0.1 % point at 3 degrees of freedom."""
    at = [0, 500, 1024, 1100]
    logits = torch.full((30_000, 1101), -torch.inf, dtype=torch.bfloat16)
    logits[:, at] = torch.tensor([0.0, 1.0, 0.5, -0.5], dtype=torch.bfloat16)
    tokens = one_step(logits, [0.7] * 30_000, list(range(30_000)))
    expected = 30_000 * (logits[0, at].double() / 0.7).softmax(0)
    counts = torch.tensor([int((tokens == token).sum()) for token in at])
    assert counts.sum() == 30_000
    assert ((counts - expected) ** 2 / expected).sum() < 16.27


class OtherHead:
    kind: ClassVar[str] = "gated"
    vocab, rank, device = 8, 4, torch.device("cpu")


@needs_triton
def test_refusals() -> None:
    backend, head = VllmInverseCdf(VllmInverseCdf.Options()), MarkovHead.synthetic(8, 4, device=DEVICE)
    for bad, limits, message in (
        (OtherHead(), Limits(sampling=True), r"'markov' head only; got 'gated'"),
        (head, Limits(0, sampling=True), "at least 1; got 0 and 16"),
        (head, Limits(1, 257, sampling=True), "noise for 256 steps; got max_steps 257"),
        (head, Limits(), "sampled drafts only, as the original; greedy ones are backend=vllm_loop_greedy"),
    ):
        with pytest.raises(Unsupported, match=message):
            backend.prepare(bad, limits, CPU)
    inputs = synthetic_inputs(8, 4, 2, device=DEVICE)
    with pytest.raises(ValueError, match="steps 4"):
        prepared(head, 2, 3).launch(inputs, Draft.like(inputs))


def test_without_triton_it_explains_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"Triton, which is not installed; run: pip install -e '.\[gpu\]'"):
        prepared(MarkovHead.synthetic(8, 4), 1, 1)


@needs_triton
def test_on_a_cpu_without_the_interpreter_it_explains_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    import kernels.triton.exponential_race  # noqa: F401  # so that the patch below finds it

    monkeypatch.setattr(sys.modules["kernels.triton.exponential_race"], "interpreted", lambda: False)
    with pytest.raises(Unsupported, match="TRITON_INTERPRET=1"):
        prepared(MarkovHead.synthetic(8, 4), 1, 1)


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize(("vocab", "steps", "batch"), [(129_280, 5, 16), (248_320, 16, 2), (10_007, 7, 3)])
def test_graph_replays_draw_afresh(vocab: int, steps: int, batch: int) -> None:
    head, inputs = MarkovHead.synthetic(vocab, 256, 0, "cuda"), mixed(vocab, steps, batch)
    walk, draft = prepared(head, batch, steps), Draft.like(inputs, logits=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        walk.launch(inputs, draft)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            walk.launch(inputs, draft)
    torch.cuda.synchronize()
    for launch in (1, 2, 3):
        assert walk.round() == launch
        draft.tokens.fill_(-1)
        graph.replay()
        agreement = check(draft.tokens, head, inputs, Rounding.TWICE, noise=walk.noise, round=launch)
        assert agreement.ok, agreement.reason
        assert draft.logits is not None
        assert stray_logits(draft.logits, draft.tokens, head, inputs, Rounding.TWICE) == 0
