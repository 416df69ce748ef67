"""vLLM's noise on the host: the hash is the published one, the draws follow the softmax, and a check allows what rounding allows and no more."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, kstest

from kernels import murmur
from kernels.agreement import check
from kernels.heads.markov import MarkovHead
from kernels.reference import walk
from kernels.sampling import Draws, draw, hashed_scores, request_uniform
from kernels.synthetic import synthetic_inputs
from kernels.walk import NoiseRule, Rounding, WalkInputs

RULES = [NoiseRule.HASH, NoiseRule.UNIFORM]


def murmur3(data: bytes) -> int:
    """MurmurHash3-x86-32 with seed 0, of whole words, from its public description."""
    mask, state = 2**32 - 1, 0
    for (word,) in struct.iter_unpack("<I", data):
        word = word * 0xCC9E2D51 & mask
        word = (word << 15 | word >> 17) & mask
        state ^= word * 0x1B873593 & mask
        state = (state << 13 | state >> 19) & mask
        state = (state * 5 + 0xE6546B64) & mask
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor & mask
    return state ^ state >> 16


def test_the_test_knows_the_hash() -> None:
    """A vector that the hash's public tests have."""
    assert murmur3(b"test") == 0xBA6BD213


@given(seed=st.integers(-(2**63), 2**63 - 1), round=st.integers(0, 2**32 - 1), step=st.integers(0, 255), row=st.integers(0, 300_000))
def test_words_are_the_published_hash(seed: int, round: int, step: int, row: int) -> None:
    position = (256 * round + step + 2**30) % 2**32
    assert murmur.position_of(round, step) == position
    words = murmur.hashed_words(torch.tensor([seed]), position, torch.tensor([row]))
    assert words.item() == murmur3(struct.pack("<qII", seed, position, row))


def test_a_step_beyond_a_round_is_an_error() -> None:
    with pytest.raises(ValueError, match="256 positions; got step 256"):
        murmur.position_of(0, 256)


def test_gumbels_are_gumbels() -> None:
    """Kolmogorov-Smirnov over 200,000 rows, and the ends of the words."""
    noise = murmur.row_noise(torch.tensor([3]), murmur.position_of(1, 2), 200_000)[0]
    assert kstest(noise.double().numpy(), "gumbel_r").pvalue > 1e-3
    u = murmur.uniform(torch.tensor([0, 1, 2**30 - 1, 2**30, 2**32 - 1]))
    exact = -(-torch.log1p(-u.double()[:4])).log()
    assert torch.allclose(murmur.gumbel(u)[:4].double(), exact, rtol=0, atol=3e-6), "the series ends at degree 8"
    assert murmur.gumbel(u).isfinite().all()
    assert murmur.gumbel(u)[0] == pytest.approx(22.87, abs=0.01)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.6, 2.0])
def test_tokens_follow_the_softmax(rule: NoiseRule, temperature: float) -> None:
    """Chi-square of 20,000 seeds over 20 tokens, one impossible; the same counts do not fit another temperature."""
    logits = 2 * torch.randn(20, generator=torch.Generator().manual_seed(1))
    logits[7] = -torch.inf
    seeds, temperatures = torch.arange(20_000), torch.full((20_000,), temperature)
    counts = draw(logits.expand(20_000, -1), temperatures, seeds, 3, 5, rule).bincount(minlength=20)
    assert counts[7] == 0
    for t, fits in ((temperature, True), (1.15 * temperature, False)):
        expected = 20_000 * (logits.double() / t).softmax(0)
        possible = expected > 0
        statistic = ((counts - expected) ** 2 / expected)[possible].sum().item()
        assert (chi2.sf(statistic, int(possible.sum()) - 1) > 1e-3) == fits


@pytest.mark.parametrize("rule", RULES)
def test_noise_is_the_requests_own(rule: NoiseRule) -> None:
    """By seed, round and step, wherever the request stands in the batch; NaN rows are never drawn."""
    logits, ones = torch.zeros(4, 3000), torch.ones(4)
    logits[:, :100] = torch.nan
    tokens = draw(logits, ones, torch.tensor([1, 2, 1, 3]), 0, 0, rule)
    assert (tokens >= 100).all()
    assert tokens[0] == tokens[2]
    assert len({*tokens.tolist()}) == 3
    assert not torch.equal(draw(logits, ones, torch.tensor([1, 2, 1, 3]), 1, 0, rule), tokens)
    assert not torch.equal(draw(logits, ones, torch.tensor([1, 2, 1, 3]), 0, 1, rule), tokens)
    assert draw(torch.full((1, 9), -torch.inf), torch.ones(1), torch.zeros(1, dtype=torch.int64), 0, 0, rule).item() == 0


def one_step(base: list[float]) -> tuple[MarkovHead, WalkInputs]:
    """A head whose bias is zero, and one sampled step."""
    vocab, zero = len(base), torch.zeros(1, dtype=torch.int64)
    head = MarkovHead(torch.ones(vocab, 16, dtype=torch.bfloat16), torch.zeros(vocab, 16, dtype=torch.bfloat16))
    return head, WalkInputs(torch.tensor([[base]], dtype=torch.bfloat16), zero, torch.ones(1), zero)


@pytest.mark.parametrize("rule", RULES)
def test_the_oracle_agrees_with_itself(rule: NoiseRule) -> None:
    head, inputs = MarkovHead.synthetic(200, 16, 0, w2_std=0.5), synthetic_inputs(200, 4, 3, 1, temperature=0.8)
    inputs.temperature[1] = 0.0
    tokens = walk(head, inputs, Rounding.TWICE, noise=rule, round=7).tokens
    assert check(tokens, head, inputs, Rounding.TWICE, noise=rule, round=7).near_ties == 0
    assert not check(tokens, head, inputs, Rounding.TWICE, noise=rule, round=8).ok
    for row, step in ((0, 2), (1, 1)):
        wrong = tokens.clone()
        wrong[row, step] = (wrong[row, step] + 1) % 200
        assert check(wrong, head, inputs, Rounding.TWICE, noise=rule, round=7).mismatches >= 1


def test_scores_may_differ_by_the_platforms_logarithms_only(monkeypatch: pytest.MonkeyPatch) -> None:
    head, inputs = one_step([1.0, 1.5, 1.0])
    draws = Draws.of(inputs.temperature, inputs.seed, 0, 0)
    scores = hashed_scores(inputs.base_logits[:, 0].float(), draws)[0][0]
    second, first = scores.argsort()[1:].tolist()
    apart = float(scores[first] - scores[second])
    for slack, near in ((0.6 * apart, True), (0.4 * apart, False)):  # what either score may be off
        monkeypatch.setattr(murmur, "score_slack", lambda score, noise, slack=slack: torch.full_like(score, slack))
        found = check(torch.tensor([[second]]), head, inputs, Rounding.TWICE, noise=NoiseRule.HASH)
        assert (found.ok, found.near_ties) == (near, int(near))


@pytest.mark.parametrize("own", [0, 1])
def test_a_uniform_at_the_end_of_a_share_may_fall_to_either_side(own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens of the same logit: a number below a half is the first one's. The other is right as far as the sums may be off."""
    head, inputs = one_step([0.0, 0.0])
    draws = [Draws.of(inputs.temperature, torch.tensor([seed]), 0, 0) for seed in range(20)]
    drawn = next(each for each in draws if (request_uniform(each).item() > 0.5) == own)
    inputs.seed.copy_(drawn.seed)
    apart = abs(request_uniform(drawn).item() - 0.5)
    assert check(torch.tensor([[own]]), head, inputs, Rounding.TWICE, noise=NoiseRule.UNIFORM).near_ties == 0
    for slack, near in ((apart * 1.01, True), (apart * 0.99, False)):
        monkeypatch.setattr("kernels.agreement.CDF_SLACK", slack)
        assert check(torch.tensor([[1 - own]]), head, inputs, Rounding.TWICE, noise=NoiseRule.UNIFORM).ok == near
