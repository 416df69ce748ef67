"""Fusion versus residency: what one more step costs each arm, and what entering the walk costs (Figures 4 and 11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from experiments.measure import cell_row, measure
from experiments.outcome import Outcome, Row, Status, of_error
from experiments.plan import Plan
from experiments.protocol import protocol
from experiments.replicas import Part, gather, run_replicas
from experiments.schema import StepSlope, Variant
from experiments.step_clocks import step_clocks
from experiments.stopwatch import Stopwatch
from experiments.subject import Subject
from experiments.workload import Arm, Workload, assert_variants, cell_columns, stopwatch_for
from kernels.device import check_live
from kernels.walk import ClockedWalk, Limits


def run(plan: Plan) -> Outcome:
    """Every replica in a fresh process; their rows together."""
    ask = _ask(plan)
    assert_variants(ask.variants)
    check_live(plan.config.device)
    parts = run_replicas(plan, ask.replicas, ask.replica_timeout_s)
    return gather(parts, ("samples", "cells", "step_clocks"), lambda part: _lost(plan, part), ask.timing.clock_tolerance)


@dataclass(frozen=True)
class Taken:
    """What one process measured: all variants at all lengths, and what it takes to ask them more."""

    workload: Workload
    stopwatch: Stopwatch
    subjects: Sequence[Subject]
    samples: list[Row]
    cells: list[Row]
    notes: list[str]
    resources: dict[str, dict[str, Any]]

    @property
    def right(self) -> list[Subject]:
        """The subjects whose tokens were right."""
        found = {(row["variant"], row["steps"]) for row in self.cells if row["status"] == Status.OK}
        return [subject for subject in self.subjects if (subject.cell["variant"], subject.cell["steps"]) in found]


def take(plan: Plan, replica: int) -> Taken:
    """All variants at all lengths, interleaved, in this process."""
    ask, config = _ask(plan), plan.config
    workload, stopwatch = Workload(config, max(ask.steps), ask.batch), stopwatch_for(config.device)
    subjects: list[Subject] = []
    cells: list[Row] = []
    resources: dict[str, dict[str, Any]] = {}
    for variant in ask.variants:
        try:
            arms = _prepare(workload, variant, ask)
        except Exception as error:  # this variant's cells say why; the others are measured
            cells += failed_cells(plan, variant, replica, *of_error(error))
            continue
        subjects += [workload.subject(arm, steps, ask.batch, ask.temperature) for arm, steps in zip(arms, ask.steps, strict=True)]
        resources[variant.label] = asdict(arms[0].prepared.resources)
    measured = measure(subjects, stopwatch, ask.timing, config.seed, replica)
    return Taken(workload, stopwatch, subjects, measured.samples, cells + measured.cells, measured.notes, resources)


def _prepare(workload: Workload, variant: Variant, ask: StepSlope) -> list[Arm]:
    """The variant's arm for every length. A greedy one serves them all; one that samples counts its launches, and lengths are timed interleaved,
    so that each needs a count of its own."""
    own = len(ask.steps) if ask.temperature else 1
    arms = [workload.prepare(variant.label, variant.backend, variant.options, _limits(ask)) for _ in range(own)]
    return arms * (len(ask.steps) // own)


def run_replica(plan: Plan, replica: int) -> Outcome:
    """What `take` measures, and the in-kernel clocks of the variants that have them."""
    ask, taken = _ask(plan), take(plan, replica)
    right = {subject.cell["variant"] for subject in taken.right}
    clocked = [variant for variant in ask.variants if variant.clocked and variant.label in right]
    clocks, notes = _clocks(clocked, taken.workload, taken.stopwatch, ask, replica)
    return Outcome(
        tables={"samples": taken.samples, "cells": taken.cells, "step_clocks": clocks},
        protocol=protocol(ask.timing, taken.stopwatch, ask.replicas, taken.notes + notes),
        resources=taken.resources,
    )


def _ask(plan: Plan) -> StepSlope:
    return cast(StepSlope, plan.config.experiment)


def _limits(ask: StepSlope) -> Limits:
    """What an engine would prepare for these walks."""
    return Limits(ask.batch, max(ask.steps), sampling=ask.temperature > 0)


def _clocks(
    variants: Sequence[Variant], workload: Workload, stopwatch: Stopwatch, ask: StepSlope, replica: int
) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    for variant in variants:
        try:
            arm = workload.prepare(variant.label, variant.backend, {**variant.options, "clocks": True}, _limits(ask))
            if not isinstance(arm.prepared, ClockedWalk):
                raise TypeError(f"backend {variant.backend} with clocks=true stamps no steps")
            for steps in ask.steps:
                subject = workload.subject(arm, steps, ask.batch, ask.temperature)
                rows += step_clocks(arm.prepared, subject, stopwatch, ask.timing.rounds, replica)
        except Exception as error:
            status, reason = of_error(error)
            return [row for row in rows if row["variant"] != variant.label], [f"no in-kernel clocks of {variant.label}: {status}: {reason}"]
    return rows, []


def failed_cells(plan: Plan, variant: Variant, replica: int, status: Status, reason: str) -> list[Row]:
    """The cells of a variant, at all lengths, that was not measured."""
    ask = _ask(plan)
    named = [cell_columns(plan.config, variant.label, variant.backend, steps, ask.batch, ask.temperature) for steps in ask.steps]
    return [cell_row(columns, replica, status, reason) for columns in named]


def _lost(plan: Plan, part: Part) -> list[Row]:
    """The cells of a replica that gave nothing."""
    return [row for variant in _ask(plan).variants for row in failed_cells(plan, variant, part.replica, part.status, part.reason)]
