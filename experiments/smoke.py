"""Does the chosen backend answer, rightly, on this machine? A few walks, checked and timed, in seconds."""

from __future__ import annotations

from dataclasses import asdict
from typing import cast

from experiments.measure import cell_row, flag_clocks, measure
from experiments.outcome import Outcome, of_cells, of_error
from experiments.plan import Plan
from experiments.protocol import protocol
from experiments.schema import Smoke
from experiments.workload import Workload, cell_columns, create, stopwatch_for
from kernels.build import BuildError
from kernels.walk import Unsupported


def run(plan: Plan) -> Outcome:
    """Samples and cells of the config's backend, in this process."""
    config, ask = plan.config, cast(Smoke, plan.config.experiment)
    backend = config.backend
    create(backend.name, backend.options)
    try:
        workload = Workload(config, max(ask.steps), ask.batch)
        arm = workload.prepare(backend.name, backend.name, backend.options)
    except (Unsupported, BuildError) as error:
        status, reason = of_error(error)
        named = [cell_columns(config, backend.name, backend.name, steps, ask.batch) for steps in ask.steps]
        return Outcome({"cells": [cell_row(columns, 0, status, reason) for columns in named]}, status=status, reason=reason)
    stopwatch = stopwatch_for(config.device)
    measured = measure([workload.subject(arm, steps) for steps in ask.steps], stopwatch, ask.timing, config.seed)
    flag_clocks(measured.samples, ask.timing.clock_tolerance)
    status, reason = of_cells(measured.cells)
    return Outcome(
        tables={"samples": measured.samples, "cells": measured.cells, "approximations": measured.approximations},
        protocol=protocol(ask.timing, stopwatch, replicas=1, notes=measured.notes),
        resources={arm.label: asdict(arm.prepared.resources)},
        status=status,
        reason=reason,
    )
