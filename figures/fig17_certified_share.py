"""Figure 17: what share of the steps few rows do not prove, by how many candidates and listed rows they are, and which the bias list alone proves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from analysis.certified import EXPERIMENT, TRAINED, Share, ShareCell, shares
from analysis.latency import TEMPERATURES
from analysis.load import MissingResults, all_runs, measure_command
from figures.style import FAINT, MUTED, PAGE_IN, note

VOCAB = 151_936
# By the length of the list, the shortest first.
LOOKS = (("#56B4E9", "^"), ("#0072B2", "s"), ("#7F9400", "*"), ("#222222", "o"), ("#CC79A7", "v"), ("#D55E00", "D"))
FOOT = 1.8  # from the axis' foot, where shares of 0 stand, to the least share that is drawn, as a factor
APART = 1.03  # between neighbouring lines' intervals, as a factor
Found = Mapping[ShareCell, Share]


def draw(results: Path, device: str) -> Figure:
    """The figure from all certified runs on `device`; each cell from the newest run that has it."""
    every = shares(all_runs(results, EXPERIMENT, device))
    found = {
        cell: each for cell, each in every.items() if (cell.vocab, cell.family) == (VOCAB, TRAINED) and cell.temperature in TEMPERATURES
    }
    if not found:
        raise MissingResults(
            f"{results} holds no certificates of trained rounds, V = {VOCAB:,}, on device={device}", measure_command(EXPERIMENT, device)
        )
    figure = plt.figure(figsize=(PAGE_IN, 4.0))
    foot = note(figure, _foot(found, device))
    grid = figure.add_gridspec(
        2, len(TEMPERATURES), left=0.075, right=0.99, bottom=foot + 0.09, top=0.86, wspace=0.06, hspace=0.13, height_ratios=(1.7, 1)
    )
    for column, temperature in enumerate(TEMPERATURES):
        cells = {cell: each for cell, each in found.items() if cell.temperature == temperature}
        upper, lower = (figure.add_subplot(grid[row, column]) for row in (0, 1))
        _draw_unproved(upper, cells, found)
        _draw_lifted(lower, cells, found)
        upper.set_title("T = 0, greedy" if temperature == 0 else f"T = {temperature:g}", pad=3)
        upper.tick_params(labelbottom=False, labelleft=column == 0)
        lower.tick_params(labelleft=column == 0)
        if column == 0:
            upper.set_ylabel("not proved, % of steps", labelpad=2)
            lower.set_ylabel("lifted, % of steps", labelpad=2)
            figure.align_ylabels([upper, lower])
    _legend(figure, found)
    figure.text(0.53, foot + 0.012, "M, candidates of a step", ha="center", fontsize=7)
    return figure


def looks(found: Found) -> dict[int, tuple[str, str]]:
    """Colour and marker by length of the list, J."""
    return dict(zip(_sorted(cell.listed for cell in found), LOOKS, strict=False))


def _sorted(values: Iterable[int]) -> list[int]:
    return sorted(set(values))


def _longest(found: Found) -> int:
    return max(cell.first for cell in found)


def _lines(cells: Found) -> dict[tuple[int, int], dict[int, Share]]:
    """By first steps and list: shares by candidates. The longest part of the round comes last, and lies on top."""
    lines: dict[tuple[int, int], dict[int, Share]] = {}
    for cell, each in sorted(cells.items()):
        lines.setdefault((cell.first, cell.listed), {})[cell.candidates] = each
    return dict(sorted(lines.items()))


def _draw_unproved(axes: Axes, cells: Found, found: Found) -> None:
    positive = [100 * end for each in found.values() for end in (each.unproved.low, each.unproved.value, each.unproved.high) if end > 0]
    foot = min(positive) / FOOT
    axes.set_yscale("log")
    axes.set_ylim(foot, max(positive) * 1.3)
    decades = [10.0**power for power in range(-6, 3) if 1.3 * foot < 10.0**power <= max(positive) * 1.3]
    none_word = "none" if any(each.unproved.value == 0 for each in found.values()) else ""
    axes.yaxis.set_major_locator(FixedLocator([foot, *decades]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: none_word if value == foot else f"{value:g}")
    _scale(axes, cells, found)
    places = list(looks(found))
    for (first, listed), line in _lines(cells).items():
        color, marker = looks(found)[listed]
        whole, shift = first == _longest(found), APART ** (places.index(listed) - (len(places) - 1) / 2)
        drawn = [100 * each.unproved.value or np.nan for each in line.values()]  # a line breaks at a share of 0, which has no place on it
        gid = f"{first} {listed}"
        axes.plot(
            [shift * m for m in line], drawn, marker=marker if whole else "", linestyle="-" if whole else ":",
            color=color, linewidth=0.9, markersize=4.4 if marker == "*" else 3.0, markeredgewidth=0, zorder=4, gid=f"unproved {gid}",
        )  # fmt: skip
        if not whole:
            continue
        for m, each in line.items():
            low = max(foot, 100 * each.unproved.low)
            axes.plot(
                (shift * m, shift * m), (low, 100 * each.unproved.high), color=color, linewidth=0.6, zorder=3, gid=f"interval {gid} {m}"
            )
        none = [m for m, each in line.items() if each.unproved.value == 0]
        axes.plot(
            [shift * m for m in none], [foot] * len(none), marker, linestyle="", color=color, markersize=5.0 if marker == "*" else 3.6,
            markerfacecolor="white", markeredgewidth=0.7, clip_on=False, zorder=5, gid=f"none {gid}",
        )  # fmt: skip


def _draw_lifted(axes: Axes, cells: Found, found: Found) -> None:
    axes.set_ylim(0, max(100 * each.lifted.value for each in found.values()) * 1.2 or 1)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _scale(axes, cells, found)
    for (first, listed), line in _lines(cells).items():
        color, marker = looks(found)[listed]
        whole = first == _longest(found)
        axes.plot(
            list(line), [100 * each.lifted.value for each in line.values()], marker=marker if whole else "", linestyle="-" if whole else ":", color=color,
            linewidth=0.9, markersize=4.4 if marker == "*" else 3.0, markeredgewidth=0, clip_on=False, zorder=4, gid=f"lifted {first} {listed}",
        )  # fmt: skip


def _scale(axes: Axes, cells: Found, found: Found) -> None:
    counts = _sorted(cell.candidates for cell in found)
    axes.set_xscale("log", base=2)
    axes.set_xlim(counts[0] / 1.35, counts[-1] * 1.35)
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(axis="y", color=FAINT, linewidth=0.4)
    axes.set_axisbelow(True)
    if not cells:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=MUTED, fontsize=6.5)


def _legend(figure: Figure, found: Found) -> None:
    handles = [
        Line2D([], [], color=color, marker=marker, markersize=3.4, markeredgewidth=0, linewidth=0.9, label=f"J = {listed} listed rows")
        for listed, (color, marker) in looks(found).items()
    ]
    handles += [
        Line2D([], [], color=MUTED, linewidth=0.9, linestyle="-" if first == _longest(found) else ":", label=f"the first {first} steps")
        for first in _sorted(cell.first for cell in found)
    ]
    handles += [
        Line2D(
            [], [], color=MUTED, marker="o", markerfacecolor="white", markersize=3.6, markeredgewidth=0.7, linewidth=0, label="none found"
        ),
    ]
    figure.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.53, 1.005), ncols=-(-len(handles) // 2), frameon=False, columnspacing=1.6
    )


def _foot(found: Found, device: str) -> str:
    runs = {each.run.run_id: each.run for each in found.values()}
    steps = max(each.steps for cell, each in found.items() if cell.first == _longest(found))
    sets = sorted({each.sets for each in found.values()})
    missing = [f"T = {temperature:g}" for temperature in TEMPERATURES if not any(cell.temperature == temperature for cell in found)]
    text = (
        f"Steps of {' to '.join(map(str, dict.fromkeys((sets[0], sets[-1]))))} rounds that a trained pair drafted, V = {VOCAB:,}. Bars: 95 % intervals over rounds, of the first {_longest(found)} steps. Hollow, at the foot of the "
        f"axis: none of {steps:,} steps, and the bar ends at 3 in so many (95 %, if steps were independent); lines break there. Lifted: proved by a row that only the previous token's "
        f"list names. {', '.join(sorted({run.hardware for run in runs.values()}))}: {', '.join(sorted(runs))}"
    )
    return text + (f"\nNot measured yet, {' and '.join(missing)}: {measure_command(EXPERIMENT, device)}" if missing else "")
