"""The residency planner: which rows of W2 live in registers, which in shared memory, and whether the walk fits the chip at all."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.device import DeviceSpec
from kernels.walk import Unsupported

RANK = 256
WARPS = 8  # a CTA; 255 registers a thread leave room for exactly these
MAX_REGISTER_TILES = 6  # a warp; a seventh spills (kernels/build.py refuses it), see "Measured facts" in CONTRIBUTING.md
TILE_ROWS = 16
LATENT_BYTES = 4 * (2 * 320 + 16)  # four slots, kernels/cuda/common/latent.cuh
LOOP_BYTES = 144  # LoopState and the load barrier, kernels/cuda/common/walk_loop.cuh


@dataclass(frozen=True)
class Placement:
    """An int8 walk on one device: one CTA a SM, `WARPS` warps, each with its tiles of 16 rows. Bytes are of the whole chip unless named."""

    vocab: int
    steps: int
    ctas: int
    register_tiles: int  # a warp
    smem_tiles: int  # a warp

    @property
    def tiles(self) -> int:
        """Tiles of a warp."""
        return self.register_tiles + self.smem_tiles

    @property
    def in_registers(self) -> tuple[bool, ...]:
        """Where each tile of a warp lives, in the order of its rows.

        walk_resident.cuh works through groups: a share of the register tiles, then one tile of shared memory. A lane's rows must
        rise from group to group, so that the first of equal logits is the lowest row: hence this order.
        """
        near = 3 if self.smem_tiles else 4
        groups = max(self.smem_tiles, -(-self.register_tiles // near))
        order: list[bool] = []
        for group in range(groups):
            share = (group + 1) * self.register_tiles // groups - group * self.register_tiles // groups
            order += [True] * share + [False] * (group < self.smem_tiles)
        return tuple(order)

    @property
    def rows_per_cta(self) -> int:
        return WARPS * self.tiles * TILE_ROWS

    @property
    def register_bytes(self) -> int:
        """W2 bytes in registers."""
        return self.ctas * WARPS * self.register_tiles * TILE_ROWS * RANK

    @property
    def smem_weight_bytes(self) -> int:
        """W2 bytes in shared memory."""
        return self.ctas * WARPS * self.smem_tiles * TILE_ROWS * RANK

    @property
    def smem_bytes_per_cta(self) -> int:
        """Dynamic shared memory of a CTA: weights, latent, row scales, base logits of every step."""
        weights = max(WARPS * self.smem_tiles * TILE_ROWS * RANK, 128)
        return weights + LATENT_BYTES + 4 * self.rows_per_cta + LOOP_BYTES + 2 * self.rows_per_cta * self.steps


def plan(vocab: int, rank: int, device: DeviceSpec, *, steps: int = 16, rf_tiles: int = MAX_REGISTER_TILES) -> Placement:
    """Place an int8 W2 [vocab, rank] wholly on chip.

    steps: the longest walk, whose base logits share the shared memory. rf_tiles: register tiles a warp; the rest goes to shared memory.

    Raises:
        Unsupported: another rank, a device without the instructions, or a W2 that does not fit; says by how much and what would serve it.
    """
    if vocab < 1 or steps < 1:
        raise ValueError(f"a walk needs vocab and steps of at least 1; got {vocab} and {steps}.")
    if rank != RANK:
        raise Unsupported(f"resident_sm90 serves rank {RANK} only; got rank {rank}; backend=sglang_greedy serves every rank.")
    if device.arch != "sm_90a":
        raise Unsupported(
            f"resident_sm90 needs sm_90a; device={device.name} is {device.arch}; choose device=h100 or h200, or backend=reference."
        )
    if not 0 <= rf_tiles <= 9:
        raise ValueError(f"rf_tiles must be 0 to 9 tiles a warp; got {rf_tiles}.")
    rows_per_tile_row = WARPS * TILE_ROWS
    tiles = -(-vocab // (device.sms * rows_per_tile_row))
    register_tiles = min(rf_tiles, tiles)
    rows = tiles * rows_per_tile_row
    placement = Placement(vocab, steps, -(-vocab // rows), register_tiles, tiles - register_tiles)
    if placement.smem_bytes_per_cta > device.smem_bytes_per_cta:
        over_mb = (placement.smem_bytes_per_cta - device.smem_bytes_per_cta) * device.sms / 1e6
        raise Unsupported(
            f"vocab {vocab} in int8 ({vocab * rank / 1e6:.1f} MB) with {steps} steps of base logits needs {over_mb:.1f} MB more than {device.name} keeps "
            f"on chip ({register_tiles} register tiles a warp, {placement.smem_bytes_per_cta} of {device.smem_bytes_per_cta} bytes of shared memory a CTA); "
            "backend=streaming_sm90 serves it."
        )
    return placement
