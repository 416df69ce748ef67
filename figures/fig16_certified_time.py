"""Figure 16: the time of one call against the length of the draft, for every way to walk: the median of many rounds, and where 80 % of them lie."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator

from analysis.certified import CERTIFIED, EXPERIMENT, FLAT, TRAINED, Cell, Measured, floor, launch_us, measured
from analysis.latency import TEMPERATURES
from analysis.load import MissingResults, Run, all_runs, measure_command
from figures.style import FAINT, LOOKS, MUTED, PAGE_IN, look, note

VOCAB, BATCH, L2 = 151_936, 1, "cold"
FAMILIES = {TRAINED: "rounds that a trained pair drafted", FLAT: "flat logits, the adverse case"}
TICKS_US = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
Found = Mapping[Cell, Measured]


def draw(results: Path, device: str) -> Figure:
    """The figure from all certified runs on `device`; each cell from the newest run that has it."""
    found = {cell: each for cell, each in measured(all_runs(results, EXPERIMENT, device)).items() if _shown(cell) and each.arms}
    if not found:
        raise MissingResults(
            f"{results} holds no timed rounds of V = {VOCAB:,} with {L2} L2 on device={device}", measure_command(EXPERIMENT, device)
        )
    figure = plt.figure(figsize=(PAGE_IN, 4.2))
    foot = note(figure, _foot(found, device))
    grid = figure.add_gridspec(
        len(TEMPERATURES), len(FAMILIES), left=0.068, right=0.99, bottom=foot + 0.085, top=0.845, wspace=0.06, hspace=0.13
    )
    lengths = sorted({cell.steps for cell in found})
    for row, temperature in enumerate(TEMPERATURES):
        for column, (family, title) in enumerate(FAMILIES.items()):
            axes = figure.add_subplot(grid[row, column])
            cells = {cell.steps: each for cell, each in found.items() if (cell.family, cell.temperature) == (family, temperature)}
            _scale(axes, lengths, *_limits(found), first=column == 0, last=row == len(TEMPERATURES) - 1)
            _draw_panel(axes, cells)
            if row == 0:
                axes.set_title(title, pad=3)
            if column == 0:
                axes.set_ylabel(f"T = {temperature:g}: µs a call", labelpad=2)
    _legend(figure, found)
    figure.text(0.53, foot + 0.012, "γ, steps of the draft", ha="center", fontsize=7)
    return figure


def _shown(cell: Cell) -> bool:
    place = (cell.vocab, cell.batch, cell.l2) == (VOCAB, BATCH, L2)
    return place and cell.family in FAMILIES and cell.temperature in TEMPERATURES


def _limits(found: Found) -> tuple[float, float]:
    ends = [us for each in found.values() for arm in each.arms.values() for us in (arm.quantiles_us[0], arm.quantiles_us[-1])]
    floors = [each.floor_us for each in found.values()]
    return min(*ends, *floors) / 1.5, max(ends) * 1.25


def _scale(axes: Axes, lengths: list[int], low: float, high: float, first: bool, last: bool) -> None:
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.set_xlim(0, lengths[-1] + 1)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in TICKS_US if low <= tick <= high]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.tick_params(labelleft=first, labelbottom=last)
    axes.grid(axis="y", color=FAINT, linewidth=0.4)
    axes.set_axisbelow(True)


def _draw_panel(axes: Axes, cells: Mapping[int, Measured]) -> None:
    if not cells:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=MUTED, fontsize=6.5)
        return
    run = next(iter(cells.values())).run
    ends = [round(end) for end in axes.get_xlim()]
    axes.plot(ends, [floor(run, VOCAB, steps, BATCH) for steps in ends], "--", color=MUTED, linewidth=0.8, zorder=2, gid="floor")
    for arm in (name for name in LOOKS if any(name in each.arms for each in cells.values())):
        _draw_arm(axes, arm, {steps: each for steps, each in sorted(cells.items()) if arm in each.arms})


def _draw_arm(axes: Axes, arm: str, cells: Mapping[int, Measured]) -> None:
    style, steps = look(arm), list(cells)
    rounds = [each.arms[arm] for each in cells.values()]
    low, high = [each.quantiles_us[0] for each in rounds], [each.quantiles_us[-1] for each in rounds]
    above = 1 if arm == CERTIFIED else 0
    axes.fill_between(steps, low, high, color=style.color, alpha=0.25, linewidth=0, zorder=3, gid=f"band {arm}")
    axes.vlines(steps, low, high, color=style.color, linewidth=0.9, zorder=3 + above, gid=f"bars {arm}")
    axes.plot(
        steps, [each.median_us.value for each in rounds], marker=style.marker, color=style.color, markersize=4.6 if arm == CERTIFIED else 2.9,
        markeredgewidth=0, linewidth=0.9, zorder=4 + above, gid=f"median {arm}",
    )  # fmt: skip


def _legend(figure: Figure, found: Found) -> None:
    timed = {arm for each in found.values() for arm in each.arms}
    handles = [
        Line2D([], [], color=item.color, marker=item.marker, markersize=3.4, markeredgewidth=0, linewidth=0.9, label=item.label)
        for arm, item in LOOKS.items()
        if arm in timed
    ]
    handles += [
        Patch(facecolor=MUTED, alpha=0.25, label="10 to 90 % of the rounds"),
        Line2D([], [], color=MUTED, linestyle="--", linewidth=0.8, label="floor"),
    ]
    figure.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.53, 1.005), ncols=3, frameon=False, columnspacing=1.6)


def _foot(found: Found, device: str) -> str:
    runs = {each.run.run_id: each.run for each in found.values()}
    newest = runs[max(runs)]
    missing = {family for family in FAMILIES if not any(cell.family == family for cell in found)}
    sets = sorted({arm.sets for each in found.values() for arm in each.arms.values()})
    text = (
        f"V = {VOCAB:,}, one request, complete calls with cold L2, one for each of {' to '.join(map(str, dict.fromkeys((sets[0], sets[-1]))))} rounds' inputs: median, and from the 10th "
        f"to the 90th percentile of the rounds. Floor: a launch ({launch_us(newest):g} µs) and the base logits, 2 bytes each, at the peak rate of HBM, {_rate(newest):,.0f} GB/s. "
        f"{', '.join(sorted({run.hardware for run in runs.values()}))}: {', '.join(sorted(runs))}"
    )
    return text + (f"\nNot measured yet, {' and '.join(sorted(missing))} inputs: {measure_command(EXPERIMENT, device)}" if missing else "")


def _rate(run: Run) -> float:
    return run.manifest["config"]["device"]["hbm_gb_s"]
