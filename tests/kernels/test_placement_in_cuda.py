"""The planner's bytes, and its order of tiles, are those of the CUDA structs: the compiler evaluates them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import pytest

from kernels.backends import streaming_sm90
from kernels.backends.streaming_sm90 import StreamingOptions, StreamingSm90
from kernels.build import BuildError
from kernels.device import load
from kernels.placement import SMALL_BATCH, WARPS, BatchedPlacement, Place, Placement, plan

HoldInCpp = Callable[[str, Iterable[str]], None]
CudaShape = Callable[[Placement | BatchedPlacement], str]
H200 = load("h200")
REQUESTS = [1, 2, 4, 8]
VOCABS = [1_000, 32_000, 49_153, 129_280, 151_936, 154_880, 163_840, 201_024, 248_320, 262_144]

RESIDENT = """#include "walk_resident.cuh"
template <wts::ResidentShape S>
struct Facts {
  using R = wts::Resident<S>;
  // Bit i: tile i of a warp, in the order of its rows, lives in registers (0), in shared memory (1) or is streamed (2).
  static constexpr unsigned long long tiles_in(int place) {
    unsigned long long bits = 0;
    for (int group = 0; group < R::kGroups; group++)
      for (int i = 0; i < R::tiles(group); i++) {
        const int far = i - (R::first_near(group + 1) - R::first_near(group));
        const int found = far < 0 ? 0 : R::streamed(R::first_far(group) + far) ? 2 : 1;
        if (found == place) bits |= 1ull << (R::first_tile(group) + i);
      }
    return bits;
  }
  // A lane quad shares out up to four tiles of a group (of fewer where it has more requests), whose rows follow those of the group before.
  static constexpr bool well_formed() {
    for (int group = 0; group < R::kGroups; group++) {
      const int tiles = R::tiles(group), near = R::first_near(group + 1) - R::first_near(group);
      if (tiles < 1 || tiles * (S.batch > 4 ? S.batch / 4 : 1) > 4 || near < 0 || near + R::first_far(group + 1) - R::first_far(group) != tiles) return false;
      if (R::first_tile(group) != R::first_near(group) + R::first_far(group)) return false;
    }
    return R::first_tile(0) == 0 && R::first_tile(R::kGroups) == R::kTiles && R::first_near(R::kGroups) == S.tiles_rf;
  }
};
"""


def resident_facts(placement: Placement, shape: str) -> list[str]:
    bits = [sum(1 << i for i, found in enumerate(placement.places) if found is place) for place in Place]
    base_bytes = 2 * placement.requests * placement.rows_per_cta * placement.base_slots
    kernel, facts = f"wts::Resident<{shape}>", f"Facts<{shape}>"
    return [
        *(f"{facts}::tiles_in({place}) == {wanted:#x}ull" for place, wanted in enumerate(bits)),
        f"{facts}::well_formed()",
        f"{kernel}::kRows == {placement.rows_per_cta} && {kernel}::kTiles == {placement.tiles}",
        f"{kernel}::kWarps == {WARPS} && {kernel}::kBatch == {placement.requests}",
        f"OFFSET(base, {kernel}::Smem) + {base_bytes} == {placement.smem_bytes_per_cta}",
        f"{placement.base_slots} > 1 || sizeof({kernel}::Smem) < {placement.smem_bytes_per_cta} + 128",
    ]


def small_shapes() -> Iterable[Placement]:
    """Splits that nobody plans, and what is planned."""
    for register_tiles, smem_tiles, streamed_tiles in (
        (0, 1, 0),
        (0, 13, 0),
        (9, 0, 0),
        (5, 1, 0),
        (6, 5, 2),
        (2, 0, 3),
        (1, 3, 9),
        (0, 0, 5),
    ):
        for weights in ("int8", "bf16"):
            yield Placement(
                0, 5, 132, register_tiles, smem_tiles, streamed_tiles, 2 * (streamed_tiles > 0), 1 + smem_tiles % 3, weights=weights
            )
    for i, vocab in enumerate(VOCABS):
        for requests in REQUESTS:
            small = requests <= SMALL_BATCH
            weights = "bf16" if small and i % 4 == 1 else "int8"
            placement = plan(vocab, 256, H200, batch=requests, sampling=small and (i + requests) % 2 == 0, weights=weights)
            assert isinstance(placement, Placement)
            yield placement


def test_rows_order_and_bytes_of_the_resident_kernel_are_the_planners(hold_in_cpp: HoldInCpp, cuda_shape: CudaShape) -> None:
    hold_in_cpp(RESIDENT, [fact for placement in small_shapes() for fact in resident_facts(placement, cuda_shape(placement))])


def batched_shapes() -> Iterable[BatchedPlacement]:
    """What is planned, and splits that nobody plans."""
    for i, (vocab, batch) in enumerate((vocab, batch) for vocab in VOCABS for batch in (5, 9, 16, 17, 32, 33, 64)):
        placement = plan(vocab, 256, H200, batch=batch, sampling=batch == 5 or i % 3 == 0)
        assert isinstance(placement, BatchedPlacement)
        yield placement
    for tiles, near, stages in (
        (1, 1, 0),
        (1, 0, 1),
        (1, 0, 2),
        (2, 1, 1),
        (3, 2, 2),
        (5, 2, 1),
        (6, 3, 1),
        (7, 4, 1),
        (7, 2, 2),
        (9, 0, 2),
        (32, 5, 2),
    ):
        for batch in (8, 16, 32, 64):
            members = 4 if batch <= 32 else 2
            yield BatchedPlacement(0, 5, 132, tiles * members, near * members, stages * members, batch, sampling=tiles % 2 == 0)


def streamed_tiles(placement: BatchedPlacement) -> list[int]:
    """Of a member: every other one, if these are just as many and it has one stage; else evenly from the first to the last."""
    tiles, streamed = placement.tiles // placement.members, placement.streamed_tiles // placement.members
    if placement.stages == placement.members and streamed == (tiles + 1) // 2:
        return list(range(0, tiles, 2))
    return [n * (tiles - 1) // (streamed - 1) for n in range(streamed)] if streamed > 1 else [0] * streamed


def batched_facts(placement: BatchedPlacement, shape: str) -> list[str]:
    kernel, members, streamed = f"wts::Batched<{shape}>", placement.members, streamed_tiles(placement)
    tiles = placement.tiles // members
    alternates = placement.stages == members and streamed == list(range(0, tiles, 2))
    before = [sum(other < tile for other in streamed) for tile in range(tiles)]
    return [
        f"sizeof({kernel}::Smem) == {placement.smem_bytes_per_cta}",
        f"{kernel}::kRows == {placement.rows_per_cta} && {kernel}::kThreads == {placement.threads}",
        f"{kernel}::kRequests == {placement.width} && {placement.width} >= {placement.requests} && {kernel}::kCopies == {placement.copies}",
        f"{kernel}::kMembers == {members} && {kernel}::kTiles == {tiles}",
        f"{kernel}::kResident == {placement.resident_tiles // members} && {kernel}::kStages == {placement.stages // members}",
        f"{kernel}::kAlternates == {str(alternates).lower()}",
        f"{kernel}::streamed_bits() == {sum(1 << tile for tile in streamed):#x}u",
        *(f"{kernel}::streamed_tile({n}) == {tile}" for n, tile in enumerate(streamed)),
        " && ".join(f"{kernel}::streams({tile}) == {str(tile in streamed).lower()}" for tile in range(tiles)),
        " && ".join(f"{kernel}::streamed_before({tile}) == {count}" for tile, count in enumerate(before)),
    ]


def test_rows_order_and_bytes_of_the_batched_kernel_are_the_planners(hold_in_cpp: HoldInCpp, cuda_shape: CudaShape) -> None:
    """Where a tile then lies, and when, is for test_batched_ring.py."""
    shapes = {cuda_shape(placement): placement for placement in batched_shapes()}
    hold_in_cpp('#include "walk_batched.cuh"', [fact for shape, placement in shapes.items() for fact in batched_facts(placement, shape)])


@pytest.mark.parametrize(
    ("tiles", "near", "stages", "message"),
    [
        (5, 5, 1, "only streamed tiles have stages"),
        (5, 2, 0, "only streamed tiles have stages"),
        (5, 2, 3, "only streamed tiles have stages"),
        (33, 3, 2, "a member's tiles are the bits of a word"),
        (256, 3, 2, "a key has 16 bits for a row"),
    ],
)
def test_shapes_that_the_batched_kernel_cannot_walk_do_not_compile(
    tiles: int, near: int, stages: int, message: str, hold_in_cpp: HoldInCpp, cuda_shape: CudaShape
) -> None:
    placement = BatchedPlacement(0, 5, 132, 4 * tiles, 4 * near, 4 * stages, 32)
    with pytest.raises(BuildError, match=message):
        hold_in_cpp('#include "walk_batched.cuh"', [f"sizeof(wts::Batched<{cuda_shape(placement)}>) > 0"])


def test_bytes_of_the_streaming_kernel_are_the_backends(hold_in_cpp: HoldInCpp, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 latents are shorter than the int8 ones that both are given room for: 576 bytes."""
    sources: list[str] = []
    monkeypatch.setattr(streaming_sm90, "build", lambda source, *_, **__: sources.append(source))
    facts = []
    for weights, waste_bytes in (("int8", 0), ("bf16", 4 * (2 * 320 + 16) - 4 * 512)):
        for vocab, warps, depth in ((1, 12, 3), (1_000, 8, 4), (49_153, 12, 1), (151_936, 12, 3), (248_320, 4, 2)):
            backend = StreamingSm90(StreamingOptions(weights, warps, depth))
            tiles = backend.tiles(vocab, H200)
            assert tiles % depth == 0
            assert (tiles - depth) * H200.sms * warps * 16 < vocab <= tiles * H200.sms * warps * 16
            rows = warps * tiles * 16
            backend.compile(tiles, H200)
            kernel = f"wts::Streaming<{re.findall(r'wts::StreamingShape{.*?}', sources[-1])[0]}>"
            facts += [
                f"{kernel}::kRows == {rows}",
                f"OFFSET(base, {kernel}::Smem) + {waste_bytes} == {backend.smem_bytes(rows, 7) - 7 * 2 * rows}",
            ]
    hold_in_cpp('#include "walk_streaming.cuh"', facts)


def test_more_rows_than_a_key_can_number_do_not_compile(hold_in_cpp: HoldInCpp, cuda_shape: CudaShape) -> None:
    """A wider vocabulary would give wrong tokens without a word."""
    for rows, tiles in ((64_512, 504), (65_536, 512)):
        placement = Placement(132 * rows, 1, 132, 3, tiles - 3 - 2, 2, 2, 1, weights="bf16")
        fact = f"wts::Resident<{cuda_shape(placement)}>::kRows == {rows}"
        if rows < 65_536:
            hold_in_cpp('#include "walk_resident.cuh"', [fact])
        else:
            with pytest.raises(BuildError, match="a key has 16 bits for a row"):
                hold_in_cpp('#include "walk_resident.cuh"', [fact])
