"""What a plan of walk_resident.cuh is expected to cost, before anything runs: a few measured rates and a sum.

A complete call of n steps with cold L2 takes entry + n * step:

    entry   = launch and set-up + resident bytes / HBM rate + what step 0 loses because its streamed tiles come from HBM
    step    = scoring + agreement + base logits / HBM rate
    scoring = start + max(tensor cores, shared memory, streaming) + epilogue

The three of scoring run side by side; the epilogue does not. What fits into the ring is streamed while the CTAs agree.

Calibrated on one greedy int8 request at V = 151,936 with 6 of 9 tiles a warp in registers (see configs/cost). Other vocabularies, splits,
two or four requests and bf16 weights are extrapolations. It knows nothing of spills: where registers spill, a walk is slower than this says.
Walks that sample and those of walk_batched.cuh are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path

import yaml

from kernels.placement import UNIT_BYTES, WARPS, BatchedPlacement, Placement
from kernels.unsupported import Unsupported

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "cost"
_SCALE_BYTES = 4  # an fp32 scale for every row of an int8 W2
_ROWS_PER_SETTLE = 2  # rows g and g + 8 of a tile


@dataclass(frozen=True)
class Rates:
    """What was measured of one device, see configs/cost/NAME.yaml for the sources. Cycles and bytes a cycle are of one SM.

    start_us:       launch and set-up: what entering costs besides the bytes
    l2_kept_bytes:  of what is read at every step, so much stays in L2; the rest comes from HBM
    agree_cycles:   from the warps' maxima to the next latent: reductions, barriers, exchange
    """

    device: str
    start_us: float
    hbm_gb_s: float
    l2_gb_s: float
    l2_kept_bytes: float
    clock_ghz: float
    mma_bytes_per_cycle: float
    shared_bytes_per_cycle: float
    settle_cycles_per_row: float
    score_start_cycles: float
    agree_cycles: float

    def cycles_us(self, cycles: float) -> float:
        """SM cycles inside a walk as time."""
        return cycles / (self.clock_ghz * 1e3)

    def hbm_us(self, size_bytes: float) -> float:
        """A read from HBM by the whole chip."""
        return size_bytes / (self.hbm_gb_s * 1e3)

    def stream_us(self, size_bytes: float) -> float:
        """A read that the whole chip repeats at every step."""
        kept = min(size_bytes, self.l2_kept_bytes)
        return kept / (self.l2_gb_s * 1e3) + self.hbm_us(size_bytes - kept)


@dataclass(frozen=True)
class Cost:
    """A predicted line: us a call is entry + step * steps."""

    entry_us: float
    step_us: float

    def at(self, steps: int) -> float:
        """Us of a complete call with cold L2."""
        return self.entry_us + self.step_us * steps


def rates(device: str) -> Rates:
    """The measured rates of `device`.

    Raises:
        Unsupported: nobody measured it.
    """
    path = CONFIGS / f"{device}.yaml"
    if not path.exists():
        known = ", ".join(sorted(known.stem for known in CONFIGS.glob("*.yaml")))
        raise Unsupported(f"no rates of device={device} were measured; configs/cost has: {known}.")
    return Rates(**yaml.safe_load(path.read_text()))


def predict(placement: Placement | BatchedPlacement, of: Rates) -> Cost:
    """The expected cost of a plan.

    Raises:
        Unsupported: a kind of walk that the model does not cover.
    """
    if isinstance(placement, BatchedPlacement) or placement.sampling:
        kind = "sampled walks" if placement.sampling else f"walks of {placement.requests} requests"
        raise Unsupported(f"the cost model covers greedy walks of walk_resident.cuh; it knows nothing of {kind}.")
    resident = placement.register_bytes + placement.smem_weight_bytes
    scales = _SCALE_BYTES * placement.ctas * placement.rows_per_cta if placement.weights == "int8" else 0
    first_us, later_us = (
        score_us(placement, of, streaming) for streaming in (of.hbm_us(placement.streamed_bytes), _streaming_us(placement, of))
    )
    # Base logits of the first slots come with the weights, those of later steps while the CTAs agree.
    base_us = of.hbm_us(2 * placement.requests * placement.vocab) * min(placement.base_slots / placement.steps, 1)
    return Cost(
        entry_us=of.start_us + of.hbm_us(resident + scales) + first_us - later_us,
        step_us=later_us + of.cycles_us(of.agree_cycles) + base_us,
    )


def score_us(placement: Placement, of: Rates, streaming_us: float) -> float:
    """From a latent to every lane's best row, beside a stream that lasts `streaming_us`."""
    tile_bytes = WARPS * placement.tile_bytes  # of all warps of a CTA
    mma = placement.tiles * tile_bytes / of.mma_bytes_per_cycle
    # A streamed tile is written to shared memory and read from there.
    shared = (placement.smem_tiles + 2 * placement.streamed_tiles) * tile_bytes / of.shared_bytes_per_cycle
    rows_per_lane = _ROWS_PER_SETTLE * ceil(placement.tiles * placement.requests / 4)  # the lanes of a quad share a group of four tiles
    alone = of.score_start_cycles + rows_per_lane * of.settle_cycles_per_row
    return of.cycles_us(alone) + max(of.cycles_us(mma), of.cycles_us(shared), streaming_us)


def _streaming_us(placement: Placement, of: Rates) -> float:
    """What is left to stream when a step begins: the first units came while the CTAs agreed on the last token."""
    ring_bytes = placement.ctas * WARPS * placement.stages * UNIT_BYTES
    return max(0.0, of.stream_us(placement.streamed_bytes) - min(of.stream_us(ring_bytes), of.cycles_us(of.agree_cycles)))
