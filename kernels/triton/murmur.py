"""Device twin of `kernels.murmur`: the words of MurmurHash3, and what vLLM's sampler makes of one.

Source: vLLM's `v1/worker/gpu/sample/gumbel.py`. The words are exact. Noise is known up to `kernels.murmur.score_slack`, since logarithms
are each platform's own. Arguments are integer blocks or scalars of any width (not literals); their low 32 bits are hashed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hashed_word(seed_low, seed_high, position, last):
    """uint32 MurmurHash3-x86-32 with hash seed 0 of four words. position: see `kernels.murmur.position_of`; last: the row, say."""
    state = _mixed(seed_low.to(tl.uint32) & 0, seed_low)
    state = _mixed(state, seed_high)
    state = _mixed(state, position)
    state = _mixed(state, last) ^ 16  # bytes hashed
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    return state ^ (state >> 16)


@triton.jit
def hashed_uniform(word):
    """fp32 in (0, 1] from a uint32 word: small ones keep their digits."""
    return (word >> 16).to(tl.float32) * 1.52587890625e-05 + ((word & 0xFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def hashed_gumbel(word):
    """fp32 -log(-log(1 - u)) from a uint32 word, so that the noise's long tail is at small u, which are fine."""
    u = hashed_uniform(word)
    series = u * 0.125 + 1 / 7  # -log1p(-u) / u below 1/4
    series = series * u + 1 / 6
    series = series * u + 0.2
    series = series * u + 0.25
    series = series * u + 1 / 3
    series = series * u + 0.5
    series = series * u + 1.0
    return -tl.log(tl.where(u < 0.25, series * u, -tl.log(tl.maximum(1.0 - u, 5.9604644775390625e-08))))


@triton.jit
def _mixed(state, word):
    word = word.to(tl.uint32) * 0xCC9E2D51
    word = ((word << 15) | (word >> 17)) * 0x1B873593
    state = state ^ word
    return ((state << 13) | (state >> 19)) * 5 + 0xE6546B64
