"""From random words to noise, the same bits as `kernels/cuda/common/noise.cuh`: fp32, every multiplication, addition and fma rounded once.
Powers of two are the hardware's, from the table that the header has too.

Words are int64 tensors in [0, 2^32); numbers are fp32 tensors. Runs on CPU and GPU. Error bounds stand in the header and are tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cache

import torch
from torch import Tensor

from kernels.build import CUDA_ROOM
from kernels.philox import MASK, philox, philox_key

ROWS_PER_WORDS = 4  # GUMBEL: row r takes word r % 4 of index r // 4
GROUP_ROWS = 16  # GROUPS: rows of a group
BLOCK_ROWS = 64  # GROUPS: rows of four groups
GROUPS_PER_WORDS = 4  # GROUPS: group g takes word g % 4 of index g // 4, in both of its streams
_MAX_STEPS = 256  # a counter's second word is step | slot << 8


class Stream(IntEnum):
    """Word 3 of a counter. No two streams share a word; a walk never uses the verifier's."""

    DRAFT_ROWS = 0x44520001  # rule GUMBEL
    DRAFT_GROUPS = 0x44520002  # rule GROUPS, which group
    DRAFT_PLACES = 0x44520003  # rule GROUPS, which of its rows
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
    """a b + c, rounded once. A Python float must hold an fp32 value."""
    return _fma_odd(a, b, c).float()


def fma_down(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """The same rounded down."""
    exact = _fma_odd(a, b, c)
    nearest = exact.float()
    return torch.where(nearest.double() > exact, nearest.nextafter(torch.full_like(nearest, -torch.inf)), nearest)


def _fma_odd(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a b + c in fp64, rounded to odd, so that rounding it once more, to fp32, is the only rounding that counts (Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008). The product is exact there."""
    product = a.double() * (b.double() if isinstance(b, Tensor) else b)
    addend = c.double() if isinstance(c, Tensor) else c
    total = product + addend
    grown = total - product
    lost = (product - (total - grown)).add_(grown.neg_().add_(addend))
    bits = total.view(torch.int64) - (lost * total < 0).long()  # truncated
    return bits.bitwise_or_((lost.abs_() > 0).long()).view(torch.float64)


_LOG1P = tuple(map(f32, (-0.100823656, 0.16180485, -0.17243223, 0.19906873, -0.24971229, 0.33334714, -0.5000032)))
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


def exp2_units(x: Tensor) -> Tensor:
    """2^x for x <= 0 that is a multiple of 2^-12; 0 below -126, where -inf is too, and NaN for a NaN."""
    units = (x.nan_to_num().clamp(-126.0, 0.0) * 4096.0).int() + (127 << 12)
    power = (units >> 12 << 23 | _exp2_mantissas(x.device)[units & 4095]).view(torch.float32)
    return power.masked_fill(x < -126.0, 0.0).masked_fill(x.isnan(), torch.nan)


@cache
def _exp2_mantissas(device: torch.device) -> Tensor:
    """[4096] int32 mantissas of 2^(j / 4096), recorded on the hardware."""
    words = (CUDA_ROOM / "common" / "exp2_table.inc").read_text().replace(",", " ").split()
    return torch.tensor([int(word, 16) for word in words], dtype=torch.int32, device=device)


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
