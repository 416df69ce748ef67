"""Which kernels a step of each arm is made of (Figure 3b): launches and device time by kernel, at two lengths, under graph replay.

What the longer walk has more than the shorter one is what its steps add; what both have is the entry. Beside it stand the complete calls, so
that what no kernel explains can be seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import cast

from experiments.kernel_trace import Activity, idle_us
from experiments.outcome import Outcome, Row
from experiments.plan import Plan
from experiments.protocol import protocol
from experiments.replicas import Part, gather, run_replicas
from experiments.schema import StepAnatomy
from experiments.step_slope import failed_cells, take
from experiments.stopwatch import Shot, Stopwatch
from experiments.subject import Subject
from experiments.workload import assert_variants
from kernels.device import check_live

IDLE = "(between kernels)"  # `analysis.anatomy` knows the row by this name
_L2 = "cold"


def run(plan: Plan) -> Outcome:
    """Every replica in a fresh process; their rows together."""
    ask = _ask(plan)
    assert_variants(ask.variants)
    check_live(plan.config.device)
    parts = run_replicas(plan, ask.replicas, ask.replica_timeout_s)
    return gather(parts, ("samples", "cells", "step_kernels"), lambda part: _lost(plan, part), ask.timing.clock_tolerance)


def run_replica(plan: Plan, replica: int) -> Outcome:
    """What a step_slope measures, and then the kernels of what was right."""
    ask, taken = _ask(plan), take(plan, replica)
    kernels, notes = _trace(taken.right, taken.stopwatch, ask, replica)
    how = {
        "step_kernels": f"median of {ask.timing.rounds} replays under the profiler, {_L2} L2; launches and time of all kernels of one name"
    }
    return Outcome(
        tables={"samples": taken.samples, "cells": taken.cells, "step_kernels": kernels},
        protocol=protocol(ask.timing, taken.stopwatch, ask.replicas, taken.notes + notes) | how,
        resources=taken.resources,
    )


def kernel_rows(replays: Sequence[Sequence[Activity]]) -> list[Row]:
    """One row for every kernel name: launches in a replay and the median of its summed time; and one for the time between kernels.

    Raises:
        RuntimeError: the replays do not launch the same kernels.
    """
    launches = [_by_name(replay) for replay in replays]
    if any(
        {name: len(times) for name, times in of.items()} != {name: len(times) for name, times in launches[0].items()} for of in launches
    ):
        raise RuntimeError("the replays of one graph show different kernels, so the profiler lost some")
    rows: list[Row] = [
        {"kernel": name, "launches": len(times), "time_us": median(sum(of[name]) for of in launches)} for name, times in launches[0].items()
    ]
    return [*rows, {"kernel": IDLE, "launches": 0, "time_us": median(idle_us(replay) for replay in replays)}]


def _by_name(replay: Sequence[Activity]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = defaultdict(list)
    for activity in replay:
        times[activity.name].append(activity.duration_ns / 1e3)
    return dict(times)


def _trace(subjects: Sequence[Subject], stopwatch: Stopwatch, ask: StepAnatomy, replica: int) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    notes: list[str] = []
    for subject in subjects:
        subject.load(0)
        replay = stopwatch.capture(subject.launch, ask.timing.warmup)
        try:
            replays = stopwatch.trace([Shot(replay, _L2)] * ask.timing.rounds)
            found = kernel_rows(replays) if replays else []
        except RuntimeError as error:
            notes.append(f"{subject}: no kernels: {error}")
            continue
        rows += [{**subject.cell, "replica": replica, "l2": _L2, **row} for row in found]
    return rows, notes


def _ask(plan: Plan) -> StepAnatomy:
    return cast(StepAnatomy, plan.config.experiment)


def _lost(plan: Plan, part: Part) -> list[Row]:
    """The cells of a replica that gave nothing."""
    return [row for variant in _ask(plan).variants for row in failed_cells(plan, variant, part.replica, part.status, part.reason)]
