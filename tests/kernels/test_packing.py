"""Packed bytes against a model of mma.sync written from the fragment tables of the PTX ISA, and against the kernels' own row numbers.

The model decodes what lane (g, t) of a warp holds and multiplies. The kernels' reads (walk_resident.cuh, walk_streaming.cuh, latent.cuh) are
replayed in Python, so a packing that agrees with them gives exactly rows @ latent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kernels.packing import fragments, latent_records, resident_scales, resident_weights, streaming_weights
from kernels.placement import RANK, TILE_ROWS, WARPS, Place, Placement
from kernels.quantize import Int8Rows, TwoPlanes, exact_sums, quantize_rows, two_planes

Array = NDArray[Any]
LANES = [(lane // 4, lane % 4) for lane in range(32)]  # groupID, threadID_in_group


def product_s8(a: Array, b: Array, c: Array) -> Array:
    """mma.sync.m16n8k32 .s8, PTX ISA 9.7.14.5.10: a [32, 4 registers, 4 bytes], b [32, 2, 4] int8; c [32, 4] int64, lane by lane."""
    matrix_a, matrix_b = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64)
    for lane, (group, thread) in enumerate(LANES):
        for i in range(16):
            row = group if i < 4 or 8 <= i < 12 else group + 8
            matrix_a[row, thread * 4 + (i & 3) + (16 if i >= 8 else 0)] = a[lane, i // 4, i % 4]
        for i in range(8):
            matrix_b[thread * 4 + (i & 3) + (16 if i >= 4 else 0), group] = b[lane, i // 4, i % 4]
    return c + _accumulators(matrix_a @ matrix_b)


def product_bf16(a: Array, b: Array, c: Array) -> Array:
    """mma.sync.m16n8k16 .bf16, PTX ISA 9.7.14.5.8: a [32, 4 registers, 2 values], b [32, 2, 2]; c [32, 4]; exact in float64."""
    matrix_a, matrix_b = np.zeros((16, 16)), np.zeros((16, 8))
    for lane, (group, thread) in enumerate(LANES):
        for i in range(8):
            row = group if i < 2 or 4 <= i < 6 else group + 8
            matrix_a[row, thread * 2 + (i & 1) + (8 if i >= 4 else 0)] = a[lane, i // 2, i % 2]
        for i in range(4):
            matrix_b[thread * 2 + (i & 1) + (8 if i >= 2 else 0), group] = b[lane, i // 2, i % 2]
    return c + _accumulators(matrix_a @ matrix_b)


def _accumulators(matrix: Array) -> Array:
    """C and D: register i of lane (g, t) is row g (i < 2) or g + 8, column 2 t + i % 2."""
    return np.array([[matrix[group + 8 * (i // 2), thread * 2 + i % 2] for i in range(4)] for group, thread in LANES])


def operand_b(planes: Array, k_step: int) -> Array:
    """b0 and b1 of every lane as the kernels read them from `planes` [requests, 2, bytes] uint8: chunk t + 4 (k / 2), half k % 2.

    Column g of B is plane g % 2 of request g / 2, and again from the first request on.
    """
    chunks = planes.reshape(len(planes), 2, -1, 4, 4)  # request, plane, 16-byte chunk, register (x, y, z, w), byte
    half = [2, 3] if k_step % 2 else [0, 1]
    return np.stack([chunks[group // 2 % len(planes), group % 2, thread + 4 * (k_step // 2), half] for group, thread in LANES])


def tile_s8(packed: Array, planes: Array) -> Array:
    """[32 lanes, 4] accumulators of one packed int8 tile [k-steps, 32, 16] uint8 and latents [requests, 2, rank] int8."""
    d = np.zeros((32, 4), np.int64)
    for k, a in enumerate(packed):
        d = product_s8(a.reshape(32, 4, 4).view(np.int8), operand_b(planes.view(np.uint8), k).view(np.int8), d)
    return d


def tile_bf16(packed: Array, latent: Array) -> Array:
    """[32 lanes, 4] accumulators of one packed bf16 tile and one latent [rank] as bf16 bits; every column holds the latent."""
    both = np.stack([latent, latent]).view(np.uint8)[None]
    d = np.zeros((32, 4))
    for k, a in enumerate(packed):
        d = product_bf16(widened(a.reshape(32, 4, 4).view(np.uint16)), widened(operand_b(both, k).copy().view(np.uint16)), d)
    return d


def widened(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def integers(*shape: int, low: int = -127, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def latents_of(count: int, seed: int, rank: int = RANK) -> TwoPlanes:
    return TwoPlanes(integers(count, rank, seed=seed), integers(count, rank, low=-128, seed=seed + 1), torch.ones(count))


def sums_of(d: Array) -> Array:
    """[4, 16] sums of a tile by column pair and row: 256 hi + lo of columns 2 t and 2 t + 1, as lane t of a quad forms them."""
    pairs = d[:, [0, 2]] * 256 + d[:, [1, 3]]
    return pairs.reshape(8, 4, 2).transpose(1, 2, 0).reshape(4, 16)


@pytest.mark.parametrize("rank", [128, 256, 512])
def test_int8_fragments_times_the_latent_are_the_exact_sums(rank: int) -> None:
    rows, planes = Int8Rows(integers(32, rank, seed=7), torch.ones(32)), latents_of(1, 3, rank)
    packed = fragments(rows.q.view(torch.uint8)).numpy()
    both = torch.cat([planes.hi, planes.lo]).numpy()[None]
    sums = np.concatenate([sums_of(tile_s8(tile, both)) for tile in packed], axis=1)
    assert (sums == exact_sums(rows, planes).long().numpy()).all(), "one request fills all columns"


@pytest.mark.parametrize("rank", [64, 256])
def test_bf16_fragments_times_the_latent_are_the_products(rank: int) -> None:
    generator = torch.Generator().manual_seed(5)
    rows, latent = torch.randn(32, rank, generator=generator).bfloat16(), torch.randn(rank, generator=generator).bfloat16()
    packed = streaming_weights(rows, 48).numpy().reshape(3, rank // 16, 32, 16)
    expected = (rows.double() @ latent.double()).numpy()
    for tile, packed_tile in enumerate(packed[:2]):
        d = tile_bf16(packed_tile, latent.view(torch.int16).numpy().view(np.uint16)).reshape(8, 4, 2, 2)
        np.testing.assert_allclose(d, np.broadcast_to(d[:, :1, :, :1], d.shape), rtol=0, err_msg="all columns are alike")
        np.testing.assert_allclose(d[:, 0, :, 0].T.reshape(16), expected[tile * 16 : tile * 16 + 16], rtol=1e-12, atol=1e-12)
    assert not packed[2].any(), "padding is zero"


@given(lead=st.lists(st.integers(1, 3), max_size=2), tiles=st.integers(1, 4), row_bytes=st.sampled_from([128, 256, 512]), data=st.data())
def test_fragments_are_a_permutation_and_lie_where_the_kernels_read(
    lead: list[int], tiles: int, row_bytes: int, data: st.DataObject
) -> None:
    places = torch.arange(int(np.prod(lead)) * tiles * 16 * row_bytes).reshape(*lead, tiles * 16, row_bytes)
    packed = fragments(places)
    assert packed.shape == (*lead, tiles, row_bytes // 32, 32, 16)
    assert torch.equal(packed.flatten().sort().values, places.flatten()), "unpacking what was packed gives it back"
    tile, k, lane = (data.draw(st.integers(0, size - 1)) for size in (tiles, row_bytes // 32, 32))
    word, byte = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    row = tile * 16 + lane // 4 + 8 * (word % 2)
    column = 16 * (lane % 4 + 4 * (k // 2)) + 8 * (k % 2) + 4 * (word // 2) + byte
    assert torch.equal(packed[..., tile, k, lane, 4 * word + byte], places[..., row, column])


def placement_of(vocab: int, split: tuple[int, int, int], requests: int = 1, weights: str = "int8") -> Placement:
    """Two CTAs or fewer, whose warps have `split` tiles in registers, in shared memory and streamed."""
    rows = WARPS * sum(split) * TILE_ROWS
    return Placement(vocab, 1, -(-vocab // rows), *split, stages=2 * (split[2] > 0), base_slots=1, requests=requests, weights=weights)


def resident_tiles(packed: torch.Tensor, placement: Placement) -> dict[int, Array]:
    """Every packed tile [k-steps, 32, 16] by its first row of W2, read and numbered as walk_resident.cuh does.

    A CTA has register tiles, warp after warp, then those that stay in shared memory, then the streamed ones in units of 4 KB. A warp's rows are
    numbered in the order of `places` (held against the kernel's in test_placement.py).
    """
    counts = {place: placement.places.count(place) for place in Place}
    units = packed.numpy().reshape(placement.ctas, WARPS * placement.tiles, -1, 8, 32, 16)  # 4 KB: 8 k-steps of a tile
    found: dict[int, Array] = {}
    for cta in range(placement.ctas):
        for warp in range(WARPS):
            first, before = {}, 0
            for place, count in counts.items():
                first[place] = before + warp * count
                before += WARPS * count
            for number, place in enumerate(placement.places):
                row = cta * placement.rows_per_cta + (warp * placement.tiles + number) * TILE_ROWS
                found[row] = units[cta, first[place] + placement.places[:number].count(place)].reshape(-1, 32, 16)
    return found


def decoded(tile: Array) -> Array:
    """[16, row bytes] uint8 rows of a packed tile: the inverse of the A table, k-order undone as `operand_b` reads the latent."""
    rows = np.zeros((16, 32 * len(tile)), np.uint8)
    for k in range(len(tile)):
        for lane, (group, thread) in enumerate(LANES):
            for register in range(4):
                start = 16 * (thread + 4 * (k // 2)) + 8 * (k % 2) + 4 * (register // 2)
                rows[group + 8 * (register % 2), start : start + 4] = tile[k, lane, 4 * register : 4 * register + 4]
    return rows


def rows_of(vocab: int, weights: str) -> torch.Tensor:
    rows = integers(vocab, RANK, seed=vocab)
    return rows if weights == "int8" else rows.bfloat16()


SPLITS = [(1, 0, 0), (6, 3, 0), (0, 5, 0), (9, 0, 0), (6, 4, 5), (0, 0, 3), (3, 1, 2), (2, 0, 6), (5, 1, 1)]


@pytest.mark.parametrize("weights", ["int8", "bf16"])
@pytest.mark.parametrize("split", SPLITS)
def test_every_row_lies_once_where_the_kernel_numbers_it(split: tuple[int, int, int], weights: str) -> None:
    vocab = WARPS * sum(split) * TILE_ROWS + 77
    placement, rows = placement_of(vocab, split, weights=weights), rows_of(vocab, weights)
    packed = resident_weights(rows, placement)
    count = placement.ctas * placement.rows_per_cta
    assert (packed.dtype, packed.numel()) == (torch.uint8, count * RANK * rows.itemsize)
    found = resident_tiles(packed, placement)
    assert sorted(found) == list(range(0, count, TILE_ROWS))
    kept = found if sum(split) < 4 else dict(list(found.items())[:: sum(split) - 1])  # decoding is slow
    padded = np.zeros((count, RANK * rows.itemsize), np.uint8)
    padded[:vocab] = rows.view(torch.uint8).numpy()
    for row, tile in kept.items():
        assert (decoded(tile) == padded[row : row + TILE_ROWS]).all(), f"rows {row} to {row + TILE_ROWS}, zero past the vocabulary"


def test_every_row_lies_once_where_the_kernel_numbers_it_whole() -> None:
    """Byte for byte, without decoding: tiles are `fragments` of their rows."""
    for split in SPLITS:
        vocab = 2 * WARPS * sum(split) * TILE_ROWS - 3
        placement, rows = placement_of(vocab, split), rows_of(vocab, "int8")
        padded = torch.cat([rows, torch.zeros(3, RANK, dtype=torch.int8)])
        expected = fragments(padded.view(torch.uint8)).numpy()
        for row, tile in resident_tiles(resident_weights(rows, placement), placement).items():
            assert (tile == expected[row // TILE_ROWS]).all()


@pytest.mark.parametrize("split", [(6, 3, 0), (1, 0, 2)])
def test_row_scales_stand_in_pairs(split: tuple[int, int, int]) -> None:
    """float2 row_scale[kRows / 2] of a CTA: rows g and g + 8 of a tile."""
    vocab = WARPS * sum(split) * TILE_ROWS + 41
    placement = placement_of(vocab, split)
    scale = resident_scales(1.0 + torch.arange(vocab, dtype=torch.float32), placement)
    assert (scale.dtype, scale.numel()) == (torch.float32, placement.ctas * placement.rows_per_cta)
    pairs = scale.numpy().reshape(placement.ctas, -1, 2)
    for row in range(scale.numel()):
        cta, local = divmod(row, placement.rows_per_cta)
        assert pairs[cta, local // 16 * 8 + local % 8, local % 16 // 8] == (row + 1.0 if row < vocab else 0.0)


@pytest.mark.parametrize("requests", [1, 2, 4])
def test_a_resident_step_gives_the_exact_sum_of_every_row_and_request(requests: int) -> None:
    placement = placement_of(1200, (3, 1, 1), requests)
    assert {*placement.places} == {*Place}, "all tiers take part"
    head = torch.randn(1200, RANK, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows, planes = quantize_rows(head), two_planes(head[41 : 41 + requests])
    packed = resident_weights(rows.q, placement)
    expected = exact_sums(rows, planes).long().numpy()
    records = latent_records(planes).numpy()
    both = np.stack([records[:, :RANK], records[:, RANK : 2 * RANK]], axis=1)  # request, plane
    for row, tile in list(resident_tiles(packed, placement).items())[::7]:
        sums = sums_of(tile_s8(tile, both))
        wanted = np.zeros((requests, TILE_ROWS), np.int64)
        wanted[:, : max(1200 - row, 0)] = expected[:, row : row + TILE_ROWS]
        assert (sums == wanted[np.arange(4) % requests]).all(), "lane t has request t % requests"


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_streaming_rows_lie_in_order(dtype: torch.dtype) -> None:
    rows = integers(50, RANK, seed=2).to(dtype)
    row_bytes = RANK * dtype.itemsize
    packed = streaming_weights(rows, 96)
    assert packed.shape == (96 * row_bytes,)
    padded = torch.zeros(96, RANK, dtype=dtype)
    padded[:50] = rows
    assert torch.equal(packed.reshape(6, -1), torch.stack([fragments(tile.view(torch.uint8)).flatten() for tile in padded.split(16)]))


def test_streaming_takes_strided_rows() -> None:
    rows = integers(16, 2 * RANK, seed=4)[:, ::2]
    assert torch.equal(streaming_weights(rows, 16), streaming_weights(rows.contiguous(), 16))


def test_latent_records_lay_out_planes_scale_and_padding() -> None:
    planes = TwoPlanes(integers(5, RANK, seed=0), integers(5, RANK, low=-128, seed=1), torch.tensor([0.0, 1.5, -0.0, torch.nan, 3e-39]))
    records = latent_records(planes).numpy()
    assert records.shape == (5, 2 * RANK + 16)
    for row, record in enumerate(records):
        assert record[:RANK].tobytes() == planes.hi[row].numpy().tobytes()
        assert record[RANK : 2 * RANK].tobytes() == planes.lo[row].numpy().tobytes()
        assert record[2 * RANK : 2 * RANK + 4].tobytes() == planes.scale_lo[row].numpy().tobytes()
        assert not record[2 * RANK + 4 :].any()
