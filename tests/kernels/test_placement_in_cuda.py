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
REQUESTS = [1, 2, 4, 8, 16]
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


def test_rows_and_bytes_of_the_batched_kernel_are_the_planners(hold_in_cpp: HoldInCpp, cuda_shape: CudaShape) -> None:
    facts: list[str] = []
    for i, (vocab, batch) in enumerate((vocab, batch) for vocab in VOCABS for batch in (5, 17, 32, 33, 64)):
        placement = plan(vocab, 256, H200, batch=batch, sampling=batch == 5 or i % 3 == 0)
        assert isinstance(placement, BatchedPlacement)
        kernel = f"wts::Batched<{cuda_shape(placement)}>"
        facts += [
            f"sizeof({kernel}::Smem) == {placement.smem_bytes_per_cta}",
            f"{kernel}::kRows == {placement.rows_per_cta} && {kernel}::kRequests >= {batch} && {kernel}::kMembers <= {placement.tiles}",
            f"{kernel}::kThreads == {placement.threads}",
        ]
    hold_in_cpp('#include "walk_batched.cuh"', facts)


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
