"""What one call costs by input set, and how many steps a few rows prove. The certified walk's time depends on the data.

So a time is one of a distribution over sets of base logits (recorded rounds of a trained drafter, or the paper's flat ones), not over repeats of one set. A
batch above one has recorded sets that share rounds, see `experiments.inputs`. Every cell's arms are prepared for it alone and timed interleaved; no
set is timed before every arm's tokens for it were found right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from typing import Any, cast

from experiments.certified_shares import Widths, certified_shares
from experiments.convert import ConfigError
from experiments.dispatch_replay import dispatched
from experiments.measure import flag_clocks, measure_sets, progress
from experiments.outcome import Outcome, Row, of_cells
from experiments.plan import Plan
from experiments.schema import Certified, Timing
from experiments.stopwatch import Stopwatch
from experiments.walk_latency import Cell, prepare
from experiments.workload import Workload, assert_variants, stopwatch_for
from kernels.device import check_live

_PASSES = 4  # over the sets, as the dispatcher meets them: 512 rounds of 128 sets, a few answers of an engine
_CLOCK_TOLERANCE = Timing().clock_tolerance
_TABLES = ("certified_rounds", "cells", "certified_shares", "approximations")


def run(plan: Plan) -> Outcome:
    """The tables `certified_rounds`, `cells`, `certified_shares`, `approximations` and `certified_dispatch`, all in this process.

    Raises:
        ConfigError: an arm that does not exist, lists longer than the vocabulary, or input sets that all have one answer.
        Unsupported: the device of the config is not here, or the input sets do not fit it.
    """
    ask, config = _ask(plan), plan.config
    assert_variants(ask.variants)
    _assert_listed(ask, config.head.vocab)
    check_live(config.device)
    stopwatch, found = stopwatch_for(config.device), Outcome({name: [] for name in _TABLES})
    for batch in dict.fromkeys((1, *ask.batches)):
        _ask_batch(plan, batch, stopwatch, found)
    flag_clocks(found.tables["certified_rounds"], _CLOCK_TOLERANCE)
    found.tables["certified_dispatch"] = _dispatched(found)
    found.protocol.update(_protocol(ask, stopwatch))
    status, reason = of_cells(found.tables["cells"])
    return Outcome(found.tables, found.protocol, found.resources, status, reason)


def _dispatched(found: Outcome) -> list[Row]:
    """What the dispatcher would have chosen of the exact arms. The fixed point is no serial walk: its time depends on the data, and nobody counts why."""
    others = {row["variant"] for row in found.tables["approximations"]}
    rows = [row for row in found.tables["certified_rounds"] if row["variant"] not in others and row["backend"] != "fixed_point_sm90"]
    return dispatched(rows, passes=_PASSES)


def _ask(plan: Plan) -> Certified:
    return cast(Certified, plan.config.experiment)


def _assert_listed(ask: Certified, vocab: int) -> None:
    if max(ask.listed) > vocab:
        raise ConfigError(
            f"experiment.listed: a list has at most the {vocab} rows of the vocabulary; got {list(ask.listed)}, so list fewer"
        )


def _ask_batch(plan: Plan, batch: int, stopwatch: Stopwatch, found: Outcome) -> None:
    """All cells of one batch, and with one request the shares. The head and the input sets are let go before the next batch has its own."""
    ask = _ask(plan)
    workload = Workload(plan.config, max(ask.steps), batch, ask.sets, min(ask.steps))
    found.protocol.setdefault("sets", {})[str(batch)] = len(workload.sets)
    if batch == 1:
        found.tables["certified_shares"] += _shares(plan, workload)
    if batch in ask.batches:
        for steps, temperature in progress(list(product(ask.steps, ask.temperatures)), f"batch {batch}: cells"):
            _ask_cell(plan, workload, Cell(steps, batch, temperature), stopwatch, found)


def _ask_cell(plan: Plan, workload: Workload, cell: Cell, stopwatch: Stopwatch, found: Outcome) -> None:
    ask = _ask(plan)
    arms, failed = prepare(plan, workload, ask.variants, cell)
    subjects = [workload.subject(arm, cell.steps, cell.batch, cell.temperature) for arm in arms]
    measured = measure_sets(subjects, stopwatch, len(workload.sets), ask.warmup, f"{plan.config.seed}/{cell}")
    found.tables["certified_rounds"] += measured.samples
    found.tables["cells"] += failed + measured.cells
    found.tables["approximations"] += measured.approximations
    found.resources.update({f"{arm.label}.{cell}": asdict(arm.prepared.resources) for arm in arms})


def _shares(plan: Plan, workload: Workload) -> Iterator[Row]:
    ask, config = _ask(plan), plan.config
    size = {"vocab": config.head.vocab, "rank": config.head.rank, "steps": max(ask.steps)}
    widths = Widths(ask.candidates, ask.listed)
    for temperature in ask.temperatures:
        for row in certified_shares(workload.head, workload.sets, temperature, widths):
            yield {"device": config.device.name, "head": config.head.name, **size, **row}


def _protocol(ask: Certified, stopwatch: Stopwatch) -> dict[str, Any]:
    return {
        "warmup": ask.warmup,
        "cold": stopwatch.cold,
        "hot": "the same replay, untimed, directly before every sample",
        "call": "everything an engine would replay, staging included, between two events on the stream",
        "order": "set after set; all arms x cold and hot in seeded random order for each",
        "check": "every set against the oracle, in a launch of its own before it is timed, and its tokens again after; an arm that is wrong for one "
        "set has no samples",
        "tally": "of the launch that was checked: again, searched; -1 of an arm that counts none",
        "shares": "the reference, one request, rule TWICE, each step after the exact walk's tokens; survivors: rows that a search would score",
        "launch_floor_us": stopwatch.launch_floor_us,
        "clock_tolerance": _CLOCK_TOLERANCE,
    }
