"""The INT8 rule: int8 rows of W2, two int8 planes of a latent, exact integer sums, one rounding. The same bits on CPU and GPU.

Every fp32 operation below is rounded on its own (eager torch never fuses a multiply with an add), so a kernel that wants
these bits must use __fmul_rn/__fadd_rn. Divisors are device tensors: torch on CUDA divides by a Python number as a
multiplication with its reciprocal, which is a different rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_RANK = 512  # |256 q_w.q_hi + q_w.q_lo| <= 127 (256 * 127 + 128) rank must fit int32
_CHUNK_ROWS = 16384  # bounds the scratch: 16 MiB of fp32 a temporary at rank 256


@dataclass(frozen=True)
class Int8Rows:
    """Rows of a matrix as w ~ scale * q, |error| <= scale / 2.

    q:     [n, rank] int8 in [-127, 127]
    scale: [n] fp32, max|w| / 127; 0 for a zero row; NaN (with q = 0) for a row that holds a NaN or an infinity
    """

    q: Tensor
    scale: Tensor

    def to(self, device: torch.device | str) -> Int8Rows:
        return Int8Rows(self.q.to(device), self.scale.to(device))

    def dequantized(self) -> Tensor:
        """[n, rank] float64, exactly scale * q."""
        return self.q.double() * self.scale.double()[:, None]


@dataclass(frozen=True)
class TwoPlanes:
    """Latents as u ~ scale_lo * (256 hi + lo), |error| <= 1.001 scale_lo (128 clamps to 127): 15 bits from two int8 operands.

    hi:       [n, rank] int8 in [-127, 127], the rounding of u / (256 scale_lo)
    lo:       [n, rank] int8 in [-128, 127], the rounded rest in units of scale_lo
    scale_lo: [n] fp32, max|u| / 127 / 256; 0 and NaN as for `Int8Rows.scale`
    """

    hi: Tensor
    lo: Tensor
    scale_lo: Tensor

    def to(self, device: torch.device | str) -> TwoPlanes:
        return TwoPlanes(self.hi.to(device), self.lo.to(device), self.scale_lo.to(device))

    def dequantized(self) -> Tensor:
        """[n, rank] float64, exactly scale_lo * (256 hi + lo)."""
        return (256 * self.hi.double() + self.lo.double()) * self.scale_lo.double()[:, None]


def quantize_rows(w: Tensor) -> Int8Rows:
    """[n, rank] bf16/fp16/fp32 -> int8 rows: scale = max|w| / 127, q = round-half-even(w / scale)."""
    _check_matrix(w)
    parts = [_rows(chunk.float()) for chunk in w.split(_CHUNK_ROWS)]
    return Int8Rows(*(torch.cat(column) for column in zip(*parts, strict=True)))


def two_planes(u: Tensor) -> TwoPlanes:
    """[n, rank] bf16/fp16/fp32 -> two int8 planes.

    hi = round-half-even(u / s_hi) with s_hi = max|u| / 127; rest = u - s_hi * hi, two roundings;
    lo = clamp(round-half-even(rest / s_lo), -128, 127) with s_lo = s_hi / 256. Where a scale is 0 the codes are 0.
    """
    _check_matrix(u)
    parts = [_planes(chunk.float()) for chunk in u.split(_CHUNK_ROWS)]
    return TwoPlanes(*(torch.cat(column) for column in zip(*parts, strict=True)))


def exact_sums(rows: Int8Rows, planes: TwoPlanes) -> Tensor:
    """[n, V] float64, exactly 256 q_w.q_hi + q_w.q_lo: the int32 that a kernel accumulates.

    float64 holds these integers (and every partial sum) exactly and no TF32 switch touches it.
    """
    latents = 256 * planes.hi.double() + planes.lo.double()
    return torch.cat([latents @ chunk.double().T for chunk in rows.q.split(_CHUNK_ROWS)], dim=1)


def int8_bias(rows: Int8Rows, planes: TwoPlanes) -> Tensor:
    """[n, V] fp32 bias: fp32(scale_w * s_lo) * fp32(x), two multiplications, each rounded."""
    scales = planes.scale_lo[:, None] * rows.scale[None, :]
    return scales * exact_sums(rows, planes).float()


def _check_matrix(w: Tensor) -> None:
    if w.ndim != 2 or w.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"quantization needs a [rows, rank] bf16, fp16 or fp32 matrix; got shape {tuple(w.shape)} {w.dtype}.")
    if not 1 <= w.shape[1] <= MAX_RANK:
        raise ValueError(f"the int32 sums of the INT8 rule hold ranks 1 to {MAX_RANK}; got rank {w.shape[1]}.")


def _rows(w: Tensor) -> tuple[Tensor, Tensor]:
    scale = _scale(w)
    return _codes(w, scale, -127), scale


def _planes(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale_hi = _scale(u)
    scale_lo = scale_hi / _number(256.0, u)
    hi = _codes(u, scale_hi, -127)
    rest = u - scale_hi[:, None] * hi.float()
    return hi, _codes(rest, scale_lo, -128), scale_lo


def _scale(w: Tensor) -> Tensor:
    """max|w| / 127 for each row; NaN where it is not finite, so that such a row gives NaN logits and no garbage codes."""
    largest = w.abs().amax(dim=1)
    return torch.where(largest.isfinite(), largest / _number(127.0, w), torch.nan)


def _codes(w: Tensor, scale: Tensor, lowest: int) -> Tensor:
    usable = (scale > 0)[:, None]
    quotient = w / torch.where(usable, scale[:, None], 1.0)
    return torch.where(usable, quotient.round().clamp(lowest, 127), 0.0).to(torch.int8)


def _number(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)
