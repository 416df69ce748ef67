"""The rings of walk_batched.cuh: its own code says what it fills and waits for, on the host, and a model of the barriers plays whole walks of it."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from kernels.build import CUDA_ROOM

# What the excerpt of the kernel needs around it. Barriers and copies only note what they were asked: kind, slot or stage, tile or phase.
AROUND = """
#include <cstdint>
#include <cuda/ptx>
#include <cuda/std/bit>
enum { kWaits, kExpects, kCopies };
static int* noted;
static void note(int kind, int place, int what) { *noted++ = kind, *noted++ = place, *noted++ = what; }
static uint64_t full[256], empty[256];
static const struct { int x; } blockIdx = {3};
namespace cuda::ptx {
static void mbarrier_arrive_expect_tx(auto, auto, auto, uint64_t* barrier, int bytes) { note(kExpects, barrier - full, bytes); }
}
static void wait_barrier(uint64_t* barrier, int phase) { note(kWaits, barrier - empty, phase); }
static uint64_t l2_policy(float kept) { return kept == 1; }
BATCHED_SHAPE
template <BatchedShape S>
struct Ring {
  static constexpr int kMembers = 4 / S.halves, kTileBytes = 16;
  struct { const uint8_t* weights; int steps; } p;
  struct { uint8_t weights[S.resident + S.stages][kTileBytes]; uint64_t *full = ::full, *empty = ::empty; } smem;
  static void copy_bulk(const void* slot, const uint8_t* tile, int bytes, uint64_t* barrier, bool streamed) {
    note(kCopies, barrier - ::full, static_cast<int>((tile - static_cast<const uint8_t*>(nullptr)) / bytes) - blockIdx.x * S.tiles);
    note(kCopies, (static_cast<const uint8_t*>(slot) - self->smem.weights[0]) / bytes, streamed);
  }
  static inline Ring* self;
EXCERPT
};
// Of `what`: the fills at the start (-1), where tile i lies at a step (-2), or what follows its scoring. Returns how many numbers it noted.
template <BatchedShape S>
int ask(int what, int member, int i, int step, int steps, int* out) {
  Ring<S> ring{{nullptr, steps}, {}};
  Ring<S>::self = &ring, noted = out;
  if (what == -1) ring.fill_all(member);
  else if (what == -2) {
    const auto place = ring.place_of(member, i, step, ring.streams(i));
    note(ring.streams(i), place.slot, place.phase), *noted++ = place.index, *noted++ = ring.kAlternates;
  } else ring.refill(member, i, step);
  return noted - out;
}
"""
WAITS, EXPECTS, COPIES = range(3)


@dataclass(frozen=True)
class Shape:
    """Of one member."""

    tiles: int
    streamed: int
    stages: int
    halves: int

    def cpp(self) -> str:
        members = 4 // self.halves
        numbers = (self.tiles * members, (self.tiles - self.streamed) * members, self.stages * members, self.halves, 1, "false", 132)
        return f"BatchedShape{{{', '.join(map(str, numbers))}}}"

    @property
    def streamed_tiles(self) -> list[int]:
        """The model: the even ones, if these are just as many and there is one stage; else evenly from the first to the last."""
        if self.stages == 1 and self.streamed == (self.tiles + 1) // 2:
            return list(range(0, self.tiles, 2))
        return [n * (self.tiles - 1) // (self.streamed - 1) for n in range(self.streamed)] if self.streamed > 1 else [0] * self.streamed

    def place(self, member: int, tile: int, step: int) -> tuple[bool, int, int, int]:
        """The model: whether it is streamed, its slot, the phase of its barrier and the slot's number among the member's."""
        members, near = 4 // self.halves, self.tiles - self.streamed
        before = sum(other < tile for other in self.streamed_tiles)
        if tile not in self.streamed_tiles:
            return False, member * near + tile - before, 0, tile - before
        turn = step * self.streamed + before
        return True, members * near + member * self.stages + turn % self.stages, turn // self.stages % 2, turn % self.stages


def shapes() -> Iterator[Shape]:
    """All of up to eight tiles, and some larger, in turn with one half and two."""
    for tiles in (*range(1, 9), 9, 12, 15, 32):
        few = range(tiles + 1) if tiles < 9 else (0, 2, tiles // 3, tiles // 2, (tiles + 1) // 2, tiles // 2 + 2, tiles)
        for streamed in sorted({*few}):
            for stages in (1, 2) if streamed else (0,):
                yield Shape(tiles, streamed, stages, 1 + (tiles + streamed + stages) % 2)


SHAPES = [*shapes()]


def excerpt(text: str, first: str, end: str) -> str:
    """From a line that begins with `first` up to one that begins with `end`."""
    assert (text.count(first), text.count(end)) == (1, 1), f"walk_batched.cuh no longer has {first!r} and {end!r} once"
    return text[text.index(first) : text.index(end)]


@dataclass(frozen=True)
class Kernel:
    """What the kernel's code answers."""

    compiled: ctypes.CDLL

    def ask(self, shape: Shape, what: int, member: int, tile: int = 0, step: int = 0, steps: int = 0) -> list[int]:
        out = (ctypes.c_int * 1024)()
        return out[: self.compiled.ask(SHAPES.index(shape), what, member, tile, step, steps, out)]

    def place(self, shape: Shape, member: int, tile: int, step: int) -> tuple[bool, int, int, int]:
        streamed, slot, phase, index, alternates = self.ask(shape, -2, member, tile, step)
        assert alternates == (shape.stages == 1 and shape.streamed == (shape.tiles + 1) // 2)
        return bool(streamed), slot, phase, index

    def fill_all(self, shape: Shape, member: int, steps: int) -> list[tuple[int, ...]]:
        return events(self.ask(shape, -1, member, steps=steps))

    def refill(self, shape: Shape, member: int, tile: int, step: int, steps: int) -> list[tuple[int, ...]]:
        return events(self.ask(shape, 0, member, tile, step, steps))


def events(noted: list[int]) -> list[tuple[int, ...]]:
    """(WAITS, stage, phase) and (COPIES, slot, tile of the CTA, whether it stays wanted); a copy's barrier expects its bytes first, and is its slot's."""
    found: list[tuple[int, ...]] = []
    notes = iter([(noted[i], noted[i + 1], noted[i + 2]) for i in range(0, len(noted), 3)])
    for kind, place, what in notes:
        if kind == WAITS:
            found.append((WAITS, place, what))
        else:
            (copies, barrier, tile), (_, slot, streamed) = next(notes), next(notes)
            assert (kind, copies, what) == (EXPECTS, COPIES, 16)
            assert place == barrier == slot
            found.append((COPIES, slot, tile, streamed))
    return found


@pytest.fixture(scope="module")
def kernel(host_library: Callable[[str], ctypes.CDLL]) -> Kernel:
    text = (CUDA_ROOM / "walk_batched.cuh").read_text()
    source = AROUND.replace("BATCHED_SHAPE", excerpt(text, "struct BatchedShape {", "template <BatchedShape S>\nstruct Batched {"))
    source = source.replace("EXCERPT", excerpt(text, "  // Tile i of a member is tile", "  // ---- the warpgroups that score"))
    cases = "\n".join(f"    case {i}: return ask<{shape.cpp()}>(what, member, i, step, steps, out);" for i, shape in enumerate(SHAPES))
    signature = 'extern "C" int ask(int shape, int what, int member, int i, int step, int steps, int* out)'
    return Kernel(host_library(f"{source}\n{signature} {{\n  switch (shape) {{\n{cases}\n  }}\n  return -1;\n}}\n"))


def test_places_are_the_models(kernel: Kernel) -> None:
    for shape in SHAPES:
        member = shape.tiles % (4 // shape.halves)
        for step in range(5):
            for tile in range(shape.tiles):
                assert kernel.place(shape, member, tile, step) == shape.place(member, tile, step), (shape, tile, step)


def test_streamed_tiles_stand_evenly_and_side_by_side_only_if_they_are_more_than_half() -> None:
    for shape in SHAPES:
        streamed = shape.streamed_tiles
        assert len({*streamed}) == shape.streamed
        assert all(0 <= tile < shape.tiles for tile in streamed)
        gaps = [later - earlier for earlier, later in pairwise(streamed)]
        assert not gaps or max(gaps) - min(gaps) <= 1
        assert shape.stages != 1 or 2 * shape.streamed > shape.tiles + 1 or all(gap >= 2 for gap in gaps), shape


class Stuck(AssertionError):
    """Nobody can go on."""


@dataclass
class Barrier:
    """An mbarrier: a wait for a phase passes when the phase of the other parity is under way."""

    expected: int  # arrivals
    arrived: int = 0
    phase: int = 0  # phases that are over

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.expected:
            self.arrived, self.phase = 0, self.phase + 1

    def passes(self, parity: int) -> bool:
        return self.phase % 2 != parity


@dataclass
class Played:
    """One member's warps, slots and barriers during a walk."""

    kernel: Kernel
    shape: Shape
    member: int
    steps: int
    held: dict[int, int | None] = field(default_factory=dict)  # slot -> tile of the CTA, None while a copy is under way
    copies: list[tuple[int, int]] = field(default_factory=list)  # slot, tile: under way
    fills: int = 0
    readers: dict[int, int] = field(default_factory=dict)  # slot -> warps that read it

    def __post_init__(self) -> None:
        self.members = 4 // self.shape.halves
        self.resident = (self.shape.tiles - self.shape.streamed) * self.members
        self.full = {slot: Barrier(1) for slot in range(self.resident + self.shape.stages * self.members)}
        self.empty = {stage: Barrier(4 * self.shape.halves) for stage in range(self.shape.stages * self.members)}
        self.at_end_of_step = [0] * (4 * self.shape.halves)

    def apply(self, asked: list[tuple[int, ...]]) -> Iterator[Callable[[], bool]]:
        """Yields what must hold before a thread goes on."""
        for kind, place, *what in asked:
            if kind == WAITS:
                yield lambda stage=place, parity=what[0]: self.empty[stage].passes(parity)
            else:
                assert not self.readers.get(place), "overwritten while it is read"
                assert place not in [slot for slot, _ in self.copies], "two copies at once"
                assert what[1] == (place >= self.resident), "what is streamed stays in L2, the rest need not"
                self.held[place] = None
                self.copies.append((place, what[0]))
                self.fills += 1

    def land(self, i: int) -> None:
        slot, tile = self.copies.pop(i)
        self.held[slot] = tile
        self.full[slot].arrive()

    def warp(self, index: int) -> Iterator[Callable[[], bool]]:
        """A warp's walk. The last one fills, as warp 3 of the last half does."""
        fills = index == 4 * self.shape.halves - 1
        if fills:
            yield from self.apply(self.kernel.fill_all(self.shape, self.member, self.steps))
        for step in range(self.steps):
            for tile in range(self.shape.tiles):
                streamed, slot, phase, _ = self.kernel.place(self.shape, self.member, tile, step)
                if streamed or step == 0:
                    yield lambda slot=slot, phase=phase: self.full[slot].passes(phase)
                self.readers[slot] = self.readers.get(slot, 0) + 1
                for _ in range(2):  # at the start of the MMAs and at their end
                    assert self.held.get(slot) == self.member + tile * self.members, f"tile {tile} of step {step} is not in slot {slot}"
                    yield lambda: True
                self.readers[slot] -= 1
                if streamed:
                    self.empty[slot - self.resident].arrive()
                if streamed and fills:
                    yield from self.apply(self.kernel.refill(self.shape, self.member, tile, step, self.steps))
            self.at_end_of_step[index] += 1
            yield lambda step=step: min(self.at_end_of_step) > step

    def play(self, choose: Callable[[list[int]], int]) -> None:
        """To the end; `choose` picks who goes on: warps are 0 and above, copies under way below 0."""
        warps = [self.warp(i) for i in range(4 * self.shape.halves)]
        waiting: dict[int, Callable[[], bool]] = {i: (lambda: True) for i in range(len(warps))}
        while waiting or self.copies:
            able = [i for i, ready in waiting.items() if ready()] + [-1 - i for i in range(len(self.copies))]
            if not able:
                raise Stuck(f"{self.shape}, {self.steps} steps: warps {[*waiting]} wait for what never comes")
            chosen = choose(able)
            if chosen < 0:
                self.land(-1 - chosen)
            else:
                following = next(warps[chosen], None)
                if following is None:
                    del waiting[chosen]
                else:
                    waiting[chosen] = following
        near = self.shape.tiles - self.shape.streamed
        assert self.fills == near + self.steps * self.shape.streamed, "each streamed tile once a step, the others once"


# Copies late and the filler last, copies at once and the filler first, and by chance.
ORDERS: dict[str, Callable[[list[int]], int]] = {"late": max, "early": min, "slow filler": lambda able: min(able, key=abs)}


@pytest.mark.parametrize("order", [*ORDERS, "chance"])
def test_every_tile_is_where_it_is_waited_for(order: str, kernel: Kernel) -> None:
    """Nothing is overwritten before it was scored, no copy is missing or too many, and nobody waits for ever."""
    chance = random.Random(0)
    for shape in SHAPES:
        for steps in (1, 2, 3, 6) if shape.tiles < 6 else (1, 4) if shape.tiles < 10 else (3,):
            member = (shape.tiles + steps) % (4 // shape.halves)
            Played(kernel, shape, member, steps).play(ORDERS.get(order, chance.choice))


def wrong(kernel: Kernel, change: Callable[[tuple[int, ...]], tuple[int, ...] | None], refills: bool) -> Kernel:
    """The kernel with its fills changed."""

    class Wrong(Kernel):
        def fill_all(self, shape: Shape, member: int, steps: int) -> list[tuple[int, ...]]:
            asked = super().fill_all(shape, member, steps)
            return asked if refills else [new for old in asked if (new := change(old))]

        def refill(self, shape: Shape, member: int, tile: int, step: int, steps: int) -> list[tuple[int, ...]]:
            asked = super().refill(shape, member, tile, step, steps)
            return [new for old in asked if (new := change(old))] if refills else asked

    return Wrong(kernel.compiled)


@pytest.mark.parametrize(
    ("change", "refills", "message"),
    [
        (lambda event: None if event[0] == WAITS else event, True, "overwritten while|two copies|is not in slot"),
        (
            lambda event: (WAITS, event[1], 1 - event[2]) if event[0] == WAITS else event,
            True,
            "overwritten while|never comes|two copies|is not in",
        ),
        (lambda event: (COPIES, event[1], event[2] + 2, event[3]) if event[0] == COPIES else event, True, "is not in slot"),
        (lambda event: None if event[0] == COPIES else event, True, "never comes"),
        (lambda event: None if event[1] == 2 * 2 else event, False, "never comes"),
    ],
    ids=["no wait", "other phase", "other tile", "no refill", "empty ring"],
)
def test_the_model_sees_what_is_wrong(change: Callable, refills: bool, message: str, kernel: Kernel) -> None:
    broken, chance = wrong(kernel, change, refills), random.Random(1)

    def play_often() -> None:
        for _ in range(50):
            Played(broken, Shape(5, 3, 1, 2), 0, 4).play(chance.choice)

    with pytest.raises(AssertionError, match=message):
        play_often()
