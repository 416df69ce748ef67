"""Rows of W2 in an 8-bit float under one fp32 scale, as int8 rows have it: what the formats that this suite does not run would lose.

As in `kernels.quantize` every fp32 operation is rounded on its own and divisors are device tensors, so CPU and GPU give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_CHUNK_ROWS = 16384  # bounds the scratch: 16 MiB of fp32 a temporary at rank 256


@dataclass(frozen=True)
class Float8Rows:
    """Rows of a matrix as w ~ scale * q, |error| <= max(|w| * half, scale * tiny): `half` is half a step of the largest mantissa, `tiny` of the smallest.

    q:     [n, rank] float8_e4m3fn (half 2^-4, tiny 2^-10) or float8_e5m2 (half 2^-3, tiny 2^-17), finite
    scale: [n] fp32, max|w| over the format's largest value, 448 or 57,344; 0 for a zero row; NaN (with q = 0) for a row that holds a NaN
           or an infinity
    """

    q: Tensor
    scale: Tensor

    def dequantized(self) -> Tensor:
        """[n, rank] float64, exactly scale * q."""
        return self.q.double() * self.scale.double()[:, None]


def quantize_float8(w: Tensor, dtype: torch.dtype) -> Float8Rows:
    """[n, rank] bf16/fp16/fp32 -> rows of `dtype` (E4M3 or E5M2): scale = max|w| / largest value, q = w / scale rounded half to even.

    Raises:
        ValueError: no such matrix, or another dtype.
    """
    if dtype not in (E4M3, E5M2):
        raise ValueError(f"rows can be torch.float8_e4m3fn or torch.float8_e5m2; got {dtype}.")
    if w.ndim != 2 or 0 in w.shape or w.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"quantization needs a non-empty [rows, rank] bf16, fp16 or fp32 matrix; got shape {tuple(w.shape)} {w.dtype}.")
    parts = [_rows(chunk.float(), dtype) for chunk in w.split(_CHUNK_ROWS)]
    return Float8Rows(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _rows(w: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    top = torch.full((), torch.finfo(dtype).max, dtype=torch.float32, device=w.device)
    largest = w.abs().amax(dim=1)
    scale = torch.where(largest.isfinite(), largest / top, torch.nan)
    usable = (scale > 0)[:, None]
    quotient = w / torch.where(usable, scale[:, None], 1.0)
    # A rounded scale may lift the largest quotient past the top, where the conversion to float8 may give NaN or infinity.
    return torch.where(usable, quotient.clamp(-top, top), 0.0).to(dtype), scale
