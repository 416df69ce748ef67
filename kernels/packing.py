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

from kernels.placement import BATCHED_TILE_ROWS, WARPS, BatchedPlacement, Place, Placement
from kernels.quantize import TwoPlanes

FRAGMENT_ROWS = 16


def fragments(rows: Tensor) -> Tensor:
    """[..., n * 16, row_bytes] uint8 -> [..., n, row_bytes / 32, 32 lanes, 16] uint8; row_bytes a multiple of 128."""
    *lead, count, row_bytes = rows.shape
    split = rows.reshape(*lead, count // FRAGMENT_ROWS, 2, 8, row_bytes // 64, 4, 2, 2, 4)
    n = len(lead)  # axes after it: tile, upper row, g, i, t, half, upper word, byte
    order = [n + axis for axis in (0, 3, 5, 2, 4, 6, 1, 7)]
    return split.permute(*range(n), *order).reshape(*lead, count // FRAGMENT_ROWS, row_bytes // 32, 32, 16).contiguous()


def resident_weights(rows: Tensor, placement: Placement) -> Tensor:
    """W2 [vocab, rank] int8 or bf16 for walk_resident.cuh: CTA after CTA its register tiles, its shared-memory tiles and its streamed tiles,
    each kind warp after warp. uint8; rows past the vocabulary are zero.
    """
    count = placement.ctas * placement.rows_per_cta
    tiles = fragments(_padded(rows.contiguous().view(torch.uint8), count)).reshape(placement.ctas, WARPS, placement.tiles, -1)
    places = placement.places
    parts = [tiles[:, :, [i for i, place in enumerate(places) if place is want]].flatten(1) for want in Place]
    return torch.cat(parts, dim=1).reshape(-1)


def resident_scales(scale: Tensor, placement: Placement) -> Tensor:
    """Row scales [vocab] fp32 for walk_resident.cuh: [ctas * rows_per_cta], rows g and g + 8 of a tile side by side."""
    count = placement.ctas * placement.rows_per_cta
    return _padded(scale, count).reshape(-1, 2, 8).transpose(1, 2).reshape(-1).contiguous()


def batched_weights(rows: Tensor, placement: BatchedPlacement) -> Tensor:
    """W2 [vocab, rank] int8 for walk_batched.cuh: tiles of 64 rows as K-major B operands of wgmma, in 8 x 16-byte core matrices.

    A thread t of a quad reads columns 8 j + 2 t + e of its accumulators, e = 0, 1. They are rows 32 (j // 4) + 8 t + 2 (j % 4) + e of the
    tile, so that it holds twice eight rows in a row. The order of K is that of the latents which lane t loads in 16-byte chunks t, t + 4,
    ...: byte b of half h of k-step 2 i + s is byte 8 s + 4 h + b of chunk t + 4 i, at place 16 h + 4 t + b of the k-step.
    """
    count = placement.ctas * placement.rows_per_cta
    padded = _padded(rows.contiguous().view(torch.uint8), count)
    split = padded.reshape(
        count // BATCHED_TILE_ROWS, 2, 4, 4, 2, 4, 4, 2, 2, 4
    )  # tile, j // 4, t of row, j % 4, e, i, t of chunk, s, h, b
    return split.permute(0, 5, 7, 8, 1, 3, 2, 4, 6, 9).reshape(-1).contiguous()  # tile, i, s, h | j | t of row, e | t of chunk, b


def padded_scales(scale: Tensor, count: int) -> Tensor:
    """Row scales [vocab] fp32 -> [count], zeros at the end."""
    return _padded(scale, count).contiguous()


def streaming_weights(rows: Tensor, padded_rows: int) -> Tensor:
    """W2 [vocab, rank] int8 or bf16 for walk_streaming.cuh: fragments in row order, zero rows at the end; uint8."""
    return fragments(_padded(rows.contiguous().view(torch.uint8), padded_rows)).reshape(-1)


def latent_records(planes: TwoPlanes) -> Tensor:
    """W1 as the kernels fetch it: [n, 2 rank + 16] uint8, plane hi, plane lo, the fp32 scale of lo, 12 bytes of padding."""
    scale = functional.pad(planes.scale_lo[:, None].contiguous().view(torch.uint8), (0, 12))
    return torch.cat([planes.hi.view(torch.uint8), planes.lo.view(torch.uint8), scale], dim=1).contiguous()


def _padded(rows: Tensor, count: int) -> Tensor:
    return functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, count - rows.shape[0]))
