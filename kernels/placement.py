"""The residency planner: which rows of W2 live in registers, which in shared memory, which come from L2 at every step.

Two kernels share the work. `Placement` is that of walk_resident.cuh (up to four requests, eight if they are greedy), `BatchedPlacement`
that of walk_batched.cuh (up to 64). One CTA a SM; what fits is resident, the rest is streamed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kernels.device import DeviceSpec
from kernels.unsupported import Unsupported

RANK = 256
WARPS = 8  # a CTA of walk_resident.cuh; 255 registers a thread leave room for exactly these
TILE_ROWS = 16  # of mma.sync
SMALL_BATCH = 4  # the eight columns of an MMA are four requests in two int8 planes
GREEDY_BATCH = 8  # requests that walk_resident.cuh serves if all are greedy: two column blocks; more leave no registers for weights
MAX_BATCH = 64  # requests that walk_batched.cuh serves
BATCHED_TILE_ROWS = 64
LATENT_BYTES = {"int8": 2 * 320 + 16, "bf16": 512}  # of a slot, kernels/cuda/common/latent.cuh
LOOP_BYTES = 144  # LoopState and the load barrier of a batch-1 greedy walk, kernels/cuda/common/walk_loop.cuh
ROW_BYTES = {"int8": RANK, "bf16": 2 * RANK}
MAX_REGISTER_TILES = {"int8": 6, "bf16": 3}  # a warp; one more spills, see "Measured facts" in CONTRIBUTING.md
UNIT_BYTES = 4096  # what walk_resident.cuh streams at once: 16 rows of int8 or half of those of bf16
_STAGES = 2  # streamed units of a warp in flight
_MOST_MEMBER_TILES = 32  # of a warpgroup of walk_batched.cuh: the bits of a word say which are streamed


class Place(StrEnum):
    """Where a tile of W2 lives during a walk."""

    REGISTERS = "registers"
    SHARED = "shared"
    STREAMED = "streamed"


@dataclass(frozen=True)
class Placement:
    """A walk of walk_resident.cuh on one device: `WARPS` warps a CTA, each with its tiles of 16 rows. Bytes are of the whole chip unless named.

    steps:      the longest walk
    base_slots: steps of base logits that shared memory holds at once
    requests:   1, 2, 4 or 8
    """

    vocab: int
    steps: int
    ctas: int
    register_tiles: int  # a warp
    smem_tiles: int  # a warp
    streamed_tiles: int = 0  # a warp and step
    stages: int = 0  # streamed units of a warp in shared memory at once
    base_slots: int = 16
    requests: int = 1
    sampling: bool = False
    weights: str = "int8"

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 32 * WARPS

    @property
    def tiles(self) -> int:
        """Tiles of a warp."""
        return self.register_tiles + self.smem_tiles + self.streamed_tiles

    @property
    def places(self) -> tuple[Place, ...]:
        """Where each tile of a warp lives, in the order of its rows.

        walk_resident.cuh works through groups of up to four tiles (two with 8 requests): a share of the register tiles, then a share of the
        others, among which the streamed ones stand evenly. A lane's rows must rise from group to group, so that the first of equal
        logits is the lowest row: hence this order.
        """
        groups, far = -(-self.tiles // min(4, max(16 // self.requests, 1))), self.smem_tiles + self.streamed_tiles
        others = [
            Place.STREAMED if (i + 1) * self.streamed_tiles // far > i * self.streamed_tiles // far else Place.SHARED for i in range(far)
        ]
        order: list[Place] = []
        for group in range(groups):
            first, end = (edge * self.tiles // groups for edge in (group, group + 1))
            share = others[first * far // self.tiles : end * far // self.tiles]
            order += [Place.REGISTERS] * (end - first - len(share)) + share
        return tuple(order)

    @property
    def tile_bytes(self) -> int:
        return TILE_ROWS * ROW_BYTES[self.weights]

    @property
    def rows_per_cta(self) -> int:
        return WARPS * self.tiles * TILE_ROWS

    @property
    def register_bytes(self) -> int:
        """W2 bytes in registers."""
        return self.ctas * WARPS * self.register_tiles * self.tile_bytes

    @property
    def smem_weight_bytes(self) -> int:
        """W2 bytes that stay in shared memory."""
        return self.ctas * WARPS * self.smem_tiles * self.tile_bytes

    @property
    def streamed_bytes(self) -> int:
        """W2 bytes read at every step."""
        return self.ctas * WARPS * self.streamed_tiles * self.tile_bytes

    @property
    def smem_bytes_per_cta(self) -> int:
        """Dynamic shared memory of a CTA: struct Smem of walk_resident.cuh and the base slots that follow it."""
        rows, requests = self.rows_per_cta, self.requests
        parts = [
            (max(WARPS * self.smem_tiles * self.tile_bytes, 128), 128),
            (max(WARPS * self.stages * UNIT_BYTES, 128), 128),
            (requests * latent_slots(requests) * LATENT_BYTES[self.weights], 16),
            (4 * rows if self.weights == "int8" else 16, 16),
            (4 * requests * rows if self.sampling else 16, 16),
            (_aligned(requests * 32 * (8 if self.sampling else 4) + 4 * requests, 8 if self.sampling else 4), 8),
            (8, 8),
            (8 * max(WARPS * self.stages, 1), 8),
            (2 * requests * rows * self.base_slots, 16),
        ]
        return _struct_bytes(parts)


@dataclass(frozen=True)
class BatchedPlacement:
    """A walk of walk_batched.cuh on one device: int8 tiles of 64 rows in shared memory. Bytes are of the whole chip unless named."""

    vocab: int
    steps: int
    ctas: int
    tiles: int  # of a CTA
    resident_tiles: int  # of a CTA
    stages: int  # streamed tiles of a CTA in shared memory at once
    requests: int
    sampling: bool = False

    @property
    def threads(self) -> int:
        """Of a CTA: four warpgroups."""
        return 512

    @property
    def streamed_tiles(self) -> int:
        return self.tiles - self.resident_tiles

    @property
    def halves(self) -> int:
        """Groups of 32 requests."""
        return _halves(self.requests)

    @property
    def members(self) -> int:
        """Warpgroups that share the tiles of a half. Each has as many, and streams the same ones of its own."""
        return 4 // self.halves

    @property
    def copies(self) -> int:
        """How often a group of 32 holds each request."""
        return 4 if self.requests <= 8 else 2 if self.requests <= 16 else 1

    @property
    def width(self) -> int:
        """Requests that the kernel has room for."""
        return 32 * self.halves // self.copies

    @property
    def rows_per_cta(self) -> int:
        return self.tiles * BATCHED_TILE_ROWS

    @property
    def register_bytes(self) -> int:
        return 0

    @property
    def smem_weight_bytes(self) -> int:
        """W2 bytes that stay in shared memory."""
        return self.ctas * self.resident_tiles * BATCHED_TILE_ROWS * RANK

    @property
    def streamed_bytes(self) -> int:
        """W2 bytes read at every step."""
        return self.ctas * self.streamed_tiles * BATCHED_TILE_ROWS * RANK

    @property
    def smem_bytes_per_cta(self) -> int:
        """Dynamic shared memory of a CTA: struct Smem of walk_batched.cuh."""
        slots, requests = self.resident_tiles + self.stages, self.width
        parts = [
            (slots * BATCHED_TILE_ROWS * RANK, 128),
            ((2 * RANK + 64) * requests, 16),
            (4 * self.rows_per_cta, 16),
            (8 * self.members * self.copies * requests, 16),
            (16 * (requests if self.sampling else 1), 16),
            (16 * (self.threads if self.sampling else 1), 16),
            (8 * slots, 8),
            (8 * max(self.stages, 1), 8),
        ]
        return _aligned(_struct_bytes(parts), 128)


def latent_slots(requests: int) -> int:
    """Latents of a request in shared memory at once, as kernels/cuda/common/latent.cuh has it."""
    return 4 if requests <= 4 else 3


def plan(
    vocab: int,
    rank: int,
    device: DeviceSpec,
    *,
    steps: int = 16,
    batch: int = 1,
    sampling: bool = False,
    weights: str = "int8",
    rf_tiles: int | None = None,
) -> Placement | BatchedPlacement:
    """Place W2 [vocab, rank] for walks of up to `batch` requests and `steps` steps.

    rf_tiles: register tiles a warp, where walk_resident.cuh serves; None takes the most that do not spill.

    Raises:
        Unsupported: another rank or batch, a device without the instructions, or buffers that do not fit; says by how much and what would serve it.
    """
    if vocab < 1 or steps < 1 or batch < 1:
        raise ValueError(f"a walk needs vocab, steps and batch of at least 1; got {vocab}, {steps} and {batch}.")
    if rank != RANK:
        raise Unsupported(f"resident_sm90 serves rank {RANK} only; got rank {rank}; backend=sglang_folded serves every rank.")
    if device.arch != "sm_90a":
        raise Unsupported(
            f"resident_sm90 needs sm_90a; device={device.name} is {device.arch}; choose device=h100 or h200, or backend=reference."
        )
    if batch > MAX_BATCH:
        raise Unsupported(f"resident_sm90 walks up to {MAX_BATCH} requests; got batch {batch}; split it, or take backend=sglang_folded.")
    if batch <= SMALL_BATCH or (batch <= GREEDY_BATCH and not sampling and weights == "int8"):
        return _plan_small(vocab, device, steps, batch, sampling, weights, rf_tiles)
    if weights != "int8":
        raise Unsupported(
            f"bf16 weights serve up to {SMALL_BATCH} requests; got batch {batch}; take weights=int8 or backend=sglang_folded."
        )
    return _plan_batched(vocab, device, steps, batch, sampling)


def _plan_small(vocab: int, device: DeviceSpec, steps: int, batch: int, sampling: bool, weights: str, rf_tiles: int | None) -> Placement:
    """Registers first, then shared memory; what is left over is streamed through `stages`, which shared memory must also hold."""
    requests = next(n for n in (1, 2, 4, 8) if batch <= n)
    if rf_tiles is None:
        rf_tiles = MAX_REGISTER_TILES[weights] - (1 if requests == 8 else 0)  # the other column block needs the registers of one
    if not 0 <= rf_tiles <= 9:
        raise ValueError(f"rf_tiles must be 0 to 9 tiles a warp; got {rf_tiles}.")
    tiles = -(-vocab // (device.sms * WARPS * TILE_ROWS))
    near = min(rf_tiles, tiles)
    ctas = -(-vocab // (tiles * WARPS * TILE_ROWS))

    def placed(smem_tiles: int, stages: int, base_slots: int) -> Placement:
        streamed = tiles - near - smem_tiles
        return Placement(vocab, steps, ctas, near, smem_tiles, streamed, stages, base_slots, requests, sampling, weights)

    def fits(placement: Placement) -> bool:
        return placement.smem_bytes_per_cta <= device.smem_bytes_per_cta

    fewest = min(steps, 2)  # one slot in use, one under way
    for base_slots in range(steps, fewest - 1, -1):
        if fits(whole := placed(tiles - near, 0, base_slots)):
            return whole
    for smem_tiles in range(tiles - near - 1, -1, -1):
        for base_slots in range(min(steps, 4), fewest - 1, -1):
            if fits(partial := placed(smem_tiles, _STAGES, base_slots)):
                return partial
    least = placed(0, _STAGES, fewest)
    raise Unsupported(
        f"vocab {vocab} needs {least.smem_bytes_per_cta} bytes of shared memory a CTA for base logits, scales and two stages of weights; "
        f"{device.name} has {device.smem_bytes_per_cta}; backend={'sglang_folded' if sampling else 'sglang_greedy'} serves it."
    )


def _halves(requests: int) -> int:
    return 1 if requests <= 32 else 2


def _member_stages(members: int, tiles: int, streamed: int) -> int:
    """One stage fills while its member scores another tile, so it does where every other tile is streamed at most. With two members (above
    32 requests), whose stages wait for both halves, more need two. With four a second stage each costs more than it hides: its place saves
    12 MB a step of V = 248,320, which then fits in L2 (16 greedy requests, 15 steps: 253 to 187 us; 64 requests: 374 to 412)."""
    if not streamed:
        return 0
    return 1 if members == 4 or 2 * streamed <= tiles + 1 else 2


def _plan_batched(vocab: int, device: DeviceSpec, steps: int, batch: int, sampling: bool) -> BatchedPlacement:
    members, other = 4 // _halves(batch), "sglang_folded" if sampling else "sglang_greedy"
    own = -(-vocab // (device.sms * BATCHED_TILE_ROWS * members))  # tiles of a member
    ctas = -(-vocab // (own * members * BATCHED_TILE_ROWS))

    def placed(near: int, stages: int) -> BatchedPlacement:
        return BatchedPlacement(vocab, steps, ctas, own * members, near * members, stages * members, batch, sampling)

    if own > _MOST_MEMBER_TILES:
        raise Unsupported(
            f"vocab {vocab} gives a warpgroup {own} tiles of {BATCHED_TILE_ROWS} rows at batch {batch}, and {_MOST_MEMBER_TILES} are the most; "
            f"take a smaller batch or backend={other}."
        )
    choices = [placed(near, _member_stages(members, own, own - near)) for near in range(own, -1, -1)]
    for placement in choices:
        if placement.smem_bytes_per_cta <= device.smem_bytes_per_cta:
            return placement
    raise Unsupported(
        f"vocab {vocab} needs {min(choice.smem_bytes_per_cta for choice in choices)} bytes of shared memory a CTA for row scales, latents and a "
        f"ring of weights; {device.name} has {device.smem_bytes_per_cta}; backend={other} serves it."
    )


def _struct_bytes(fields: list[tuple[int, int]]) -> int:
    """Size of a C++ struct of fields (size, alignment) in bytes, without padding at its end."""
    total = 0
    for size, alignment in fields:
        total = _aligned(total, alignment) + size
    return total


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


if __name__ == "__main__":
    import sys

    from kernels.plan_report import main

    sys.exit(main())
