"""Drafting with our noise and verifying by speculative rejection leaves the target's distribution; a verifier that shares noise does not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from scipy import stats
from torch import Tensor

from kernels.heads.markov import MarkovHead
from kernels.noise import Stream, noise_words, uniform
from kernels.reference import walk
from kernels.walk import NoiseRule, Rounding, WalkInputs

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB, STEPS, REQUESTS, TEMPERATURE, ANCHOR = 24, 2, 20_000, 0.8, 5
STREAMS = {NoiseRule.GUMBEL: Stream.DRAFT_ROWS, NoiseRule.GROUPS: Stream.DRAFT_GROUPS}


@dataclass(frozen=True)
class Verified:
    """tokens [requests, STEPS] that the target lets through or draws itself; how many drafted tokens it accepted."""

    tokens: Tensor
    accepted: int


def target() -> Tensor:
    """[VOCAB, VOCAB] fp64, the target's p(next | previous)."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64).softmax(1)


def speculate(rule: NoiseRule, stream: Stream, round: int = 0) -> Verified:
    """One draft and its verification for many requests of one seed that differ in their slots.

    At every step: accept x if coin q(x) < p(x), else draw from max(p - q, 0) and stop drafting; later tokens come from the target.
    """
    base = torch.randn(STEPS, VOCAB, generator=torch.Generator().manual_seed(2)).bfloat16().expand(REQUESTS, -1, -1)
    whole = torch.full((REQUESTS,), ANCHOR)
    seed = torch.full((REQUESTS,), 11)
    inputs = WalkInputs(base, whole, torch.full((REQUESTS,), TEMPERATURE), seed)
    draft = walk(MarkovHead.synthetic(VOCAB, 8, 0, w2_std=0.5), inputs, Rounding.INT8, keep_logits=True, noise=rule, round=round)
    assert draft.logits is not None
    plain = torch.Generator().manual_seed(3)
    tokens, previous, alive, accepted = torch.empty_like(draft.tokens), whole, torch.ones(REQUESTS, dtype=torch.bool), 0
    for step in range(STEPS):
        p, q, x = target()[previous], (draft.logits[:, step].double() / TEMPERATURE).softmax(1), draft.tokens[:, step]
        coin, other, *_ = uniform(noise_words(1, step, torch.arange(REQUESTS), round, stream, seed)[:, 0]).unbind(1)
        accept = alive & (coin * q.gather(1, x[:, None])[:, 0] < p.gather(1, x[:, None])[:, 0])
        running = (p - q).clamp(min=0).cumsum(1)
        resampled = (running > other[:, None] * running[:, -1:]).long().argmax(1)
        rest = torch.multinomial(p, 1, generator=plain)[:, 0]
        tokens[:, step] = previous = torch.where(accept, x, torch.where(alive, resampled, rest))
        alive, accepted = accept, accepted + int(accept.sum())
    return Verified(tokens, accepted)


def p_values(tokens: Tensor) -> tuple[float, float]:
    """Chi-square of the first token, and of the pair (cells that expect fewer than 8 are one cell), under the target."""
    p = target()
    joint = (p[ANCHOR][:, None] * p).flatten() * REQUESTS
    counts = (VOCAB * tokens[:, 0] + tokens[:, 1]).bincount(minlength=VOCAB**2).double()
    small = joint < 8
    observed, expected = (torch.cat([x[~small], x[small].sum()[None]]) for x in (counts, joint))
    first = stats.chisquare(tokens[:, 0].bincount(minlength=VOCAB).numpy(), (p[ANCHOR] * REQUESTS).numpy())
    return float(first.pvalue), float(stats.chisquare(observed.numpy(), expected.numpy()).pvalue)


@pytest.mark.parametrize("rule", STREAMS)
@pytest.mark.parametrize("round", [0, 1])
def test_a_verifier_with_its_own_stream_is_lossless(rule: NoiseRule, round: int) -> None:
    verified = speculate(rule, Stream.VERIFY, round)
    assert 0.2 * REQUESTS < verified.accepted < 1.5 * REQUESTS, "drafts are neither useless nor the target itself"
    assert min(p_values(verified.tokens)) > 1e-3


@pytest.mark.parametrize("rule", STREAMS)
def test_a_verifier_that_shares_the_drafts_stream_is_caught(rule: NoiseRule) -> None:
    assert p_values(speculate(rule, STREAMS[rule]).tokens)[0] < 1e-9
