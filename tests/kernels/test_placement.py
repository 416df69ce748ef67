"""Every row has one place, no capacity is exceeded, refusals count right, and the CUDA structs agree with the planner's bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kernels.backends.streaming_sm90 import StreamingOptions, StreamingSm90
from kernels.device import DeviceSpec, load
from kernels.placement import RANK, WARPS, Placement, plan
from kernels.walk import Unsupported

HoldInCpp = Callable[[str, Iterable[str]], None]
H200 = load("h200")
ROW_BYTES = 256
TILE_BYTES = 16 * ROW_BYTES


def small(sms: int, smem_bytes_per_cta: int) -> DeviceSpec:
    return replace(H200, name="small", sms=sms, smem_bytes_per_cta=smem_bytes_per_cta)


def hand_counted(placement: Placement) -> int:
    """Dynamic shared memory of a CTA in bytes, part by part."""
    rows = 8 * (placement.register_tiles + placement.smem_tiles) * 16
    weights = 8 * placement.smem_tiles * TILE_BYTES or 128  # the empty array is one line long
    latents = 4 * (2 * 320 + 16)
    warp_keys, slot, padding, barrier = 32 * 4, 4, 4, 8
    return weights + latents + rows * 4 + warp_keys + slot + padding + barrier + rows * 2 * placement.steps


@given(
    vocab=st.integers(1, 300_000),
    steps=st.integers(1, 32),
    rf_tiles=st.integers(0, 9),
    sms=st.sampled_from([1, 2, 7, 114, 132, 148]),
    smem_bytes=st.sampled_from([0, 20_000, 101_376, 232_448]),
)
@example(vocab=151_936, steps=16, rf_tiles=6, sms=132, smem_bytes=232_448)
@example(vocab=1, steps=1, rf_tiles=0, sms=132, smem_bytes=232_448)
@example(vocab=16_896, steps=1, rf_tiles=6, sms=132, smem_bytes=232_448)
@example(vocab=16_897, steps=1, rf_tiles=6, sms=132, smem_bytes=232_448)
def test_every_row_has_one_place_within_capacity(vocab: int, steps: int, rf_tiles: int, sms: int, smem_bytes: int) -> None:
    device = small(sms, smem_bytes)
    tiles = -(-vocab // (sms * 128))
    near = min(rf_tiles, tiles)  # registers fill first
    wanted = hand_counted(Placement(vocab, steps, 0, near, tiles - near))
    if wanted > smem_bytes:
        with pytest.raises(Unsupported, match="backend=streaming_sm90 serves it") as refused:
            plan(vocab, RANK, device, steps=steps, rf_tiles=rf_tiles)
        too_much = f"needs {(wanted - smem_bytes) * sms / 1e6:.1f} MB more than small"
        for number in (f"vocab {vocab} in", too_much, f"{near} register tiles", f"{wanted} of {smem_bytes} bytes"):
            assert number in str(refused.value)
        return
    placement = plan(vocab, RANK, device, steps=steps, rf_tiles=rf_tiles)
    assert (placement.vocab, placement.steps) == (vocab, steps)
    assert placement.smem_bytes_per_cta == hand_counted(placement) <= smem_bytes
    assert (placement.register_tiles, placement.smem_tiles) == (near, tiles - near), "no tile more than the vocabulary needs"
    assert placement.rows_per_cta == 8 * tiles * 16
    assert 1 <= placement.ctas <= sms, "one CTA a SM"
    assert (placement.ctas - 1) * placement.rows_per_cta < vocab <= placement.ctas * placement.rows_per_cta, "every row, no empty CTA"
    assert placement.register_bytes + placement.smem_weight_bytes == placement.ctas * placement.rows_per_cta * ROW_BYTES
    assert placement.register_bytes <= 9 * 32 * 4 * 256 * sms, "32 registers a tile and thread"


@given(register_tiles=st.integers(0, 9), smem_tiles=st.integers(0, 14))
def test_groups_hold_at_most_four_tiles_and_end_in_shared_memory(register_tiles: int, smem_tiles: int) -> None:
    order = Placement(1, 1, 1, register_tiles, smem_tiles).in_registers
    assert (order.count(True), order.count(False)) == (register_tiles, smem_tiles)
    runs = "".join("r" if near else "s" for near in order).split("s")  # register tiles before each shared one, then the rest
    assert all(len(run) <= 3 for run in runs[:-1]), "three and the shared one make four, a lane quad"
    if runs[-1]:
        assert smem_tiles * 3 < register_tiles, "only what the shared tiles cannot accompany stands alone"
    if smem_tiles * 3 >= register_tiles:
        shares = [len(run) for run in runs[:-1]]
        assert not shares or max(shares) - min(shares) <= 1, "register tiles are spread evenly among the shared ones"


def test_the_papers_head_on_an_h200() -> None:
    placement = plan(151_936, 256, H200)
    assert (placement.ctas, placement.register_tiles, placement.smem_tiles) == (132, 6, 3)
    assert placement.in_registers == (True, True, False, True, True, False, True, True, False)
    assert placement.register_bytes == 132 * 8 * 6 * 4096 == 25_952_256
    assert placement.smem_weight_bytes == 132 * 8 * 3 * 4096 == 12_976_128
    assert placement.smem_bytes_per_cta == 98_304 + 2_624 + 4_608 + 144 + 36_864


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_the_largest_vocabulary_that_fits(name: str) -> None:
    """11 tiles a warp: 163,840 bytes of weights, 5,632 of scales, 45,056 of base logits and 2,768 of state; a twelfth needs 37,376 more."""
    device = load(name)
    assert plan(132 * 8 * 11 * 16, 256, device).smem_bytes_per_cta == 217_296
    refusal = f"vocab 185857 in int8 (47.6 MB) with 16 steps of base logits needs 2.9 MB more than {name} keeps on chip (6 register tiles a warp, 254672 of 232448"
    with pytest.raises(Unsupported) as refused:
        plan(132 * 8 * 11 * 16 + 1, 256, device)
    assert refusal in str(refused.value)
    assert plan(132 * 8 * 12 * 16, 256, device, steps=8).tiles == 12, "fewer base logits leave room for it"


def test_a_vocabulary_beyond_the_chip_is_refused_with_the_numbers() -> None:
    refusal = (
        "vocab 248320 in int8 (63.6 MB) with 16 steps of base logits needs 17.7 MB more than h200 keeps on chip "
        "(6 register tiles a warp, 366800 of 232448 bytes of shared memory a CTA); backend=streaming_sm90 serves it."
    )
    with pytest.raises(Unsupported) as refused:
        plan(248_320, 256, H200)
    assert str(refused.value) == refusal


@pytest.mark.parametrize(
    ("rank", "device", "message"),
    [
        (128, "h200", "serves rank 256 only; got rank 128; backend=sglang_greedy"),
        (256, "b200", "needs sm_90a; device=b200 is sm_100a"),
        (256, "cpu", "needs sm_90a; device=cpu is cpu"),
    ],
)
def test_other_ranks_and_devices_are_refused(rank: int, device: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        plan(1000, rank, load(device))


@pytest.mark.parametrize("rf_tiles", [-1, 10])
def test_register_tiles_out_of_range(rf_tiles: int) -> None:
    with pytest.raises(ValueError, match=f"0 to 9 tiles a warp; got {rf_tiles}"):
        plan(1000, 256, H200, rf_tiles=rf_tiles)


RESIDENT = """#include "walk_resident.cuh"
using wts::Resident;
using wts::ResidentShape;
template <ResidentShape S>
struct Facts {
  using R = Resident<S>;
  // Bit i: tile i of a warp, in the order of its rows, lies in shared memory.
  static constexpr unsigned in_smem() {
    unsigned bits = 0;
    for (int group = 0; group < S.tiles_smem; group++) bits |= 1u << (R::first_tile(group + 1) - 1);
    return bits;
  }
  // The register tiles take the other places, in order, and a group is a lane quad at most.
  static constexpr bool well_formed() {
    unsigned taken = in_smem();
    for (int group = 0, last = -1; group < R::kGroups; group++) {
      if (R::tiles(group) < 1 || R::tiles(group) > 4) return false;
      for (int j = R::first_register_tile(group); j < R::first_register_tile(group + 1); j++) {
        const int place = R::first_tile(group) + j - R::first_register_tile(group);
        if (taken >> place & 1 || place <= last) return false;
        taken |= 1u << place, last = place;
      }
    }
    return taken == (1u << R::kTiles) - 1 && R::first_register_tile(R::kGroups) == S.tiles_rf;
  }
};
"""


def resident_facts(register_tiles: int, smem_tiles: int) -> list[str]:
    placement = Placement(0, 5, 132, register_tiles, smem_tiles)
    shape = f"ResidentShape{{{register_tiles}, {smem_tiles}, 132, false}}"
    in_smem = sum(1 << place for place, near in enumerate(placement.in_registers) if not near)
    until_base = placement.smem_bytes_per_cta - 5 * 2 * placement.rows_per_cta
    return [
        f"Facts<{shape}>::in_smem() == {in_smem}u && Facts<{shape}>::well_formed()",
        f"Resident<{shape}>::kRows == {placement.rows_per_cta} && Resident<{shape}>::kTiles == {placement.tiles}",
        f"OFFSET(base, Resident<{shape}>::Smem) == {until_base}",
    ]


SHAPES = [(rf, smem) for rf in range(10) for smem in range(14) if rf + smem > 0 and (rf in (0, 5, 6, 9) or smem in (0, 1, 2, 5))]


def test_rows_and_bytes_of_the_resident_kernel_are_the_planners(hold_in_cpp: HoldInCpp) -> None:
    hold_in_cpp(
        RESIDENT, [fact for shape in SHAPES for fact in resident_facts(*shape)] + [f"Resident<ResidentShape{{6, 3}}>::kWarps == {WARPS}"]
    )


@pytest.mark.parametrize(("weights", "waste_bytes"), [("int8", 0), ("bf16", 4 * (2 * 320 + 16) - 4 * 512)])
def test_bytes_of_the_streaming_kernel_are_the_backends(weights: str, waste_bytes: int, hold_in_cpp: HoldInCpp) -> None:
    """bf16 latents are shorter than the int8 ones that both are given room for: 576 bytes."""
    facts = []
    for vocab, warps, depth in ((1, 12, 3), (1_000, 8, 4), (49_153, 12, 1), (151_936, 12, 3), (248_320, 4, 2)):
        backend = StreamingSm90(StreamingOptions(weights, warps, depth))
        tiles = backend.tiles(vocab, H200)
        assert tiles % depth == 0
        assert (tiles - depth) * H200.sms * warps * 16 < vocab <= tiles * H200.sms * warps * 16
        rows = warps * tiles * 16
        shape = f"wts::StreamingShape{{{str(weights == 'bf16').lower()}, {warps}, {tiles}, {depth}, 40, 132, false}}"
        facts += [
            f"wts::Streaming<{shape}>::kRows == {rows}",
            f"OFFSET(base, wts::Streaming<{shape}>::Smem) + {waste_bytes} == {backend.smem_bytes(rows, 7) - 7 * 2 * rows}",
        ]
    hold_in_cpp('#include "walk_streaming.cuh"', facts)
