"""Weights of walk_batched.cuh against a model of wgmma written from the PTX ISA; the kernel's reads are replayed in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kernels.packing import batched_weights, padded_scales
from kernels.placement import RANK, BatchedPlacement
from kernels.quantize import Int8Rows, TwoPlanes, exact_sums

Array = NDArray[Any]
LANES = [(lane // 4, lane % 4) for lane in range(32)]  # groupID, threadID_in_group


def integers(*shape: int, low: int = -127, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def tile_wgmma(packed: Array, planes: Array) -> Array:
    """[4 warps, 32 lanes, 32] accumulators of one packed tile of 64 rows and 32 latents [32, 2 planes, rank] int8.

    wgmma.mma_async.m64n64k32 .s8, PTX ISA 9.7.15.5.1: A in registers, laid out as four times mma.sync's; B in shared memory, K-major without
    swizzle: 8 x 16-byte core matrices, `k_bytes` = 1024 from one to the next along K, `row_bytes` = 128 along N. A k-step is 2,048 bytes.
    """
    memory = packed.view(np.int8)
    d = np.zeros((4, 32, 32), np.int64)
    for step in range(RANK // 32):
        matrix_a, matrix_b = np.zeros((64, 32), np.int64), np.zeros((32, 64), np.int64)
        for n in range(64):
            for k in range(32):
                matrix_b[k, n] = memory[2048 * step + 1024 * (k // 16) + 128 * (n // 8) + 16 * (n % 8) + k % 16]
        for warp in range(4):
            for group, thread in LANES:
                chunks = planes[8 * warp + group].reshape(2, -1, 4, 4)[:, thread + 4 * (step // 2)]  # plane, register, byte
                first = 2 * (step % 2)
                registers = [chunks[0, first], chunks[1, first], chunks[0, first + 1], chunks[1, first + 1]]  # hi.x, lo.x, hi.y, lo.y
                for i in range(16):
                    row = 16 * warp + (group if i < 4 or 8 <= i < 12 else group + 8)
                    matrix_a[row, thread * 4 + (i & 3) + (16 if i >= 8 else 0)] = registers[i // 4][i % 4]
        product = matrix_a @ matrix_b
        for warp in range(4):
            for lane, (group, thread) in enumerate(LANES):
                for i in range(32):
                    d[warp, lane, i] += product[16 * warp + group + 8 * (i % 4 // 2), 8 * (i // 4) + 2 * thread + i % 2]
    return d


def batched_placement(vocab: int, tiles: int) -> BatchedPlacement:
    return BatchedPlacement(vocab, 1, -(-vocab // (64 * tiles)), tiles, tiles, 0, 32)


def test_a_batched_step_gives_the_exact_sum_of_every_row_and_request() -> None:
    """Thread t of a quad holds both planes of one request's logits of rows 8 t to 8 t + 7 and the eight 32 rows further: its place 2 j + e is
    d[4 j + e] and d[4 j + 2 + e]."""
    vocab, tiles = 500, 4
    placement = batched_placement(vocab, tiles)
    rows, latents = (
        Int8Rows(integers(vocab, RANK, seed=8), torch.ones(vocab)),
        TwoPlanes(integers(32, RANK, seed=11), integers(32, RANK, low=-128, seed=12), torch.ones(32)),
    )
    packed = batched_weights(rows.q, placement).numpy().reshape(placement.ctas * tiles, -1)
    planes = torch.stack([latents.hi, latents.lo], dim=1).numpy()
    expected = np.zeros((32, len(packed) * 64), np.int64)
    expected[:, :vocab] = exact_sums(rows, latents).long().numpy()
    for tile in (0, 3, 4, 7):
        d = tile_wgmma(packed[tile], planes)
        for warp in range(4):
            for lane, (group, thread) in enumerate(LANES):
                sums = [256 * d[warp, lane, 4 * (i // 2) + i % 2] + d[warp, lane, 4 * (i // 2) + 2 + i % 2] for i in range(16)]
                chunks = expected[8 * warp + group, 64 * tile : 64 * tile + 64].reshape(2, 4, 8)[:, thread]
                assert sums == chunks.reshape(-1).tolist()


@given(vocab=st.integers(1, 700), tiles=st.integers(4, 7))
def test_batched_tiles_are_permutations_of_their_rows_in_order(vocab: int, tiles: int) -> None:
    placement = batched_placement(vocab, tiles)
    rows = (torch.arange(vocab)[:, None] // 64 + 1).to(torch.int8).expand(vocab, RANK)  # a row's value is its tile
    packed = batched_weights(rows, placement).view(torch.int8).reshape(-1, 64 * RANK)
    assert len(packed) == placement.ctas * tiles
    for tile, held in enumerate(packed.tolist()):
        inside = min(max(vocab - 64 * tile, 0), 64) * RANK
        assert (held.count(tile + 1), held.count(0)) == (inside, 64 * RANK - inside)


def test_batched_scales_lie_in_row_order() -> None:
    assert padded_scales(torch.tensor([1.0, 2.0, 3.0]), 5).tolist() == [1.0, 2.0, 3.0, 0.0, 0.0]
