"""Figure 10: one complete call by batch, for every vocabulary and walk length, greedy above and sampled below. Cold L2, log scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, sqrt
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, NullLocator

from analysis.latency import BATCHES, EXPERIMENT, RESIDENT, TEMPERATURES, WALKS, Cell, Latency, commands, latencies
from analysis.load import MissingResults, Run, all_runs
from figures.style import FAINT, LOOKS, MUTED, PAGE_IN, look, note

Found = Mapping[Cell, Latency]
LABEL_PT = 4.6
EDGE = 1.6  # from the outermost batches to the ends of the axis, as a factor
MAX_REASONS = 8  # lines at the foot
TICKS_US = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


def draw(results: Path, device: str) -> Figure:
    """The figure from all walk_latency runs on `device`; each cell from the newest run that has it."""
    found = latencies(all_runs(results, EXPERIMENT, device))
    shown = {cell: latency for cell, latency in found.items() if any(cell in panel for panel in _panels())}
    if not any(latency.times for latency in shown.values()):
        raise MissingResults(
            f"{results} holds no timed cell of experiment={EXPERIMENT} on device={device}", next(iter(commands(device).values()))
        )
    figure = plt.figure(figsize=(PAGE_IN, 4.15))
    foot = note(figure, "\n".join(_foot(shown, device)))
    grid = figure.add_gridspec(2, len(WALKS), left=0.068, right=0.995, bottom=foot + 0.085, top=0.895, wspace=0.07, hspace=0.13)
    low, high = _limits(shown.values())
    for row, temperature in enumerate(TEMPERATURES):
        for column, (head, vocab, steps) in enumerate(WALKS):
            axes = figure.add_subplot(grid[row, column])
            _scale(axes, low, high, first=column == 0, last=row == len(TEMPERATURES) - 1)
            cells = {batch: shown[cell] for batch in BATCHES if (cell := Cell(head, steps, batch, temperature)) in shown}
            _draw_panel(axes, cells)
            if row == 0:
                axes.set_title(f"V = {vocab:,}, {steps} steps", pad=3)
            if column == 0:
                axes.set_ylabel("T = 0, greedy: µs a call" if temperature == 0 else f"T = {temperature:g}: µs a call")
    _legend(figure, shown.values())
    figure.text(0.53, foot + 0.012, "requests in the batch", ha="center", fontsize=7)
    return figure


def breaks(batches: Iterable[int]) -> list[int]:
    """The batches of the grid that are not in `batches`, where lines break."""
    timed = set(batches)
    return [batch for batch in BATCHES if batch not in timed]


def _panels() -> list[list[Cell]]:
    return [[Cell(head, steps, batch, temperature) for batch in BATCHES] for temperature in TEMPERATURES for head, _, steps in WALKS]


def _limits(found: Iterable[Latency]) -> tuple[float, float]:
    times = [time.value for latency in found for time in latency.times.values()]
    return min(times) / 2, max(times) * 1.25  # room for the labels below the lowest line


def _scale(axes: Axes, low: float, high: float, first: bool, last: bool) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(BATCHES[0] / EDGE, BATCHES[-1] * EDGE)
    axes.set_ylim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(BATCHES))
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in TICKS_US if low <= tick <= high]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.tick_params(labelleft=first, labelbottom=last)
    axes.grid(axis="y", color=FAINT, linewidth=0.4)
    axes.set_axisbelow(True)


def _draw_panel(axes: Axes, cells: Mapping[int, Latency]) -> None:
    if not any(latency.times for latency in cells.values()):
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=MUTED, fontsize=6.5)
        return
    for variant in (arm for arm in LOOKS if any(arm in latency.times for latency in cells.values())):
        _draw_arm(axes, variant, cells)
    timed = [batch for batch, latency in cells.items() if RESIDENT in latency.times]
    for batch in breaks(timed):
        axes.axvspan(batch / sqrt(2), batch * sqrt(2), color=FAINT, alpha=0.55, linewidth=0, zorder=0, gid=f"gap {batch}")
    for batch in timed:
        if ratio := cells[batch].fastest:
            label = f"{ratio.value:.1f}×"
            axes.annotate(
                label, (batch, cells[batch].times[RESIDENT].value), (0, -4.5), textcoords="offset points", ha="center", va="top",
                fontsize=LABEL_PT, color=look(RESIDENT).color, gid=f"speedup {batch}", path_effects=[withStroke(linewidth=1.2, foreground="white")],
            )  # fmt: skip


def _draw_arm(axes: Axes, variant: str, cells: Mapping[int, Latency]) -> None:
    style = look(variant)
    times = [cells[batch].times.get(variant) if batch in cells else None for batch in BATCHES]
    values = np.array([time.value if time else np.nan for time in times])
    ends = np.array([[time.value - time.low, time.high - time.value] if time else [np.nan, np.nan] for time in times]).T
    axes.errorbar(
        BATCHES, values, yerr=np.nan_to_num(ends).clip(min=0), fmt=f"{style.marker}-", color=style.color, markersize=2.7, markeredgewidth=0,
        linewidth=0.9, elinewidth=0.6, capsize=1.0, capthick=0.5, zorder=4 if variant == RESIDENT else 3, label=f"points {variant}",
    )  # fmt: skip


def _legend(figure: Figure, found: Iterable[Latency]) -> None:
    timed = {variant for latency in found for variant in latency.times}
    handles = [
        Line2D([], [], color=item.color, marker=item.marker, markersize=3.2, markeredgewidth=0, linewidth=0.9, label=item.label)
        for variant, item in LOOKS.items()
        if variant in timed
    ]
    figure.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.53, 1.005), ncols=len(handles), frameon=False, columnspacing=2.0)


def _foot(found: Found, device: str) -> list[str]:
    runs: dict[str, Run] = {latency.run.run_id: latency.run for latency in found.values()}
    hardware, names = ", ".join(sorted({run.hardware for run in runs.values()})), sorted(runs)
    text = (
        "Labels: speed-up of the resident walk over the fastest stock arm of the same cell. Points: medians over processes of complete calls with "
        "cold L2, with 95 % intervals, which may be smaller than the marker. Grey: no time of the resident walk there. "
        f"{hardware}, {len(runs)} {'runs' if len(runs) > 1 else 'run'}:"
    )
    return [text, *(", ".join(names[at : at + 4]) for at in range(0, len(names), 4)), *_reasons(found), *_missing(found, device)]


def _reasons(found: Found) -> list[str]:
    """One line for every arm and reason why it has no time, or lost replicas, with the cells that this holds for."""
    cells: dict[tuple[str, str], list[Cell]] = {}
    for cell, latency in found.items():
        for variant, reason in latency.gaps.items():
            cells.setdefault((variant, reason), []).append(cell)
    lines = [f"{look(variant).label}, {_where(at, found)}: {reason[:150]}" for (variant, reason), at in cells.items()]
    return (
        lines
        if len(lines) <= MAX_REASONS
        else [*lines[:MAX_REASONS], f"{len(lines) - MAX_REASONS} more reasons stand in the tables `cells`."]
    )


def _missing(found: Found, device: str) -> list[str]:
    """One line for every command that measures cells of the grid which no run has."""
    cells: dict[str, list[Cell]] = {}
    for cell in (cell for panel in _panels() for cell in panel if cell not in found):
        cells.setdefault(commands(device)[cell.head, cell.steps], []).append(cell)
    return [f"Not measured, {_where(at, found)}: {command}" for command, at in cells.items()]


def _where(cells: list[Cell], found: Found) -> str:
    """Cells in few words: all measured ones at a temperature, or the walks and batches."""
    for temperature in TEMPERATURES:
        if set(cells) == {cell for cell in found if cell.temperature == temperature}:
            return f"T = {temperature:g}"
    vocab = {head: size for head, size, _ in WALKS}
    walks: dict[str, list[int]] = {}
    for cell in sorted(cells, key=lambda cell: (vocab.get(cell.head, inf), cell.steps, cell.temperature, cell.batch)):
        walks.setdefault(f"V = {vocab[cell.head]:,}, {cell.steps} steps, T = {cell.temperature:g}", []).append(cell.batch)
    if len(walks) == len(TEMPERATURES) and len(cells) == len(TEMPERATURES) * len(BATCHES) and len({cell.steps for cell in cells}) == 1:
        return next(iter(walks)).rpartition(", T")[0]
    return "; ".join(walk if len(at) == len(BATCHES) else f"{walk}, batch {', '.join(map(str, at))}" for walk, at in walks.items())
