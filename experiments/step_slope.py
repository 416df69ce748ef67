"""Fusion versus residency: what one more step costs each arm, and what entering the walk costs (Figures 4 and 11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import cast

from experiments.measure import cell_row, measure
from experiments.outcome import Outcome, Row, Status, of_error
from experiments.plan import Plan
from experiments.protocol import protocol
from experiments.replicas import Part, gather, run_replicas
from experiments.schema import StepSlope, Variant
from experiments.step_clocks import step_clocks
from experiments.stopwatch import Stopwatch
from experiments.workload import Arm, Workload, assert_variants, cell_columns, stopwatch_for
from kernels.device import check_live
from kernels.walk import ClockedWalk


def run(plan: Plan) -> Outcome:
    """Every replica in a fresh process; their rows together."""
    ask = _ask(plan)
    assert_variants(ask.variants)
    check_live(plan.config.device)
    parts = run_replicas(plan, ask.replicas, ask.replica_timeout_s)
    return gather(parts, ("samples", "cells", "step_clocks"), lambda part: _lost(plan, part), ask.timing.clock_tolerance)


def run_replica(plan: Plan, replica: int) -> Outcome:
    """All variants at all lengths, interleaved, in this process."""
    ask, config = _ask(plan), plan.config
    workload, stopwatch = Workload(config, max(ask.steps), ask.batch), stopwatch_for(config.device)
    arms: list[Arm] = []
    cells: list[Row] = []
    for variant in ask.variants:
        try:
            arms.append(workload.prepare(variant.label, variant.backend, variant.options))
        except Exception as error:  # this variant's cells say why; the others are measured
            cells += _failed(plan, variant, replica, *of_error(error))
    subjects = [workload.subject(arm, steps) for arm in arms for steps in ask.steps]
    measured = measure(subjects, stopwatch, ask.timing, config.seed, replica)
    right = {(row["variant"], row["steps"]) for row in measured.cells if row["status"] == Status.OK}
    clocked = [variant for variant in ask.variants if variant.clocked and any(label == variant.label for label, _ in right)]
    clocks, notes = _clocks(clocked, workload, stopwatch, ask, replica)
    return Outcome(
        tables={"samples": measured.samples, "cells": cells + measured.cells, "step_clocks": clocks},
        protocol=protocol(ask.timing, stopwatch, ask.replicas, measured.notes + notes),
        resources={arm.label: asdict(arm.prepared.resources) for arm in arms},
    )


def _ask(plan: Plan) -> StepSlope:
    return cast(StepSlope, plan.config.experiment)


def _clocks(
    variants: Sequence[Variant], workload: Workload, stopwatch: Stopwatch, ask: StepSlope, replica: int
) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    for variant in variants:
        try:
            arm = workload.prepare(variant.label, variant.backend, {**variant.options, "clocks": True})
            if not isinstance(arm.prepared, ClockedWalk):
                raise TypeError(f"backend {variant.backend} with clocks=true stamps no steps")
            for steps in ask.steps:
                rows += step_clocks(arm.prepared, workload.subject(arm, steps), stopwatch, ask.timing.rounds, replica)
        except Exception as error:
            status, reason = of_error(error)
            return [row for row in rows if row["variant"] != variant.label], [f"no in-kernel clocks of {variant.label}: {status}: {reason}"]
    return rows, []


def _failed(plan: Plan, variant: Variant, replica: int, status: Status, reason: str) -> list[Row]:
    ask = _ask(plan)
    named = [cell_columns(plan.config, variant.label, variant.backend, steps, ask.batch) for steps in ask.steps]
    return [cell_row(columns, replica, status, reason) for columns in named]


def _lost(plan: Plan, part: Part) -> list[Row]:
    """The cells of a replica that gave nothing."""
    return [row for variant in _ask(plan).variants for row in _failed(plan, variant, part.replica, part.status, part.reason)]
