"""A plan in words: where every byte lives, beside what the device has, and what the walk is expected to cost.

python -m kernels.placement --vocab 151936 --device h200
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernels.cost import predict, rates
from kernels.device import CONFIGS, DeviceSpec, load
from kernels.placement import BATCHED_TILE_ROWS, RANK, ROW_BYTES, UNIT_BYTES, WARPS, BatchedPlacement, Placement, plan
from kernels.unsupported import Unsupported

_WARP_LANES = 32
_LATENT_RECORD_BYTES = {"int8": 2 * RANK + 16, "bf16": 2 * RANK}  # of a row of W1, kernels/packing.py
_SCALE_BYTES = {"int8": 4, "bf16": 0}  # of a row of W2


@dataclass(frozen=True)
class Share:
    """Bytes of one CTA in one place, what they are, and what the place holds at most; 0 where that is told elsewhere."""

    place: str
    what: str
    cta_bytes: int
    capacity_bytes: int = 0


def shares(placed: Placement | BatchedPlacement, device: DeviceSpec) -> list[Share]:
    """Where the bytes of a CTA live, nearest first; the shared-memory shares add up to its total."""
    near = list(_batched_shares(placed) if isinstance(placed, BatchedPlacement) else _small_shares(placed))
    shared = [share for share in near if share.place == "shared memory"]
    rest = placed.smem_bytes_per_cta - sum(share.cta_bytes for share in shared)
    return [
        Share("registers", _in_registers(placed), placed.register_bytes // placed.ctas, device.register_bytes_per_sm),
        *shared,
        Share("shared memory", "scales, latents, state", rest),
        Share("shared memory", "total", placed.smem_bytes_per_cta, device.smem_bytes_per_cta),
        Share("L2, every step", f"W2, streamed (L2 has {device.l2_bytes:,})", placed.streamed_bytes // placed.ctas),
    ]


def report(placed: Placement | BatchedPlacement, device: DeviceSpec) -> str:
    """The whole plan, for a terminal."""
    weights, rows = _weights(placed), placed.ctas * placed.rows_per_cta
    lines = [
        f"W2 [{placed.vocab:,}, {RANK}] in {weights} ({placed.vocab * ROW_BYTES[weights] / 1e6:.1f} MB) on {device.name}: "
        f"up to {_count(placed.requests, 'request')}, up to {_count(placed.steps, 'step')}, {'sampled or greedy' if placed.sampling else 'greedy'}.",
        f"{_layout(placed)}; {placed.ctas} of {device.sms} SMs, {rows:,} rows.",
        "",
        f"{'':15}{'':36}{'bytes a CTA':>13}{'of':>13}{'':>7}{'whole chip':>14}",
    ]
    for share in shares(placed, device):
        of = f"{share.capacity_bytes:>13,}{share.cta_bytes / share.capacity_bytes:>7.0%}" if share.capacity_bytes else f"{'':20}"
        lines.append(f"{share.place:15}{share.what:36}{share.cta_bytes:>13,}{of}{share.cta_bytes * placed.ctas:>14,}")
    stored = rows * (ROW_BYTES[weights] + _SCALE_BYTES[weights]) + placed.vocab * _LATENT_RECORD_BYTES[weights]
    lines += [f"{'HBM':15}{'W2 and W1, packed':36}{'':33}{stored:>14,}", "", _expected(placed, device)]
    return "\n".join(lines)


def _small_shares(placed: Placement) -> Iterator[Share]:
    smem, stages = WARPS * placed.smem_tiles * placed.tile_bytes, WARPS * placed.stages * UNIT_BYTES
    base = 2 * placed.requests * placed.rows_per_cta * placed.base_slots
    yield Share("shared memory", f"W2, {_count(placed.smem_tiles, 'tile')} a warp", smem)
    yield Share("shared memory", f"ring, {_count(placed.stages, 'unit')} a warp", stages)
    yield Share("shared memory", f"base logits of {_count(placed.base_slots, 'step')}", base)


def _batched_shares(placed: BatchedPlacement) -> Iterator[Share]:
    tile_bytes = BATCHED_TILE_ROWS * RANK
    yield Share("shared memory", f"W2, {_count(placed.resident_tiles, 'tile')}", placed.resident_tiles * tile_bytes)
    yield Share("shared memory", f"ring, {_count(placed.stages, 'tile')}", placed.stages * tile_bytes)


def _in_registers(placed: Placement | BatchedPlacement) -> str:
    if isinstance(placed, BatchedPlacement):
        return "no W2"
    words = placed.register_tiles * placed.tile_bytes // (4 * _WARP_LANES)
    return f"W2, {_count(placed.register_tiles, 'tile')} a warp ({words} a thread)"


def _layout(placed: Placement | BatchedPlacement) -> str:
    if isinstance(placed, BatchedPlacement):
        return f"walk_batched.cuh: a CTA has {_count(placed.tiles, 'tile')} of {BATCHED_TILE_ROWS} rows, {placed.streamed_tiles} of them streamed"
    return f"walk_resident.cuh (where the compiler spills, the backend takes fewer register tiles): a CTA has {WARPS} warps of {_count(placed.tiles, 'tile')} of 16 rows, {placed.streamed_tiles} of them streamed"


def _expected(placed: Placement | BatchedPlacement, device: DeviceSpec) -> str:
    try:
        cost = predict(placed, rates(device.name))
    except Unsupported as error:
        return f"Expected cost: unknown; {error}"
    return (
        f"Expected, cold L2: {cost.entry_us:.1f} us to enter and {cost.step_us:.2f} us a step; {cost.at(placed.steps):.1f} us at "
        f"{_count(placed.steps, 'step')} (kernels/cost.py says where that does not hold)."
    )


def _weights(placed: Placement | BatchedPlacement) -> str:
    return "int8" if isinstance(placed, BatchedPlacement) else placed.weights


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a plan. 2 if there is none; then the reason is one sentence."""
    devices = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    parser = argparse.ArgumentParser(
        prog="python -m kernels.placement",
        description="Where a resident walk keeps every byte of W2: registers, shared memory, or L2 at every step; and what it should cost. No GPU needed.",
    )
    parser.add_argument("--vocab", type=int, required=True, help="rows of W2")
    parser.add_argument("--rank", type=int, default=RANK, help="columns of W2 (%(default)s)")
    parser.add_argument("--weights", choices=("int8", "bf16"), default="int8", help="how W2 is kept (%(default)s)")
    parser.add_argument("--device", choices=devices, default="h200", help="one of configs/device (%(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="the most requests of a walk (%(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="the longest walk (%(default)s)")
    parser.add_argument("--sampling", action="store_true", help="serve temperature > 0 too")
    parser.add_argument("--rf-tiles", type=int, help="16-row tiles a warp keeps in registers; the most that do not spill if left out")
    asked = parser.parse_args(arguments)
    device = load(asked.device)
    try:
        placed = plan(
            asked.vocab,
            asked.rank,
            device,
            steps=asked.steps,
            batch=asked.batch,
            sampling=asked.sampling,
            weights=asked.weights,
            rf_tiles=asked.rf_tiles,
        )
    except (Unsupported, ValueError) as error:
        print(f"placement: {error}", file=sys.stderr)
        return 2
    print(report(placed, device))
    return 0
