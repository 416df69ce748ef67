"""Every row has one place, no capacity is exceeded, what fits stays on chip, and refusals count right."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kernels.device import DeviceSpec, load
from kernels.placement import GREEDY_BATCH, MAX_BATCH, RANK, SMALL_BATCH, BatchedPlacement, Place, Placement, plan
from kernels.walk import Unsupported

H200 = load("h200")
REQUESTS = [1, 2, 4, 8]  # that walk_resident.cuh has room for
MOST_TILES = 32  # of a warpgroup of walk_batched.cuh


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
    batch=st.sampled_from([*REQUESTS, 16, 32, MAX_BATCH]) | st.integers(1, MAX_BATCH),
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


def hand_counted_batched(batch: int, sampling: bool, tiles: int, resident: int, stages: int) -> int:
    """The same of walk_batched.cuh."""
    room = next(n for n in (8, 16, 32, 64) if batch <= n)
    slots, latents, candidates = resident + stages, 576 * room, 128  # a candidate for each warp's requests, whatever their number
    drawing = 16 * (room + 512 if sampling else 2)  # for each request, and for each thread the words of four groups
    barriers = slots + max(stages, 1)
    return up(slots * 64 * 256 + latents + 4 * 64 * tiles + 8 * candidates + drawing + 8 * barriers, 128)


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
    assert asked.batch <= (placement.width if isinstance(placement, BatchedPlacement) else placement.requests)
    assert 1 <= placement.ctas <= asked.sms, "one CTA a SM"
    assert (placement.ctas - 1) * placement.rows_per_cta < asked.vocab <= placement.ctas * placement.rows_per_cta
    placed = placement.register_bytes + placement.smem_weight_bytes + placement.streamed_bytes
    assert placed == placement.ctas * placement.rows_per_cta * row_bytes


@given(SMALL)
@example(Asked(151_936))
@example(Asked(248_320, batch=4, sampling=True))
@example(Asked(129_280, weights="bf16"))
@example(Asked(151_936, batch=8))
@example(Asked(1, steps=1, rf_tiles=0))
@example(Asked(16_896, steps=1))
@example(Asked(16_897, steps=1))
def test_every_row_of_a_small_batch_has_one_place_within_capacity(asked: Asked) -> None:
    requests = next(n for n in REQUESTS if asked.batch <= n)
    tiles, fewest = -(-asked.vocab // (asked.sms * 128)), min(asked.steps, 2)
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
    assert fewest <= placement.base_slots <= asked.steps, "one slot in use and one under way; none for nothing"
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
@example(Asked(151_936, batch=16))
@example(Asked(248_320, batch=16))
@example(Asked(1, steps=1, batch=64))
@example(Asked(132 * 256 * 32, batch=64))
@example(Asked(2 * 128 * 33, batch=64, sms=2))
def test_every_row_of_a_large_batch_has_one_place_within_capacity(asked: Asked) -> None:
    members = 4 if asked.batch <= 32 else 2
    own = -(-asked.vocab // (asked.sms * 64 * members))  # tiles of a member

    def bytes_with(resident: int, stages: int) -> int:
        return hand_counted_batched(asked.batch, asked.sampling, own * members, resident * members, stages * members)

    def fewest_stages(streamed: int) -> int:
        """One, but with two halves two where streamed tiles need stand side by side."""
        return 0 if not streamed else 1 if asked.batch <= 32 or 2 * streamed <= own + 1 else 2

    try:
        placement = asked.plan()
    except Unsupported as refused:
        if own > MOST_TILES:
            return
        assert_numbers(refused, asked)
        assert min(bytes_with(near, fewest_stages(own - near)) for near in range(own + 1)) > asked.smem_bytes, "it would have fitted"
        return
    assert isinstance(placement, BatchedPlacement)
    assert own <= MOST_TILES, "walk_batched.cuh keeps a member's tiles in the bits of a word"
    assert_covers(placement, asked, 256)
    assert (placement.halves, placement.members) == ((1, 4) if asked.batch <= 32 else (2, 2))
    assert (placement.width, placement.copies) == next(each for each in ((8, 4), (16, 2), (32, 1), (64, 1)) if asked.batch <= each[0])
    assert placement.tiles == own * members, "as many for each warpgroup of a half, and no more than the vocabulary needs"
    assert placement.resident_tiles + placement.streamed_tiles == placement.tiles
    near, stages = placement.resident_tiles // members, placement.stages // members
    assert (near * members, stages * members) == (placement.resident_tiles, placement.stages), "members stream the same tiles"
    assert stages == fewest_stages(own - near)
    assert placement.smem_bytes_per_cta == bytes_with(near, stages) <= asked.smem_bytes
    assert near == own or bytes_with(near + 1, fewest_stages(own - near - 1)) > asked.smem_bytes, "one tile more would have stayed"


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


def test_every_request_of_a_large_batch_has_room() -> None:
    for batch in range(SMALL_BATCH + 1, MAX_BATCH + 1):
        placement = plan(151_936, 256, H200, batch=batch, sampling=True)
        assert isinstance(placement, BatchedPlacement)
        assert (placement.width, placement.copies, placement.halves) == next(
            each for each in ((8, 4, 1), (16, 2, 1), (32, 1, 1), (64, 1, 2)) if batch <= each[0]
        )


def test_shared_memory_of_a_large_batch_counted_by_hand() -> None:
    for batch, sampling, vocab, told, room in (
        (64, False, 49_153, (129, 6, 6, 0, 2, 1), 64),
        (16, False, 49_153, (97, 8, 8, 0, 1, 2), 16),
        (5, True, 151_936, (119, 20, 8, 4, 1, 4), 8),
        (17, False, 248_320, (122, 32, 8, 4, 1, 1), 32),
        (33, False, 248_320, (130, 30, 6, 4, 2, 1), 64),
    ):
        placement = plan(vocab, 256, H200, batch=batch, sampling=sampling)
        assert isinstance(placement, BatchedPlacement)
        ctas, tiles, near, stages, halves, copies = told
        assert (placement.ctas, placement.tiles, placement.resident_tiles, placement.stages) == (ctas, tiles, near, stages)
        assert (placement.halves, placement.copies, placement.width) == (halves, copies, room)
        weights, latents, scales = (near + stages) * 64 * 256, room * (2 * 256 + 64), 4 * tiles * 64
        best, drawing, full, empty = (
            4 // halves * copies * room * 8,
            16 * (room + 512 if sampling else 2),
            8 * (near + stages),
            8 * max(stages, 1),
        )
        assert placement.smem_bytes_per_cta == up(weights + latents + scales + best + drawing + full + empty, 128)


def test_who_serves_which_batch() -> None:
    for batch, sampling, kernel in (
        (4, True, Placement),
        (5, True, BatchedPlacement),
        (8, False, Placement),
        (9, False, BatchedPlacement),
        (16, False, BatchedPlacement),
    ):
        assert isinstance(plan(1_000, 256, H200, batch=batch, sampling=sampling), kernel)


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
