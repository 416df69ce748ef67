"""Every row has one place, no capacity is exceeded, what fits stays on chip, and refusals count right."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kernels.device import DeviceSpec, load
from kernels.placement import GREEDY_BATCH, MAX_BATCH, RANK, SMALL_BATCH, BatchedPlacement, Place, Placement, plan
from kernels.walk import Unsupported

HoldInCpp = Callable[[str, Iterable[str]], None]
CudaShape = Callable[[Placement | BatchedPlacement], str]
H200 = load("h200")
REQUESTS = [1, 2, 4, 8, 16]
VOCABS = [1_000, 32_000, 49_153, 129_280, 151_936, 154_880, 163_840, 201_024, 248_320, 262_144]


@dataclass(frozen=True)
class Asked:
    """What a plan is asked for."""

    vocab: int
    steps: int = 16
    batch: int = 1
    sampling: bool = False
    weights: str = "int8"
    rf_tiles: int | None = None
    sms: int = 132
    smem_bytes: int = 232_448

    @property
    def device(self) -> DeviceSpec:
        return replace(H200, name="small", sms=self.sms, smem_bytes_per_cta=self.smem_bytes)

    @property
    def is_small(self) -> bool:
        """Whether walk_resident.cuh serves it."""
        return self.batch <= (SMALL_BATCH if self.sampling or self.weights == "bf16" else GREEDY_BATCH)

    def plan(self) -> Placement | BatchedPlacement:
        return plan(
            self.vocab,
            RANK,
            self.device,
            steps=self.steps,
            batch=self.batch,
            sampling=self.sampling,
            weights=self.weights,
            rf_tiles=self.rf_tiles,
        )


VOCAB, STEPS, SMS = st.integers(1, 400_000), st.integers(1, 32), st.sampled_from([1, 2, 7, 114, 132, 148])
SMEM = st.sampled_from([0, 20_000, 101_376, 166_912, 232_448])
ASKED = st.builds(
    Asked,
    vocab=VOCAB,
    steps=STEPS,
    batch=st.sampled_from(REQUESTS) | st.integers(1, MAX_BATCH),
    sampling=st.booleans(),
    weights=st.sampled_from(["int8", "bf16"]),
    rf_tiles=st.none() | st.integers(0, 9),
    sms=SMS,
    smem_bytes=SMEM,
)
SMALL, LARGE = ASKED.filter(lambda asked: asked.is_small), ASKED.filter(lambda asked: not asked.is_small and asked.weights == "int8")


def up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def hand_counted(placement: Placement) -> int:
    """Dynamic shared memory of a CTA of walk_resident.cuh in bytes, part by part."""
    rows, requests = 8 * placement.tiles * 16, placement.requests
    tile, latent, scales = (16 * 256, 2 * 320 + 16, 4 * rows) if placement.weights == "int8" else (16 * 512, 512, 16)
    latents = requests * (4 if requests <= 4 else 3) * latent
    weights = 8 * placement.smem_tiles * tile or 128  # an empty array is one line long
    stages = 8 * placement.stages * 4096 or 128
    noise = 4 * requests * rows if placement.sampling else 16
    warp_keys, slots = requests * 32 * (8 if placement.sampling else 4), 4 * requests
    barriers = 8 + 8 * max(8 * placement.stages, 1)
    return weights + stages + latents + scales + noise + up(up(warp_keys + slots, 8) + barriers, 16) + base_bytes(placement)


def base_bytes(placement: Placement) -> int:
    return 2 * placement.requests * placement.rows_per_cta * placement.base_slots


def assert_numbers(refused: Unsupported, asked: Asked) -> None:
    """The refusal names the vocabulary, what it needs and has, and who serves it."""
    said = re.match(r"vocab (\d+) needs (\d+) bytes of shared memory a CTA .*; small has (\d+); backend=(\w+) serves it\.$", str(refused))
    assert said, str(refused)
    vocab, needs, has, backend = said.groups()
    assert (int(vocab), int(has)) == (asked.vocab, asked.smem_bytes)
    assert int(needs) > int(has)
    assert backend == ("sglang_folded" if asked.sampling else "sglang_greedy"), "the latter cannot draw"


def assert_covers(placement: Placement | BatchedPlacement, asked: Asked, row_bytes: int) -> None:
    """All rows, none twice, no CTA for nothing, no SM too many."""
    assert (placement.vocab, placement.steps, placement.sampling) == (asked.vocab, asked.steps, asked.sampling)
    assert asked.batch <= placement.requests
    assert 1 <= placement.ctas <= asked.sms, "one CTA a SM"
    assert (placement.ctas - 1) * placement.rows_per_cta < asked.vocab <= placement.ctas * placement.rows_per_cta
    placed = placement.register_bytes + placement.smem_weight_bytes + placement.streamed_bytes
    assert placed == placement.ctas * placement.rows_per_cta * row_bytes


@given(SMALL)
@example(Asked(151_936))
@example(Asked(248_320, batch=4, sampling=True))
@example(Asked(129_280, weights="bf16"))
@example(Asked(151_936, batch=16))
@example(Asked(1, steps=1, rf_tiles=0))
@example(Asked(16_896, steps=1))
@example(Asked(16_897, steps=1))
def test_every_row_of_a_small_batch_has_one_place_within_capacity(asked: Asked) -> None:
    requests = next(n for n in REQUESTS if asked.batch <= n)
    tiles, fewest = -(-asked.vocab // (asked.sms * 128)), min(asked.steps, 2 if requests < 16 else 1)
    unbounded = replace(asked, smem_bytes=10**9).plan()
    assert isinstance(unbounded, Placement)
    near = unbounded.register_tiles if asked.rf_tiles is None else min(asked.rf_tiles, tiles)
    whole = Placement(asked.vocab, asked.steps, 1, near, tiles - near, 0, 0, fewest, requests, asked.sampling, asked.weights)
    try:
        placement = asked.plan()
    except Unsupported as refused:
        assert_numbers(refused, asked)
        streamed = replace(whole, smem_tiles=0, streamed_tiles=tiles - near, stages=2)
        assert min(hand_counted(whole), hand_counted(streamed)) > asked.smem_bytes, "it would have fitted"
        return
    assert isinstance(placement, Placement)
    assert_covers(placement, asked, 256 if asked.weights == "int8" else 512)
    assert (placement.requests, placement.weights) == (requests, asked.weights)
    assert placement.smem_bytes_per_cta == hand_counted(placement) <= asked.smem_bytes
    assert (placement.tiles, placement.register_tiles) == (tiles, near), "registers first, and no tile more than the vocabulary needs"
    assert fewest <= placement.base_slots <= asked.steps, "one slot in use and, but for 16 requests, one under way; none for nothing"
    if placement.streamed_tiles:
        assert placement.stages >= 2, "one fills while another is read"
        assert hand_counted(whole) > asked.smem_bytes, "it would have fitted whole"
        more = replace(placement, smem_tiles=placement.smem_tiles + 1, streamed_tiles=placement.streamed_tiles - 1, base_slots=fewest)
        assert not more.streamed_tiles or hand_counted(more) > asked.smem_bytes, "one tile more would have stayed"
    else:
        assert placement.stages == 0
        more = replace(placement, base_slots=placement.base_slots + 1)
        assert placement.base_slots == asked.steps or hand_counted(more) > asked.smem_bytes, "one step more would have fitted"


@given(LARGE)
@example(Asked(151_936, batch=64, sampling=True))
@example(Asked(154_880, batch=32))
@example(Asked(151_936, batch=5, sampling=True))
@example(Asked(1, steps=1, batch=64))
def test_every_row_of_a_large_batch_has_one_place_within_capacity(asked: Asked) -> None:
    try:
        placement = asked.plan()
    except Unsupported as refused:
        assert_numbers(refused, asked)
        return
    assert isinstance(placement, BatchedPlacement)
    assert_covers(replace(placement, requests=32 * placement.halves), asked, 256)
    assert placement.halves == (1 if asked.batch <= 32 else 2)
    assert placement.smem_bytes_per_cta <= asked.smem_bytes
    assert placement.tiles == max(-(-asked.vocab // (asked.sms * 64)), 4), (
        "a tile for each warpgroup, and no more than the vocabulary needs"
    )
    assert placement.resident_tiles + placement.streamed_tiles == placement.tiles
    whole = replace(placement, resident_tiles=placement.tiles, stages=0)
    if placement.streamed_tiles:
        assert placement.stages % 4 == 0 < placement.stages, "a ring for each warpgroup"
        assert whole.smem_bytes_per_cta > asked.smem_bytes, "it would have fitted whole"
        more = replace(placement, resident_tiles=placement.resident_tiles + 1)
        assert more.streamed_tiles == 0 or more.smem_bytes_per_cta > asked.smem_bytes, "one tile more would have stayed"
    else:
        assert placement == whole


@given(register_tiles=st.integers(0, 9), smem_tiles=st.integers(0, 14), streamed_tiles=st.integers(0, 14))
def test_places_mix_the_tiers_evenly(register_tiles: int, smem_tiles: int, streamed_tiles: int) -> None:
    """So that shared memory and the stages are never asked for more than the tensor cores can wait for."""
    assume(register_tiles + smem_tiles + streamed_tiles > 0)
    places = Placement(1, 1, 1, register_tiles, smem_tiles, streamed_tiles).places
    assert [places.count(place) for place in Place] == [register_tiles, smem_tiles, streamed_tiles]
    others = [place for place in places if place is not Place.REGISTERS]
    at = [i for i, place in enumerate(others) if place is Place.STREAMED]
    gaps = [later - earlier for earlier, later in pairwise([-1, *at])]
    assert not gaps or max(gaps) - min(gaps) <= 1, "streamed tiles stand evenly among the others"
    for end in range(len(places)):
        share = register_tiles * end / len(places)
        assert abs(places[:end].count(Place.REGISTERS) - share) <= 4, "each group of four has its share of the register tiles"


def test_the_papers_head_on_an_h200() -> None:
    placement = plan(151_936, 256, H200)
    assert isinstance(placement, Placement)
    assert (placement.ctas, placement.register_tiles, placement.smem_tiles, placement.streamed_tiles) == (132, 6, 3, 0)
    assert placement.register_bytes == 132 * 8 * 6 * 4096 == 25_952_256
    assert placement.smem_weight_bytes == 132 * 8 * 3 * 4096 == 12_976_128
    assert (placement.base_slots, placement.streamed_bytes) == (16, 0)
    assert placement.smem_bytes_per_cta == 98_304 + 128 + 2_624 + 4_608 + 16 + 160 + 36_864


def test_what_the_paper_streams_stays_on_chip_as_far_as_it_fits() -> None:
    """V = 248,320: the paper reads 41 MB at every step."""
    for batch, sampling in ((1, False), (1, True), (2, False), (4, False), (4, True)):
        placement = plan(248_320, 256, H200, steps=15, batch=batch, sampling=sampling)
        assert placement.register_bytes + placement.smem_weight_bytes + placement.streamed_bytes >= 248_320 * 256
        assert placement.streamed_bytes < 35e6
    assert plan(248_320, 256, H200, steps=15).streamed_bytes < 22e6


def test_shared_memory_of_a_large_batch_counted_by_hand() -> None:
    placement = plan(49_153, 256, H200, batch=64)
    assert isinstance(placement, BatchedPlacement)
    assert (placement.ctas, placement.tiles, placement.resident_tiles, placement.stages, placement.halves) == (129, 6, 6, 0, 2)
    weights, scales, best, tokens, newest, drawing, full, empty = 6 * 64 * 256, 4 * 6 * 64, 2 * 64 * 8, 64 * 4, 2 * 4, 16, 6 * 8, 8
    assert placement.smem_bytes_per_cta == up(weights + scales + best + up(tokens + newest, 16) + drawing + full + empty, 128)


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_the_largest_vocabulary_that_fits_whole(name: str) -> None:
    """12 tiles a warp at up to 8 steps in shared memory; a thirteenth tile goes to L2."""
    device = load(name)
    last = plan(132 * 8 * 12 * 16, 256, device)
    beyond = plan(132 * 8 * 12 * 16 + 1, 256, device)
    assert isinstance(last, Placement)
    assert (last.tiles, last.streamed_bytes) == (12, 0)
    assert beyond.streamed_bytes > 0


@pytest.mark.parametrize(
    ("rank", "device", "asked", "message"),
    [
        (128, "h200", {}, "serves rank 256 only; got rank 128; backend=sglang_folded"),
        (256, "b200", {}, "needs sm_90a; device=b200 is sm_100a"),
        (256, "cpu", {}, "needs sm_90a; device=cpu is cpu"),
        (256, "h200", {"batch": 65}, "up to 64 requests; got batch 65; split it, or take backend=sglang_folded"),
        (
            256,
            "h200",
            {"batch": 5, "weights": "bf16"},
            "up to 4 requests; got batch 5; take weights=int8",
        ),
    ],
)
def test_other_ranks_devices_and_batches_are_refused(rank: int, device: str, asked: dict, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        plan(1000, rank, load(device), **asked)


@pytest.mark.parametrize("rf_tiles", [-1, 10])
def test_register_tiles_out_of_range(rf_tiles: int) -> None:
    with pytest.raises(ValueError, match=f"0 to 9 tiles a warp; got {rf_tiles}"):
        plan(1000, 256, H200, rf_tiles=rf_tiles)


@pytest.mark.parametrize("asked", [{"vocab": 0}, {"steps": 0}, {"batch": 0}])
def test_a_walk_of_nothing(asked: dict) -> None:
    with pytest.raises(ValueError, match="needs vocab, steps and batch of at least 1"):
        plan(**({"vocab": 1000, "rank": 256, "device": H200} | asked))
