"""Figure 15: how far the acceptance length of our walk is from the default's, and what is accepted at every position of a draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis.acceptance import EXPERIMENT, MARGIN, POOLED, Cell, Comparison, comparisons, positions
from analysis.bootstrap import Estimate
from analysis.claim import load_claims
from analysis.equivalence import Equivalence
from analysis.latency import DEFAULT, RESIDENT, TEMPERATURES
from analysis.load import MissingResults, all_runs, measure_command
from figures.style import FAINT, INK, LOOKS, MUTED, PAGE_IN, look, note

MAIN = (1, POOLED)  # concurrencies drawn in full colour; the others are lighter
LIGHT = 0.45
TIGHT_PT = 5.6
PAPER = "paper, H100, Qwen3-4B"

Found = Mapping[Cell, Comparison]


@dataclass(frozen=True)
class Row:
    """A line of the left panel: what its label says, and ours or the paper's; neither where nothing was measured."""

    label: str
    cell: Cell | None = None
    ours: Comparison | None = None
    paper: Estimate | None = None


def draw(results: Path, device: str) -> Figure:
    """The figure from all acceptance runs on `device`; each cell from the newest run that has it."""
    arms = comparisons(all_runs(results, EXPERIMENT, device))
    found = {cell: of_arm[RESIDENT] for cell, of_arm in arms.items() if RESIDENT in of_arm}
    if not found:
        raise MissingResults(
            f"{results} holds no acceptance of {RESIDENT} beside {DEFAULT} on device={device}", measure_command(EXPERIMENT, device)
        )
    blocks = _blocks(found)
    lines = sum(len(rows) for _, rows in blocks) + len(blocks)
    figure = plt.figure(figsize=(PAGE_IN, max(2.6, 1.15 + 0.105 * lines)))
    missing = any(not row.ours and not row.paper for _, rows in blocks for row in rows)
    foot = note(figure, _foot(found) + (f"\nNot measured yet: {measure_command(EXPERIMENT, device)}" if missing else ""))
    bottom, top = foot + 0.3 / figure.get_figheight(), 1 - 0.42 / figure.get_figheight()
    left = figure.add_gridspec(1, 1, left=0.13, right=0.51, bottom=bottom, top=top)
    _draw_changes(figure.add_subplot(left[0]), blocks)
    steps = sorted({cell.steps for cell in found})
    right = figure.add_gridspec(len(steps), 1, left=0.71, right=0.99, bottom=bottom, top=top, hspace=0.3)
    for place, length in enumerate(steps):
        _draw_positions(figure.add_subplot(right[place]), found, length, last=place == len(steps) - 1)
    _legend(figure)
    return figure


def _blocks(found: Found) -> list[tuple[str, list[Row]]]:
    """A block for every length and temperature of the paper or of the records: ours by concurrency, all together, then the paper's."""
    published = _published()
    places = sorted({*published, *((cell.steps, cell.temperature) for cell in found)})
    several = len({cell.pair for cell in found}) > 1
    blocks = []
    for steps, temperature in places:
        cells = [cell for cell in found if (cell.steps, cell.temperature) == (steps, temperature)]
        cells.sort(key=lambda cell: (cell.pair, cell.batch == POOLED, cell.batch))  # all together after its parts
        rows = [Row(_label(cell, several), cell, found[cell]) for cell in cells if cell.batch != POOLED or len(found[cell].batches) > 1]
        paper = published.get((steps, temperature))
        blocks.append((f"γ = {steps}, T = {temperature:g}", [*(rows or [Row("ours")]), *([Row("paper", paper=paper)] if paper else [])]))
    return blocks


def _label(cell: Cell, several: bool) -> str:
    place = "all" if cell.batch == POOLED else f"c = {cell.batch}"
    return f"{cell.pair}, {place}" if several else place


def _published() -> dict[tuple[int, float], Estimate]:
    """The paper's changes in % by steps and temperature."""
    found = {}
    for claim in load_claims().claims:
        if claim.query and claim.query.measure == "acceptance_change" and claim.value is not None and claim.interval:
            found[claim.query.steps, float(claim.query.temperature)] = Estimate(claim.value, *claim.interval)
    return found


def _draw_changes(axes: Axes, blocks: Sequence[tuple[str, Sequence[Row]]]) -> None:
    axes.axvspan(-MARGIN, MARGIN, color=FAINT, alpha=0.6, linewidth=0, zorder=0, gid="margin")
    axes.axvline(0, color=MUTED, linewidth=0.5, zorder=1)
    y = 0.0
    for title, rows in blocks:
        middle = y + (len(rows) - 1) / 2
        axes.text(-0.32, middle, title.replace(", ", "\n"), transform=axes.get_yaxis_transform(), ha="left", va="center", fontsize=6.5)
        for row in rows:
            _draw_row(axes, y, row)
            y += 1
        if title != blocks[-1][0]:
            axes.axhline(y, color=FAINT, linewidth=0.5, xmin=-0.32, xmax=1.33, clip_on=False)
        y += 1
    axes.set_ylim(y - 1.3, -0.7)
    axes.set_xlim(*_limits([row for _, rows in blocks for row in rows]))
    axes.text(1.03, -1.1, "verdict (prompts)", transform=axes.get_yaxis_transform(), ha="left", va="center", fontsize=TIGHT_PT, color=MUTED)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:+g}".replace("-", "−") if value else "0")
    axes.set_xlabel("change of acceptance length against the default, %", labelpad=2)


def _draw_row(axes: Axes, y: float, row: Row) -> None:
    across, light = axes.get_yaxis_transform(), row.cell is not None and row.cell.batch not in MAIN
    ink = MUTED if light or row.ours is None else INK
    axes.text(-0.03, y, row.label, transform=across, ha="right", va="center", fontsize=TIGHT_PT, color=ink)
    style = look(RESIDENT)
    if row.ours:
        change, alpha = row.ours.change, LIGHT if light else 1.0
        gid = f"{row.cell.steps} {row.cell.temperature:g} {row.cell.batch}" if row.cell else ""
        for ends, width, kind in ((change.wide, 0.8, "95"), (change.narrow, 2.2, "90")):
            axes.plot(
                (ends.low, ends.high), (y, y), color=style.color, linewidth=width, alpha=alpha, solid_capstyle="butt", gid=f"{kind} {gid}"
            )
        axes.plot(
            change.value,
            y,
            style.marker,
            color=style.color,
            markersize=3.4,
            markeredgecolor="white",
            markeredgewidth=0.4,
            alpha=alpha,
            gid=f"ours {gid}",
        )
        axes.text(1.03, y, _verdict(row.ours), transform=across, ha="left", va="center", fontsize=TIGHT_PT, color=ink)
    elif row.paper:
        paper = row.paper
        axes.plot((paper.low, paper.high), (y, y), color=MUTED, linewidth=0.8, solid_capstyle="butt", zorder=2, gid="95 paper")
        axes.plot(paper.value, y, style.marker, color=MUTED, markersize=3.4, markerfacecolor="white", markeredgewidth=0.7, gid="paper")
    else:
        axes.text(1.03, y, "not measured", transform=across, ha="left", va="center", fontsize=TIGHT_PT, color=MUTED)


def _verdict(ours: Comparison) -> str:
    if ours.verdict != Equivalence.UNDECIDED:
        return str(ours.verdict)
    return f"{ours.verdict} ({'∞' if np.isinf(ours.needed) else ours.needed_words})"


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    ends = [row.ours.change.wide if row.ours else row.paper for row in rows if row.ours or row.paper]
    reach = max([1.2 * MARGIN, *(abs(end) for each in ends if each for end in (each.value, each.low, each.high) if np.isfinite(end))])
    return -1.05 * reach, 1.05 * reach


def _draw_positions(axes: Axes, found: Found, steps: int, last: bool) -> None:
    """Both arms at both temperatures, at concurrency 1 or the least there is. The default lies behind ours, and larger."""
    for temperature in TEMPERATURES:
        cells = sorted(cell for cell in found if (cell.steps, cell.temperature) == (steps, temperature) and cell.batch != POOLED)
        if not cells:
            continue
        shares = positions(found[cells[0]].run, cells[0])
        for arm, size in ((DEFAULT, 3.8), (RESIDENT, 2.0)):
            style = look(arm)
            axes.plot(
                range(1, steps + 1), 100 * shares[arm], style.marker, linestyle="--" if temperature else "-", color=style.color, linewidth=0.7,
                markersize=size, markeredgewidth=0.6, markerfacecolor="white" if arm == DEFAULT else style.color, zorder=4 if arm == RESIDENT else 3,
                gid=f"positions {arm} {steps} {temperature:g}",
            )  # fmt: skip
    axes.set_title(f"γ = {steps}", pad=2, fontsize=6.5, loc="left")
    axes.set_xticks(range(1, steps + 1, 1 if steps <= 8 else 3))
    axes.tick_params(labelsize=6)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.grid(axis="y", color=FAINT, linewidth=0.4)
    axes.set_axisbelow(True)
    axes.set_ylabel("accepted, %")
    if last:
        axes.set_xlabel("position, all earlier ones accepted", labelpad=2)


def _legend(figure: Figure) -> None:
    ours, default = look(RESIDENT), LOOKS[DEFAULT]
    left = [
        Line2D([], [], color=ours.color, marker=ours.marker, markersize=3.4, markeredgewidth=0, linewidth=1.6, label="ours: 90 % thick, 95 % thin"),
        Line2D([], [], color=MUTED, marker=ours.marker, markersize=3.4, markerfacecolor="white", markeredgewidth=0.7, linewidth=0.8, label=PAPER),
        Patch(facecolor=FAINT, alpha=0.6, label=f"±{MARGIN:g} %"),
    ]  # fmt: skip
    right = [
        Line2D([], [], color=default.color, marker=default.marker, markersize=3.8, markerfacecolor="white", markeredgewidth=0.6, linewidth=0, label=default.label),
        Line2D([], [], color=ours.color, marker=ours.marker, markersize=2.6, markeredgewidth=0, linewidth=0, label=ours.label),
        Line2D([], [], color=MUTED, linewidth=0.7, label="T = 0"),
        Line2D([], [], color=MUTED, linewidth=0.7, linestyle="--", label="T = 1"),
    ]  # fmt: skip
    shared = {"loc": "upper center", "frameon": False, "fontsize": 6, "columnspacing": 1.2, "handletextpad": 0.5}
    figure.legend(handles=left, bbox_to_anchor=(0.32, 1.0), ncols=3, **shared)
    figure.legend(handles=right, bbox_to_anchor=(0.83, 1.0), ncols=2, **shared)


def _foot(found: Found) -> str:
    runs = {each.run.run_id: each.run for each in found.values()}
    cells = [cell for cell in found if cell.batch != POOLED and cell.temperature == 0]
    same = min((found[cell].identity for cell in cells), key=lambda each: each.same / each.prompts, default=None)
    greedy = f"Identical greedy texts, where they are fewest: {same.same} of {same.prompts}. " if same else ""
    prompts, sources = max(each.change.clusters for each in found.values()), max(each.sources for each in found.values())
    beside = any("acceptance_beside" in run.tables for run in runs.values())
    drawn = "At T = 1 both arms draft in the rounds of both texts, and tokens count that are expected to pass. " if beside else ""
    hardware, pairs = ", ".join(sorted({run.hardware for run in runs.values()})), ", ".join(sorted({cell.pair for cell in found}))
    return (
        f"{prompts} prompts of {sources} sources, drawn whole with all passes and both arms; c: concurrency, all: c pooled, as the paper's. Equivalent: the 90 % interval "
        f"lies within the margin; different: it does not, and the 95 % interval leaves out 0; (prompts): so many would make an undecided change equivalent. {drawn}{greedy}Pair {pairs}. "
        f"{hardware}: {', '.join(sorted(runs))}"
    )
