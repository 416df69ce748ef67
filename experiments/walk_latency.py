"""What one call costs each arm, by steps, batch and temperature (Figure 10).

A run has one head; `experiment.steps`, `.batches` and `.temperatures` choose the part of the grid. Every cell is a comparison of its own:
its arms are prepared for exactly that batch, length and kind of walk, timed interleaved, and let go. An arm that cannot serve a cell is a
row with its reason.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import cast

from experiments.measure import cell_row, measure, progress
from experiments.outcome import Outcome, Row, Status, of_error
from experiments.plan import Plan
from experiments.protocol import protocol
from experiments.replicas import Part, gather, run_replicas
from experiments.schema import Variant, WalkLatency
from experiments.workload import Arm, Workload, assert_variants, cell_columns, stopwatch_for
from kernels.device import check_live
from kernels.walk import Limits


@dataclass(frozen=True)
class Cell:
    """One point of the grid. Its name is the one that claims have: `g7.bs16.t1`."""

    steps: int
    batch: int
    temperature: float

    @property
    def limits(self) -> Limits:
        """What an engine would prepare for this cell."""
        return Limits(self.batch, self.steps, sampling=self.temperature > 0)

    def __str__(self) -> str:
        return f"g{self.steps}.bs{self.batch}.{f't{self.temperature:g}' if self.temperature else 'greedy'}"


def run(plan: Plan) -> Outcome:
    """Every replica in a fresh process; their rows together."""
    ask = _ask(plan)
    assert_variants(ask.variants)
    check_live(plan.config.device)
    parts = run_replicas(plan, ask.replicas, ask.replica_timeout_s)
    return gather(parts, ("samples", "cells", "approximations"), lambda part: list(_lost(plan, part)), ask.timing.clock_tolerance)


def run_replica(plan: Plan, replica: int) -> Outcome:
    """All cells in this process, in an order of its own. The head and its inputs are drawn once."""
    ask, config = _ask(plan), plan.config
    workload, stopwatch = Workload(config, max(ask.steps), max(ask.batches)), stopwatch_for(config.device)
    found = Outcome({"samples": [], "cells": [], "approximations": []})
    notes: set[str] = set()
    cells = list(_cells(ask))
    random.Random(f"{config.seed}/{replica}").shuffle(cells)
    for cell in progress(cells, f"replica {replica}: cells"):
        arms, failed = prepare(plan, workload, ask.variants, cell, replica)
        subjects = [workload.subject(arm, cell.steps, cell.batch, cell.temperature) for arm in arms]
        measured = measure(subjects, stopwatch, ask.timing, f"{config.seed}/{cell}", replica)
        found.tables["samples"] += measured.samples
        found.tables["cells"] += failed + measured.cells
        found.tables["approximations"] += measured.approximations
        found.resources.update({f"{arm.label}.{cell}": asdict(arm.prepared.resources) for arm in arms})
        notes.update(measured.notes)
    how = {"cells": "one after another, in an order of each replica's own; a cell's arms are prepared for it alone and timed interleaved"}
    found.protocol.update(protocol(ask.timing, stopwatch, ask.replicas, sorted(notes)) | how)
    return found


def prepare(plan: Plan, workload: Workload, variants: Sequence[Variant], cell: Cell, replica: int = 0) -> tuple[list[Arm], list[Row]]:
    """The arms that serve this cell, prepared for it alone, and rows for those that do not."""
    arms: list[Arm] = []
    failed: list[Row] = []
    for variant in variants:
        try:
            arms.append(workload.prepare(variant.label, variant.backend, variant.options, cell.limits))
        except Exception as error:  # this variant's row says why; the others are measured
            failed.append(_failed(plan, variant, cell, replica, *of_error(error)))
    return arms, failed


def _ask(plan: Plan) -> WalkLatency:
    return cast(WalkLatency, plan.config.experiment)


def _cells(ask: WalkLatency) -> Iterator[Cell]:
    return (Cell(*place) for place in product(ask.steps, ask.batches, ask.temperatures))


def _failed(plan: Plan, variant: Variant, cell: Cell, replica: int, status: Status, reason: str) -> Row:
    columns = cell_columns(plan.config, variant.label, variant.backend, cell.steps, cell.batch, cell.temperature)
    return cell_row(columns, replica, status, reason)


def _lost(plan: Plan, part: Part) -> Iterator[Row]:
    """The cells of a replica that gave nothing."""
    ask = _ask(plan)
    return (_failed(plan, variant, cell, part.replica, part.status, part.reason) for cell, variant in product(_cells(ask), ask.variants))
