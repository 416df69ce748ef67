"""Figure 13: every way to run the walk, a row of dots for each cell of the grid. Cold L2, log scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from analysis.latency import BATCHES, RESIDENT, TEMPERATURES, WALKS, Cell, Latency, commands, latencies
from analysis.load import MissingResults, all_runs
from analysis.rivals import EXPERIMENT
from figures.style import FAINT, LOOKS, MUTED, PAGE_IN, look, note

TICKS_US = (5, 20, 100, 500, 2000, 10000)


def draw(results: Path, device: str) -> Figure:
    """The figure from all rivals runs on `device`; each cell from the newest run that has it."""
    found = latencies(all_runs(results, EXPERIMENT, device))
    panels = [[_panel(found, head, steps, temperature) for head, _, steps in WALKS] for temperature in TEMPERATURES]
    shown = [latency for row in panels for cells in row for latency in cells.values()]
    if not any(latency.times for latency in shown):
        raise MissingResults(
            f"{results} holds no timed cell of experiment={EXPERIMENT} on device={device}",
            next(iter(commands(device, EXPERIMENT).values())),
        )
    figure = plt.figure(figsize=(PAGE_IN, 4.6))
    foot = note(figure, "\n".join([_foot(shown), *_missing(found, device)]))
    grid = figure.add_gridspec(2, len(WALKS), left=0.06, right=0.995, bottom=foot + 0.08, top=0.84, wspace=0.06, hspace=0.1)
    low, high = _limits(shown)
    for row, temperature in enumerate(TEMPERATURES):
        for column, (_, vocab, steps) in enumerate(WALKS):
            axes = figure.add_subplot(grid[row, column])
            _scale(axes, low, high, first=column == 0, last=row == len(TEMPERATURES) - 1)
            _draw_panel(axes, panels[row][column])
            if row == 0:
                axes.set_title(f"V = {vocab:,}, {steps} steps", pad=3)
            if column == 0:
                axes.set_ylabel("requests, greedy" if temperature == 0 else f"requests, T = {temperature:g}")
    _legend(figure, shown)
    figure.text(0.53, foot + 0.008, "µs a call", ha="center", fontsize=7)
    return figure


def _panel(found: Mapping[Cell, Latency], head: str, steps: int, temperature: float) -> dict[int, Latency]:
    """The measured cells of one walk, by batch."""
    return {batch: found[cell] for batch in BATCHES if (cell := Cell(head, steps, batch, temperature)) in found}


def _limits(found: Iterable[Latency]) -> tuple[float, float]:
    times = [time.value for latency in found for time in latency.times.values()]
    return min(times) / 1.3, max(times) * 1.3


def _scale(axes: Axes, low: float, high: float, first: bool, last: bool) -> None:
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(len(BATCHES) - 0.5, -0.5)
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in TICKS_US if low <= tick <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks(range(len(BATCHES)), [str(batch) for batch in BATCHES])
    axes.tick_params(labelleft=first, labelbottom=last)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=5.8)
    axes.grid(axis="x", color=FAINT, linewidth=0.4)
    axes.set_axisbelow(True)
    for place in range(len(BATCHES)):
        if place % 2 == 0:
            axes.axhspan(place - 0.5, place + 0.5, color=FAINT, alpha=0.3, linewidth=0, zorder=0)


def _draw_panel(axes: Axes, cells: Mapping[int, Latency]) -> None:
    """Arms in the order of the legend, each a little lower, so that equal times do not hide one another."""
    if not any(latency.times for latency in cells.values()):
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=MUTED, fontsize=6.5)
        return
    for place, batch in enumerate(BATCHES):
        if batch not in cells:
            axes.text(0.5, place, "not measured", transform=axes.get_yaxis_transform(), ha="center", va="center", color=MUTED, fontsize=5.4)
    arms = _arms(cells.values())
    for number, arm in enumerate(arms):
        style, shift = look(arm), 0.62 * ((number + 0.5) / len(arms) - 0.5)
        timed = [(BATCHES.index(batch) + shift, cells[batch].times[arm]) for batch in cells if arm in cells[batch].times]
        values = [time.value for _, time in timed]
        ends = [[max(0.0, time.value - time.low) for _, time in timed], [max(0.0, time.high - time.value) for _, time in timed]]
        axes.errorbar(
            values, [place for place, _ in timed], xerr=ends, fmt=style.marker, color=style.color, markersize=3.0 if arm == RESIDENT else 2.6,
            markeredgewidth=0, elinewidth=0.6, zorder=4 if arm == RESIDENT else 3, label=f"points {arm}",
        )  # fmt: skip


def _arms(found: Iterable[Latency]) -> list[str]:
    timed = {arm for latency in found for arm in latency.times}
    return [arm for arm in LOOKS if arm in timed]


def _legend(figure: Figure, found: Iterable[Latency]) -> None:
    handles = [
        Line2D(
            [], [], color=look(arm).color, marker=look(arm).marker, markersize=3.4, markeredgewidth=0, linewidth=0, label=look(arm).label
        )
        for arm in _arms(found)
    ]
    figure.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.53, 1.01), ncols=4, frameon=False, columnspacing=1.6, handletextpad=0.2
    )


def _foot(found: Iterable[Latency]) -> str:
    runs = {latency.run.run_id: latency.run for latency in found}
    hardware = ", ".join(sorted({run.hardware for run in runs.values()}))
    return (
        "Points: medians over processes of complete calls with cold L2, all arms of a cell interleaved; bars: 95 % intervals, mostly smaller than the "
        "marker. An arm without a point does not serve that cell, or was found wrong there (table `cells` of the record says why). "
        f"{hardware}: {', '.join(sorted(runs))}"
    )


def _missing(found: Mapping[Cell, Latency], device: str) -> list[str]:
    """A line for every command that measures cells of the grid which no run has."""
    lines = commands(device, EXPERIMENT)
    absent = {
        lines[head, steps]: None
        for head, _, steps in WALKS
        for batch in BATCHES
        for temperature in TEMPERATURES
        if Cell(head, steps, batch, temperature) not in found
    }
    return [f"Not measured yet: {line}" for line in absent]
