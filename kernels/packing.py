"""Where each byte of W2 and W1 lies for the walk kernels. Pure permutations: unpacking what was packed gives it back.

A tile of 16 rows is stored as the A operands of m16n8k32 (int8) or m16n8k16 (bf16), one 16-byte load a lane and k-step. The
order of K inside a dot product is free as long as A and B agree, so lane (g, t) takes the row's chunks t, t + 4, t + 8, ...: its B
operand is then whole 16-byte chunks of the latent. Half h of chunk t + 4 i serves k-step 2 i + h; word e of the load
is row g + 8 (e % 2), bytes 4 (e // 2) of that half.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.placement import WARPS, Placement
from kernels.quantize import Int8Rows, TwoPlanes

FRAGMENT_ROWS = 16


def fragments(rows: Tensor) -> Tensor:
    """[..., n * 16, row_bytes] uint8 -> [..., n, row_bytes / 32, 32 lanes, 16] uint8; row_bytes a multiple of 128."""
    *lead, count, row_bytes = rows.shape
    split = rows.reshape(*lead, count // FRAGMENT_ROWS, 2, 8, row_bytes // 64, 4, 2, 2, 4)
    n = len(lead)  # axes after it: tile, upper row, g, i, t, half, upper word, byte
    order = [n + axis for axis in (0, 3, 5, 2, 4, 6, 1, 7)]
    return split.permute(*range(n), *order).reshape(*lead, count // FRAGMENT_ROWS, row_bytes // 32, 32, 16).contiguous()


def resident_weights(rows: Int8Rows, placement: Placement) -> tuple[Tensor, Tensor]:
    """W2 for walk_resident.cuh: CTA after CTA, first its register tiles, then its shared-memory tiles, warp after warp.

    Returns the packed bytes [ctas * rows_per_cta * rank] uint8 and the row scales [ctas * rows_per_cta] fp32, in which rows g and
    g + 8 of a tile stand side by side. Rows past the vocabulary are zero.
    """
    count = placement.ctas * placement.rows_per_cta
    tiles = fragments(_padded(rows.q.view(torch.uint8), count)).reshape(placement.ctas, WARPS, placement.tiles, -1)
    in_registers = placement.in_registers
    parts = [tiles[:, :, [i for i, held in enumerate(in_registers) if held is want]].flatten(1) for want in (True, False)]
    scale = _padded(rows.scale, count).reshape(-1, 2, 8).transpose(1, 2).reshape(-1)
    return torch.cat(parts, dim=1).reshape(-1), scale.contiguous()


def streaming_weights(rows: Tensor, padded_rows: int) -> Tensor:
    """W2 [vocab, rank] int8 or bf16 for walk_streaming.cuh: fragments in row order, zero rows at the end; uint8."""
    return fragments(_padded(rows.contiguous().view(torch.uint8), padded_rows)).reshape(-1)


def latent_records(planes: TwoPlanes) -> Tensor:
    """W1 as the kernels fetch it: [n, 2 rank + 16] uint8, plane hi, plane lo, the fp32 scale of lo, 12 bytes of padding."""
    scale = functional.pad(planes.scale_lo[:, None].contiguous().view(torch.uint8), (0, 12))
    return torch.cat([planes.hi.view(torch.uint8), planes.lo.view(torch.uint8), scale], dim=1).contiguous()


def _padded(rows: Tensor, count: int) -> Tensor:
    return functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, count - rows.shape[0]))
