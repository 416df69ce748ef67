"""From random words to noise, the same bits as `kernels/cuda/common/noise.cuh`: fp32, every multiplication, addition and fma rounded once.

Words are int64 tensors in [0, 2^32); numbers are fp32 tensors. Runs on CPU and GPU. Error bounds stand in the header and are tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from kernels.philox import MASK, philox, philox_key

ROWS_PER_WORDS = 4  # GUMBEL: row r takes word r % 4 of index r // 4
GROUP_ROWS = 16  # GROUPS: rows of a group
BLOCK_ROWS = 64  # GROUPS: rows of four groups
GROUPS_PER_WORDS = 2  # GROUPS: group g takes words 2 (g % 2), for its Gumbel, and 2 (g % 2) + 1, for its row, of index g // 2
WEIGHT_SPAN = 126.0  # GROUPS: a weight is a power of two between 2^-126, the smallest that is normal, and 1
_MAX_STEPS = 256  # a counter's second word is step | slot << 8


class Stream(IntEnum):
    """Word 3 of a counter. No two streams share a word; a walk never uses the verifier's."""

    DRAFT_ROWS = 0x44520001  # rule GUMBEL
    DRAFT_GROUPS = 0x44520002  # rule GROUPS
    VERIFY = 0x56450001  # reserved for a verifier that resamples


def noise_counters(count: int, step: int, slot: Tensor, round: int, stream: int) -> Tensor:
    """[batch, count, 4] counters (index, step | slot << 8, round, stream) of indices 0 to count - 1 for requests in places `slot` [batch].

    Raises:
        ValueError: a step that does not fit.
    """
    if not 0 <= step < _MAX_STEPS:
        raise ValueError(f"a noise counter holds steps 0 to {_MAX_STEPS - 1}; got {step}.")
    index = torch.arange(count, device=slot.device)[None, :]
    fixed = [torch.full_like(index, word) for word in (round & MASK, stream)]
    return torch.stack(torch.broadcast_tensors(index, (step | slot << 8)[:, None], *fixed), dim=-1)


def noise_words(count: int, step: int, slot: Tensor, round: int, stream: int, seed: Tensor) -> Tensor:
    """[batch, count, 4] words of those counters, under the requests' `seed` [batch] int64."""
    return philox(noise_counters(count, step, slot, round, stream), philox_key(seed)[:, None, :])


def f32(value: float) -> float:
    """The fp32 nearest to `value`, as a Python float."""
    return torch.tensor(value, dtype=torch.float32).item()


def fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a b + c, rounded once. A Python float must hold an fp32 value.

    The product is exact in fp64. The sum is rounded to odd there, so that rounding it once more, to fp32, is the only rounding
    that counts (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """
    product = a.double() * (b.double() if isinstance(b, Tensor) else b)
    addend = c.double() if isinstance(c, Tensor) else c
    total = product + addend
    grown = total - product
    lost = (product - (total - grown)).add_(grown.neg_().add_(addend))
    bits = total.view(torch.int64) - (lost * total < 0).long()  # truncated
    return bits.bitwise_or_((lost.abs_() > 0).long()).view(torch.float64).float()


_LOG1P = tuple(map(f32, (-0.100823656, 0.16180485, -0.17243223, 0.19906873, -0.24971229, 0.33334714, -0.5000032)))
_EXP2 = tuple(map(f32, (0.009585382, 0.055906627, 0.24024038, 0.6931242, 1.0)))
_LN2_UNITS = float.fromhex("0x1.62e43p-24")
_SQRT_HALF_BITS = 0x3F3504F3
_EXPONENT_BITS = -(1 << 23)  # 0xFF800000


def log_positive(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal numbers."""
    exponent, f = _split(x)
    return fma(exponent.float(), _LN2_UNITS, _log1p(f))


def exponential(word: Tensor) -> Tensor:
    """E ~ Exp(1) = -log(1 - u), u = (word + 1/2) / 2^32; small u keep their digits, and so do small 1 - u."""
    unit, half = 2.0**-32, 2.0**-33
    u = fma(word.float(), unit, half)
    exponent, f = _split(fma((MASK - word).float(), unit, half))
    return fma(exponent.float(), -_LN2_UNITS, -_log1p(torch.where(exponent == 0, -u, f)))


def gumbel(word: Tensor) -> Tensor:
    """G ~ Gumbel(0, 1), between -3.13 and 22.88."""
    return -log_positive(exponential(word))


def uniform(word: Tensor) -> Tensor:
    """U ~ Uniform(0, 1) = (word // 2^9 + 1/2) / 2^23, exactly and strictly inside."""
    return (word >> 9).float() * 2.0**-23 + 2.0**-24


def exp2_weight(t: Tensor) -> Tensor:
    """2^(126 (t - 1)) for t in [0, 1]: a weight between 2^-126 and 1."""
    shift = 1.5 * 2.0**23 - WEIGHT_SPAN
    shifted = fma(t, WEIGHT_SPAN, shift)
    power = _horner(_EXP2, fma(t, WEIGHT_SPAN, shift - shifted))
    return (power.view(torch.int32) + (shifted.view(torch.int32) << 23)).view(torch.float32)


def fma_sat(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a b + c, rounded once and clamped into [0, 1]; a NaN is 0."""
    return fma(a, b, c).nan_to_num(0.0, 1.0, 0.0).clamp(0.0, 1.0)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = 2^e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)): e in units of 2^-23 as int32, and f."""
    bits = x.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS) & _EXPONENT_BITS
    return exponent, (bits - exponent).view(torch.float32) - 1.0


def _log1p(f: Tensor) -> Tensor:
    return fma(f * f, _horner(_LOG1P, f), f)


def _horner(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """The polynomial with these coefficients, highest power first."""
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = fma(value, x, coefficient)
    return value
