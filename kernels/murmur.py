"""The noise of vLLM's draft loop on the host: MurmurHash3 of (seed, position, row), so that a seeded request draws the same at the same place.

Source: vLLM's `v1/worker/gpu/sample/gumbel.py`. The hash's words are exact. Its logarithms are each platform's own, so a Gumbel is known up
to `score_slack`. `kernels/triton/murmur.py` is the same on the GPU.

A position is where the token stands in its request. A suite has no requests, so a walk's round stands for the context: 256 tokens each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.philox import MASK

DRAFT_SALT = 1 << 30  # added to a draft's positions, so that a verifier which resamples there never meets the draft's noise
ROUND_TOKENS = 256
SERIES = tuple(1 / n for n in range(8, 0, -1))  # -log1p(-u) / u below 1/4, highest power first


def position_of(round: int, step: int) -> int:
    """The third word that is hashed, for the token of a step.

    Raises:
        ValueError: a step beyond a round's tokens.
    """
    if not 0 <= step < ROUND_TOKENS:
        raise ValueError(f"a round has {ROUND_TOKENS} positions; got step {step}.")
    return (round * ROUND_TOKENS + step + DRAFT_SALT) & MASK


def hashed_words(seed: Tensor, position: int, last: Tensor) -> Tensor:
    """[batch, n] int64 words in [0, 2^32): MurmurHash3-x86-32 with hash seed 0 of (seed low, seed high, position, last).

    seed: [batch] int64; last: [n] int64, the row or what else tells the words of one position apart.
    """
    fixed = [seed & MASK, seed >> 32 & MASK, torch.full_like(seed, position)]
    state = torch.zeros_like(seed)
    for word in fixed:
        state = _mixed(state, word)
    state = _mixed(state[:, None], last[None, :]) ^ 16  # bytes hashed
    state = (state ^ state >> 16) * 0x85EBCA6B & MASK
    state = (state ^ state >> 13) * 0xC2B2AE35 & MASK
    return state ^ state >> 16


def uniform(words: Tensor) -> Tensor:
    """fp32 in (0, 1]: small ones keep their digits."""
    return (words >> 16).float() * 2.0**-16 + ((words & 0xFFFF).float() + 0.5) * 2.0**-32


def gumbel(u: Tensor) -> Tensor:
    """-log(-log(1 - u)), so that the noise's long tail is at small u, which are fine. Between -2.9 and 22.9."""
    series = torch.full_like(u, SERIES[0])
    for coefficient in SERIES[1:]:
        series = series * u + coefficient
    exponential = torch.where(u < 0.25, series * u, -(1.0 - u).clamp(min=2.0**-24).log())
    return -exponential.log()


def row_noise(seed: Tensor, position: int, vocab: int) -> Tensor:
    """[batch, vocab] fp32 Gumbel noise of one step."""
    return gumbel(uniform(hashed_words(seed, position, torch.arange(vocab, device=seed.device))))


def score_slack(score: Tensor, noise: Tensor) -> Tensor:
    """How far logit / T + noise may lie from another platform's. A GPU's `lg2.approx` errs by 2^-22 absolutely near 1 and relatively
    elsewhere (PTX ISA, 9.7.3.19), its division by two units in the last place. The inner logarithm is at least 1/4, so it is known to
    4 * 2^-22 relatively, which the outer one turns into as much absolutely. Twice what that gives."""
    return 2.0**-21 * (4.0 + noise.abs() + (score - noise).abs()).nan_to_num(posinf=0.0)


def _mixed(state: Tensor, word: Tensor) -> Tensor:
    word = word * 0xCC9E2D51 & MASK
    word = (word << 15 | word >> 17) & MASK
    state = state ^ word * 0x1B873593 & MASK
    state = (state << 13 | state >> 19) & MASK
    return state * 5 + 0xE6546B64 & MASK
