"""One complete call by head, steps, batch and temperature: times of every arm, speed-ups of the resident walk, and what is missing.

A cell is taken whole from the newest run that has it, because arms may only be compared within a process; so any part of the grid can be
measured again. Intervals are over replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.bootstrap import Estimate, bootstrap, median, median_ratio
from analysis.load import Run
from analysis.slope import medians

EXPERIMENT = "walk_latency"
RESIDENT, DEFAULT = "resident", "sglang_folded"
STOCK = (DEFAULT, "sglang_greedy", "vllm_addmm")  # what engines run today; eligible in a cell where they were timed
# The paper's grid: head, vocabulary, steps; and the vLLM port's cell at V = 129,280.
WALKS = (("markov_v129k", 129_280, 5), ("markov_v152k", 151_936, 7), ("markov_v152k", 151_936, 16), ("markov_v248k", 248_320, 15))
BATCHES = (1, 2, 4, 8, 16, 32, 64)
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    head: str
    steps: int
    batch: int
    temperature: float


@dataclass(frozen=True)
class Latency:
    """What one run says of a cell: us a call of every timed arm, and why an arm, or some of its replicas, has no times."""

    run: Run
    times: Mapping[str, Estimate]
    speedups: Mapping[str, Estimate]  # of the resident walk over each timed stock arm
    fastest: Estimate | None  # its speed-up over the fastest timed stock arm
    gaps: Mapping[str, str]


def commands(device: str, experiment: str = EXPERIMENT) -> dict[tuple[str, int], str]:
    """The shell line that measures each of WALKS, by head and steps."""
    lines = {}
    for head, _, _ in WALKS:
        steps = [str(length) for name, _, length in WALKS if name == head]
        line = f"python -m experiments.run experiment={experiment} device={device} head={head} 'experiment.steps=[{','.join(steps)}]'"
        lines.update({(head, int(length)): line for length in steps})
    return lines


def latencies(runs: Sequence[Run], *, l2: str = "cold", scope: str = "call") -> dict[Cell, Latency]:
    """Every cell that one of `runs` has, from the first such run: pass `all_runs`, the newest first."""
    found: dict[Cell, Latency] = {}
    for run in runs:
        samples, keys = run.table("samples"), ["head", "steps", "batch", "temperature"]
        timed = dict(iter(samples[(samples["l2"] == l2) & (samples["scope"] == scope)].groupby(keys)))
        for key, rows in run.table("cells").groupby(keys):
            first = rows.iloc[0]
            cell = Cell(first["head"], int(first["steps"]), int(first["batch"]), float(first["temperature"]))
            if cell not in found:
                found[cell] = _latency(run, timed.get(key, samples.iloc[:0]), rows)
    return found


def median_time(samples: pd.DataFrame, variant: str, **cell: object) -> Estimate | None:
    """Us a call of one arm; `cell` fixes columns of the table `samples`, its steps too. None where it was not timed."""
    paired = _paired([_replicas(samples, variant, cell)])
    return None if paired is None else bootstrap(paired[:, 0], median)


def speedup(samples: pd.DataFrame, variant: str, against: Sequence[str], **cell: object) -> Estimate | None:
    """The time of the fastest arm of `against` over that of `variant`. None where one of them was not timed."""
    return _ratio([_replicas(samples, arm, cell) for arm in (variant, *against)])


def sampling_cost(samples: pd.DataFrame, variant: str, **cell: object) -> Estimate | None:
    """The time of an arm at the cell's temperature over that of its greedy walk. None where one of them was not timed."""
    return _ratio([_replicas(samples, variant, place) for place in (cell | {"temperature": 0.0}, cell)])


def latency_table(found: Mapping[Cell, Latency]) -> str:
    """A Markdown table of the grid: the resident walk's time, and its speed-ups over SGLang's default and over the fastest stock arm."""
    if not found:
        return "Not measured yet."
    rows = [f"| V, steps, T | {' | '.join(f'bs {batch}' for batch in BATCHES)} |", "|---|" + "---|" * len(BATCHES)]
    for head, vocab, steps in WALKS:
        for temperature in TEMPERATURES:
            cells = [_entry(found.get(Cell(head, steps, batch, temperature))) for batch in BATCHES]
            rows.append(f"| {vocab:,}, {steps}, {temperature:g} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _latency(run: Run, samples: pd.DataFrame, cells: pd.DataFrame) -> Latency:
    arms = [str(variant) for variant in cells["variant"].unique()]
    times = {arm: time for arm in arms if (time := median_time(samples, arm))}
    stock = [arm for arm in STOCK if arm in times]
    speedups = {arm: ratio for arm in stock if (ratio := speedup(samples, RESIDENT, [arm]))}
    failed = cells[cells["status"] != "ok"]
    gaps = {str(arm): f"{rows['status'].iloc[0]}: {rows['reason'].iloc[0]}" for arm, rows in failed.groupby("variant", sort=False)}
    return Latency(run, times, speedups, speedup(samples, RESIDENT, stock) if stock else None, gaps)


def _replicas(samples: pd.DataFrame, variant: str, cell: Mapping[str, object]) -> pd.Series | None:
    """Median time in us of every replica; None where there are no valid samples."""
    columns = medians(samples, variant=variant, **cell)
    return columns.iloc[:, 0] if len(columns.columns) == 1 else None


def _paired(columns: Sequence[pd.Series | None]) -> NDArray[np.float64] | None:
    """[replicas, arms]. Arms are compared within a process: a replica in which one of them is missing says nothing."""
    present = [column for column in columns if column is not None]
    if not present or len(present) < len(columns):
        return None
    paired = pd.concat(present, axis=1, join="inner").dropna().to_numpy(dtype=np.float64)
    return paired if len(paired) else None


def _ratio(columns: Sequence[pd.Series | None]) -> Estimate | None:
    paired = _paired(columns)
    return None if paired is None else bootstrap(paired, median_ratio)


def _entry(latency: Latency | None) -> str:
    if latency is None:
        return "not measured"
    if RESIDENT not in latency.times:
        return latency.gaps.get(RESIDENT, "not timed").split(":")[0]
    shown = [latency.speedups.get(DEFAULT), latency.fastest if len(latency.speedups) > 1 else None]
    ratios = [f"{ratio.value:.1f}×" for ratio in shown if ratio]
    return f"{latency.times[RESIDENT].value:.1f} µs" + (f" ({', '.join(ratios)})" if ratios else "")
