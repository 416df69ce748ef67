"""The folded arm's own parts: the two-kernel sampler against torch, its corner cases, kept logits, noise, staging, a missing Triton."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.agreement import check, stray_logits
from kernels.backends.sglang_folded import FoldedPrepared, SglangFolded
from kernels.device import load
from kernels.heads.markov import MarkovHead
from kernels.synthetic import synthetic_inputs
from kernels.walk import Draft, Limits, Rounding, Unsupported, WalkInputs

CPU = load("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy talks about the NaN that the interpreter makes
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton; install it with: pip install -e '.[gpu]'")
BF16 = torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def race(logits: torch.Tensor, temperature: list[float], greedy: list[bool], noise: torch.Tensor) -> torch.Tensor:
    from kernels.triton.exponential_race import race as kernel

    arguments = (logits, torch.tensor(temperature), torch.tensor(greedy).to(torch.int32), noise)
    return kernel(*(argument.to(DEVICE) for argument in arguments)).cpu()


def race_in_torch(logits: torch.Tensor, temperature: list[float], greedy: list[bool], noise: torch.Tensor) -> torch.Tensor:
    """[batch, vocab] fp64 keys softmax(l / T) / E of the racers, -1 for those out of the race."""
    score = logits.double() / torch.tensor(temperature, dtype=torch.float64)[:, None]
    score = score.masked_fill(score.isnan(), -torch.inf)
    exponential = torch.where(torch.tensor(greedy)[:, None], 1.0, noise.double())
    return torch.where(score > -torch.inf, score.softmax(1) / exponential, -1.0)


@needs_triton
@settings(max_examples=12)
@given(vocab=st.sampled_from([1, 5, 1023, 1024, 1025, 3000]), seed=st.integers(0, 999), temperature=st.sampled_from([0.3, 1.0, 20.0]))
def test_the_sampler_is_softmax_over_noise(vocab: int, seed: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(3, vocab, generator=generator)).to(BF16)
    noise = torch.empty(3, vocab).exponential_(generator=generator)
    temperatures, greedy = [temperature, 1.0, 1.0], [False, True, False]
    tokens = race(logits, temperatures, greedy, noise)
    keys = race_in_torch(logits, temperatures, greedy, noise)
    chosen = keys.gather(1, tokens[:, None])[:, 0]
    assert (chosen >= keys.amax(1) * (1 - 1e-5)).all(), "fp32 keys may swap winners only within their rounding"
    assert tokens[1] == logits[1].argmax(), "a greedy row is a plain argmax"


@needs_triton
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(
    ("place", "token"),
    [
        ({5: torch.nan, 9: 1.0}, 9),  # (a) NaN never wins
        ({1030: 2.0, 2050: 1.0}, 1030),  # (b) the first and third tile are empty
        ({}, 0),  # (c) nobody races
        ({5: torch.nan, 2049: torch.nan}, 0),
        ({7: torch.inf, 2049: torch.inf}, 7),  # inf - inf is no NaN here
        ({7: -3e38, 2049: torch.nan}, 7),
        ({1: -100.0, 2049: 100.0}, 2049),  # the first tile's key underflows when brought to the row's maximum
    ],
)
def test_corner_cases_of_the_logits(place: dict[int, float], token: int, greedy: bool) -> None:
    logits = torch.full((2, 2500), -torch.inf, dtype=BF16)
    for index, value in place.items():
        logits[1, index] = value
    logits[0, 3] = 1.0  # another row, to see that rows do not mix
    assert race(logits, [1.0, 1.0], [greedy, greedy], torch.ones(2, 2500)).tolist() == [3, token]


@needs_triton
def test_corner_cases_of_the_noise() -> None:
    """(d) A zero or subnormal E makes an infinite key: it wins, the lowest index first; NaN and infinite E do not win."""
    logits = torch.zeros(1, 2500, dtype=BF16)
    for values, token in (
        ({1100: 0.0, 2100: 0.0}, 1100),
        ({2100: 1e-42, 30: 1e-3}, 2100),
        ({1100: torch.nan, 2100: 1e-3}, 2100),
        ({0: torch.inf, 1: torch.inf}, 2),
    ):
        noise = torch.ones(1, 2500)
        for index, value in values.items():
            noise[0, index] = value
        assert race(logits, [1.0], [False], noise).item() == token
    assert race(logits, [1.0], [True], torch.zeros(1, 2500)).item() == 0, "a greedy row reads no noise"


@needs_triton
def test_padding_never_wins() -> None:
    storage = torch.full((2, 1100), 1e4, dtype=BF16)
    storage[:, :1030] = -1.0
    assert race(storage[:, :1030], [1.0, 1.0], [True, True], torch.ones(2, 1100)[:, :1030]).tolist() == [0, 0]


@pytest.mark.gpu  # the interpreter takes minutes for so many rows
@needs_triton
def test_draws_follow_the_softmax() -> None:
    """Chi-square over 4 tokens in two tiles, 30,000 draws: 16.27 is the 0.1 % point at 3 degrees of freedom."""
    at = [0, 500, 1024, 1100]
    logits = torch.full((30_000, 1101), -torch.inf, dtype=BF16)
    logits[:, at] = torch.tensor([0.0, 1.0, 0.5, -0.5], dtype=BF16)
    noise = torch.empty(30_000, 1101).exponential_(generator=torch.Generator().manual_seed(0))
    tokens = race(logits, [0.7] * 30_000, [False] * 30_000, noise)
    expected = 30_000 * (logits[0, at].double() / 0.7).softmax(0)
    counts = torch.tensor([int((tokens == token).sum()) for token in at])
    assert counts.sum() == 30_000
    assert ((counts - expected) ** 2 / expected).sum() < 16.27


def prepared(vocab: int = 300, batch: int = 2, steps: int = 4, sampling: bool = False) -> tuple[MarkovHead, FoldedPrepared]:
    head = MarkovHead.synthetic(vocab, 16, 0, DEVICE, w2_std=0.3)
    return head, SglangFolded(SglangFolded.Options()).prepare(head, Limits(batch, steps, sampling), CPU)


@needs_triton
def test_kept_logits_are_the_ones_the_tokens_came_from() -> None:
    head, folded = prepared()
    inputs = synthetic_inputs(300, 4, 2, 1, DEVICE)
    draft = Draft.like(inputs, logits=True)
    folded.launch(inputs, draft)
    assert draft.logits is not None
    assert stray_logits(draft.logits, draft.tokens, head, inputs, Rounding.TWICE) == 0
    assert torch.equal(draft.logits.argmax(2), draft.tokens)
    folded.launch(inputs, Draft.like(inputs))
    assert torch.equal(folded._corrected.view(2, 4, 300), draft.logits), "without a place in the draft they go to the static buffer"


@needs_triton
def test_noise_is_drawn_afresh_for_greedy_walks_too() -> None:
    _, folded = prepared()
    inputs = synthetic_inputs(300, 4, 1, 1, DEVICE)
    seen = []
    for _ in range(2):
        folded.launch(inputs, Draft.like(inputs))
        seen.append(folded._noise.clone())
    assert (seen[0][0] != seen[1][0]).float().mean() > 0.99
    assert seen[0][0].mean().item() == pytest.approx(1.0, abs=0.3)
    assert (seen[1][1] == 1).all(), "rows beyond the batch are left alone"


@needs_triton
def test_mixed_rows() -> None:
    """T <= 0 and NaN are greedy, a tiny T is clamped and acts as greedy, T = 5 draws."""
    head, folded = prepared(batch=5, sampling=True)
    plain = synthetic_inputs(300, 4, 5, 3, DEVICE)
    temperature = torch.tensor([0.0, -1.0, torch.nan, 1e-30, 5.0], device=DEVICE)
    inputs = WalkInputs(plain.base_logits, plain.anchor, temperature, plain.seed)
    drafts = [Draft.like(inputs, logits=True) for _ in range(3)]
    for draft in drafts:
        folded.launch(inputs, draft)
    assert folded._temperature.tolist() == pytest.approx([1.0, 1.0, 1.0, 1e-5, 5.0])
    assert folded._greedy.tolist() == [True, True, True, False, False]
    greedy = WalkInputs(plain.base_logits[:4], plain.anchor[:4], plain.temperature[:4], plain.seed[:4])
    assert check(drafts[0].tokens[:4], head, greedy, Rounding.TWICE).ok
    assert len({tuple(draft.tokens[4].tolist()) for draft in drafts}) == 3
    as_greedy = WalkInputs(plain.base_logits, plain.anchor, plain.temperature, plain.seed)
    assert drafts[0].logits is not None
    assert stray_logits(drafts[0].logits, drafts[0].tokens, head, as_greedy, Rounding.TWICE) == 0


def test_without_triton_it_explains_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"Triton, which is not installed; run: pip install -e '.\[gpu\]'"):
        prepared()


@needs_triton
def test_on_a_cpu_without_the_interpreter_it_explains_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    import kernels.triton.exponential_race  # noqa: F401  # so that the patch below finds it

    monkeypatch.setattr(sys.modules["kernels.triton.exponential_race"], "interpreted", lambda: False)
    with pytest.raises(Unsupported, match="TRITON_INTERPRET=1"):
        SglangFolded(SglangFolded.Options()).prepare(MarkovHead.synthetic(8, 4), Limits(), CPU)
