"""Figure 12: where the resident walk keeps W2, and what a step and the entry cost there. Fitted on complete calls with cold L2."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.bootstrap import Estimate
from analysis.load import MissingResults, Run, measure_command, newest_run
from analysis.placement import EXPERIMENT, Split, splits
from analysis.slope import Fit, flagged
from figures.style import COLUMN_IN, MUTED, look, note

RESIDENT = look("resident").color
PLACES = {"registers": RESIDENT, "shared memory": "#56B4E9", "L2, every step": "#c9c9c9"}
SPILLED = "#f4e3c1"
TIGHT_PT = 5.0
MAX_REASON = 110  # characters


def draw(results: Path, device: str) -> Figure:
    """The figure from the newest placement run on `device`."""
    run = newest_run(results, EXPERIMENT, device)
    planned = [split for split in splits(run) if split.tiles]
    if not any(split.measured for split in planned):
        raise MissingResults(f"run {run.run_id} timed no split at two lengths", measure_command(EXPERIMENT, device))
    figure = plt.figure(figsize=(COLUMN_IN, 3.75))
    foot = note(figure, _foot(run, planned))
    bottom, top, left, right = foot + 0.1, 0.94, 0.115, 0.985
    grid = figure.add_gridspec(3, 1, height_ratios=(0.9, 1.55, 1), left=left, right=right, bottom=bottom, top=top, hspace=0.17)
    tiles, step, entry = (figure.add_subplot(grid[row]) for row in range(3))
    for axes in (tiles, step, entry):
        _scale(axes, planned, last=axes is entry)
    _draw_tiles(tiles, planned)
    _draw_costs(step, planned, lambda fit: fit.slope_us, lambda split: split.expected_step_us, digits=2)
    _draw_costs(entry, planned, lambda fit: fit.entry_us, lambda split: split.expected_entry_us, digits=1)
    step.set_ylabel("step, µs")
    entry.set_ylabel("entry, µs")
    entry.set_xlabel(f"tiles of 16 rows a CTA keeps in registers, of {max(split.tiles for split in planned)}")
    _legend(step)
    return figure


def spill_edge(planned: Sequence[Split]) -> float | None:
    """Where the shading begins: halfway to the first split that spills. None where nothing spills."""
    spilling = [split.register_tiles for split in planned if split.spills]
    if not spilling:
        return None
    before = [split.register_tiles for split in planned if split.register_tiles < min(spilling)]
    return (max(before) + min(spilling)) / 2 if before else min(spilling) - _pitch(planned) / 2


def _pitch(planned: Sequence[Split]) -> float:
    """The least distance between two splits on the axis."""
    places = sorted({split.register_tiles for split in planned})
    return min((right - left for left, right in pairwise(places)), default=1)


def _scale(axes: Axes, planned: Sequence[Split], last: bool) -> None:
    places, half = [split.register_tiles for split in planned], _pitch(planned) / 2
    axes.set_xlim(min(places) - half - 0.5, max(places) + half + 0.5)
    axes.set_xticks(places)
    axes.tick_params(axis="x", labelbottom=last, pad=1.5)
    edge = spill_edge(planned)
    if edge is not None:
        axes.axvspan(edge, axes.get_xlim()[1], color=SPILLED, linewidth=0, zorder=0, gid="spills")


def _draw_tiles(axes: Axes, planned: Sequence[Split]) -> None:
    """How each split divides the tiles; above it, what the compiler says of a thread."""
    places = [split.register_tiles for split in planned]
    width, below = 0.62 * _pitch(planned), np.zeros(len(planned))
    shares = [
        [split.register_tiles for split in planned],
        [split.shared_tiles for split in planned],
        [split.streamed_tiles for split in planned],
    ]
    for (place, color), heights in zip(PLACES.items(), shares, strict=True):
        axes.bar(places, heights, width, below, color=color, linewidth=0, label=place)
        below += heights
    most = max(split.tiles for split in planned)
    axes.set_ylim(0, most)
    axes.set_yticks([0, most // 2, most])
    axes.set_ylabel("tiles")
    axes.set_xticks([])
    for split in planned:
        said = f"{split.registers or 'no kernel'}" + (f"\n+{split.spill_bytes}" if split.spills else "")
        axes.annotate(said, (split.register_tiles, most), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=TIGHT_PT)
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(0.0, 0.0), bbox_transform=axes.transAxes, ncols=3, frameon=False,
        fontsize=TIGHT_PT + 0.6, handlelength=0.9, handleheight=0.7, columnspacing=1.0, borderpad=0.1, borderaxespad=0.25, handletextpad=0.4,
    )  # fmt: skip


def _draw_costs(
    axes: Axes, planned: Sequence[Split], cost: Callable[[Fit], Estimate], expected: Callable[[Split], float | None], digits: int
) -> None:
    priced = [(split.register_tiles, value, split.spills) for split in planned if (value := expected(split)) is not None]
    held = [(x, value) for x, value, spills in priced if not spills]
    beyond = held[-1:] + [(x, value) for x, value, spills in priced if spills]  # the model knows no spills
    for points, line, gid in ((held, "-", "expected"), (beyond, ":", "expected, spills unknown")):
        axes.plot([x for x, _ in points], [value for _, value in points], line, color=MUTED, linewidth=0.9, zorder=2, gid=gid)
    timed = [(split.register_tiles, cost(split.measured)) for split in planned if split.measured]
    values = np.array([estimate.value for _, estimate in timed])
    ends = np.nan_to_num([[of.value - of.low, of.high - of.value] for _, of in timed]).T.clip(min=0)
    axes.errorbar(
        [x for x, _ in timed], values, yerr=ends, fmt="o", color=RESIDENT, markersize=3.2, markeredgewidth=0, elinewidth=0.7, capsize=1.4,
        capthick=0.6, zorder=3, label="measured",
    )  # fmt: skip
    tops = {x: max([estimate.value, *(value for at, value, _ in priced if at == x)]) for x, estimate in timed}
    for x, estimate in timed:
        axes.annotate(
            f"{estimate.value:.{digits}f}",
            (x, tops[x]),
            (0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=TIGHT_PT,
            color=RESIDENT,
        )
    highest = max([*values, *(value for _, value, _ in priced)])
    axes.set_ylim(0, 1.2 * highest)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5]))
    for split in planned:
        if not split.measured:
            axes.annotate("not\ntimed", (split.register_tiles, 0.17 * highest), ha="center", va="bottom", fontsize=TIGHT_PT, color=MUTED)


def _legend(axes: Axes) -> None:
    """Beside the lines, in the part of the panel where no value can be: under the points."""
    if any(line.get_gid() == "expected" and np.size(line.get_xydata()) for line in axes.lines):
        axes.plot([], [], "-", color=MUTED, linewidth=0.9, label="expected by the planner")
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: labels[i] != "measured")
    axes.legend(
        [handles[i] for i in order], [labels[i] for i in order], loc="lower left", frameon=False, fontsize=TIGHT_PT + 0.6, handlelength=1.4,
        borderaxespad=0.2, labelspacing=0.25,
    )  # fmt: skip
    for shade in (patch for patch in axes.patches if patch.get_gid() == "spills"):
        middle = shade.get_window_extent().transformed(axes.transAxes.inverted())
        axes.annotate(
            "registers spill",
            ((middle.x0 + middle.x1) / 2, 0.03),
            xycoords="axes fraction",
            ha="center",
            va="bottom",
            fontsize=TIGHT_PT + 0.6,
        )


def _foot(run: Run, planned: Sequence[Split]) -> str:
    fits = [split.measured for split in planned if split.measured]
    steps, replicas = fits[0].steps, max(fit.replicas for fit in fits)
    lines = [
        f"Above the bars: registers a thread, and bytes that spill. Points: lines fitted through complete calls of {_listed(steps)} steps, cold L2, "
        f"with 95 % intervals over {replicas} processes, which may be smaller than the marker; {flagged(run.table('samples'), l2='cold', scope='call')} "
        f"samples with off clocks left out. Dotted: the planner expects no spills. Batch "
        f"{run.table('plans')['batch'].iloc[0]}, greedy. {run.hardware}, run {run.run_id}.",
        *(textwrap.shorten(f"{_named(split)}: {gap}", MAX_REASON, placeholder=" ...") for split in splits(run) for gap in split.gaps),
    ]
    return "\n".join(lines)


def _named(split: Split) -> str:
    return f"{split.register_tiles} tiles in registers" if split.tiles else split.variant


def _listed(steps: Sequence[int]) -> str:
    *first, last = map(str, steps)
    return f"{', '.join(first)} and {last}"
