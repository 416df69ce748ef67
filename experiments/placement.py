"""Where the resident walk keeps W2, what that costs, and what the planner said it would cost (Figure 12).

The measurement is that of `step_slope`: every split an arm, interleaved, in fresh processes. Beside it stands the table `plans`: where each
split keeps its tiles, what its kernel uses, and the cost that `kernels.cost` expects. Nothing measured here goes into that expectation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from experiments import step_slope
from experiments.measure import progress
from experiments.outcome import Outcome, Row, of_error
from experiments.plan import Plan
from experiments.schema import Config, Variant
from experiments.schema import Placement as Ask
from experiments.workload import assert_arch, assert_variants, create
from kernels.backends.resident_sm90 import ResidentSm90
from kernels.cost import predict, rates
from kernels.device import check_live
from kernels.placement import WARPS, Placement
from kernels.walk import Limits, Unsupported

run_replica = step_slope.run_replica


def run(plan: Plan) -> Outcome:
    """Plans first, which also compiles every kernel once, before replicas have to do it in their time."""
    ask = cast(Ask, plan.config.experiment)
    assert_variants(ask.variants)
    check_live(plan.config.device)
    rows = [_row(plan.config, ask, variant) for variant in progress(ask.variants, "kernels")]
    outcome = step_slope.run(plan)
    return replace(outcome, tables={**outcome.tables, "plans": rows})


def _row(config: Config, ask: Ask, variant: Variant) -> Row:
    """The plan of a variant. What could not be reached is zero, and `reason` or `unpriced` says why."""
    head, steps = config.head, max(ask.steps)
    row: Row = {
        "device": config.device.name, "head": head.name, "backend": variant.backend, "variant": variant.label, "vocab": head.vocab,
        "rank": head.rank, "batch": ask.batch, "max_steps": steps, "ctas": 0, "register_tiles": 0, "shared_tiles": 0, "streamed_tiles": 0,
        "base_slots": 0, "registers": 0, "spill_bytes": 0, "smem_bytes": 0, "reason": "", "entry_us": 0.0, "step_us": 0.0, "unpriced": "",
    }  # fmt: skip
    try:
        backend, placed = _placed(config, variant, Limits(ask.batch, steps))
    except Exception as error:
        reason = of_error(error)[1]
        return {**row, "reason": reason, "unpriced": reason}
    row |= {
        "ctas": placed.ctas,
        "register_tiles": WARPS * placed.register_tiles,
        "shared_tiles": WARPS * placed.smem_tiles,
        "streamed_tiles": WARPS * placed.streamed_tiles,
        "base_slots": placed.base_slots,
        "smem_bytes": placed.smem_bytes_per_cta,
    }
    return row | _expected(placed, config) | _kernel(backend, placed, config)


def _placed(config: Config, variant: Variant, limits: Limits) -> tuple[ResidentSm90, Placement]:
    backend = create(variant.backend, variant.options)
    assert_arch(backend, config.device)
    if not isinstance(backend, ResidentSm90):
        raise Unsupported(f"backend={variant.backend} keeps no weights on chip; a plan needs backend=resident_sm90.")
    placed = backend.place(config.head.vocab, config.head.rank, limits, config.device)
    if not isinstance(placed, Placement):
        raise Unsupported(f"at batch {limits.max_batch} registers hold no weights; this experiment needs a smaller experiment.batch.")
    return backend, placed


def _expected(placed: Placement, config: Config) -> Row:
    try:
        cost = predict(placed, rates(config.device.name))
    except Unsupported as error:
        return {"unpriced": str(error)}
    return {"entry_us": cost.entry_us, "step_us": cost.step_us}


def _kernel(backend: ResidentSm90, placed: Placement, config: Config) -> Row:
    try:
        kernel = backend.compile(placed, config.device)
    except Exception as error:  # its cells say so too; the plan stays
        return {"reason": of_error(error)[1]}
    smem_bytes = placed.smem_bytes_per_cta + kernel.static_smem_bytes
    return {"registers": kernel.registers, "spill_bytes": kernel.spill_bytes, "smem_bytes": smem_bytes}
