"""Figure 8: how the CTAs agree on one token a step, and what each way to agree costs with nothing else in the loop."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Rectangle

from analysis.exchange import CHOSEN, L2, costs, counts, gaps, price, protocols
from analysis.load import MissingResults, Run, measure_command, newest_run
from analysis.slope import Fit, flagged
from figures.style import FAINT, INK, MUTED, PAGE_IN, note, protocol_look

Costs = dict[tuple[str, int], Fit]
HEIGHT_IN = 3.05
GROUPS = ((False, "leans on the hardware"), (True, "promised by PTX"))
ACCENT = protocol_look(CHOSEN).color
PALE = "#fbe3d3"
# The schematic is drawn in points.
WIDTH, TOP = 292.0, 188.0
EDGE = 1.0  # so that a frame at the border is not cut
CTAS_Y = (152.0, 126.0, 82.0)  # heights of the CTAs that are drawn
LINE_Y, LINE_H = 118.0, 18.0  # of this step's line in L2


def draw(results: Path, device: str) -> Figure:
    """The figure from the newest exchange run on `device`."""
    run = newest_run(results, "exchange", device)
    fitted = costs(run)
    if (CHOSEN, counts(run)[-1]) not in fitted:
        raise MissingResults(
            f"run {run.run_id} did not time the {CHOSEN} among {counts(run)[-1]} CTAs", measure_command("exchange", device)
        )
    figure = plt.figure(figsize=(PAGE_IN, HEIGHT_IN))
    foot = note(figure, _foot(run, fitted))
    bottom = foot + 0.02
    schematic = figure.add_axes((0.008, bottom, WIDTH / 72 / PAGE_IN, 0.985 - bottom))
    _draw_exchange(schematic, run, fitted)
    panel = figure.add_axes((0.752, bottom + 0.115, 0.182, 0.815 - bottom))
    _draw_costs(panel, run, fitted)
    return figure


def _draw_exchange(axes: Axes, run: Run, fitted: Costs) -> None:
    """One step of the chosen protocol: post, poll, token, and back."""
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(0, TOP)
    axes.axis("off")
    most = counts(run)[-1]
    axes.text(0, TOP - 2, "One step of the {key, count} pair", fontsize=7.5, va="top")
    _draw_ctas(axes, EDGE, most, "best row")
    _draw_ctas(axes, WIDTH - 46 - EDGE, most, "token")
    _draw_l2(axes)
    for y in CTAS_Y:
        _arrow(axes, (46 + EDGE, y), (96, LINE_Y + (y - LINE_Y) * 0.1), ACCENT)
        _arrow(axes, (196, LINE_Y + (y - LINE_Y) * 0.1), (WIDTH - 46 - EDGE, y), INK)
    axes.text(70, 158, "red.max key\nred.add 1", ha="center", fontsize=6, color=ACCENT, linespacing=1.25)
    axes.text(222.5, 158, f"16-byte poll:\ncount = {most}?", ha="center", fontsize=6, linespacing=1.25)
    _draw_feedback(axes)
    _draw_measured(axes, run, fitted)


def _draw_ctas(axes: Axes, x: float, most: int, holds: str) -> None:
    for y, name in zip(CTAS_Y, ("0", "1", str(most - 1)), strict=True):
        axes.add_patch(Rectangle((x, y - 10), 46, 20, facecolor="white", edgecolor=INK, linewidth=0.7))
        axes.text(x + 23, y, f"CTA {name}\n{holds}", ha="center", va="center", fontsize=5.8, linespacing=1.15)
    axes.text(x + 23, (CTAS_Y[1] + CTAS_Y[2]) / 2, "⋮", ha="center", va="center", fontsize=8, color=MUTED)


def _draw_l2(axes: Axes) -> None:
    """Two banks of lines, one line a step; this step's is the only one that moves."""
    axes.add_patch(Rectangle((92, 66), 108, 104, facecolor="#f6f6f6", edgecolor=MUTED, linewidth=0.7))
    axes.text(146, 166.5, "L2: the bank of this launch's parity", ha="center", va="top", fontsize=5.2, color=MUTED)
    _draw_line(axes, LINE_Y + 23, "step k − 1: done")
    axes.text(97, LINE_Y + 10.5, "step k", fontsize=5.2, color=ACCENT, va="bottom")
    _draw_line(axes, LINE_Y - 20, "step k + 1: prefetched")
    for x, width, text, color in ((96, 34, "key", PALE), (130, 34, "count", PALE), (164, 32, "", "white")):
        axes.add_patch(Rectangle((x, LINE_Y - LINE_H / 2), width, LINE_H, facecolor=color, edgecolor=ACCENT, linewidth=0.9))
        axes.text(x + width / 2, LINE_Y, text, ha="center", va="center", fontsize=6.2, color=ACCENT)
    axes.text(180, LINE_Y, "128-byte\nline", ha="center", va="center", fontsize=4.8, color=MUTED, linespacing=1.1)
    axes.add_patch(Rectangle((96, 69.5), 100, 13, facecolor="white", edgecolor=FAINT, linewidth=0.7, hatch="////"))
    axes.text(
        146, 76, "other bank: cleared for the next launch", ha="center", va="center", fontsize=4.8, color=MUTED,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
    )  # fmt: skip


def _draw_line(axes: Axes, y: float, text: str) -> None:
    axes.add_patch(Rectangle((96, y - 7), 100, 14, facecolor="white", edgecolor=FAINT, linewidth=0.7))
    axes.text(146, y, text, ha="center", va="center", fontsize=5.2, color=MUTED)


def _draw_feedback(axes: Axes) -> None:
    path = ((WIDTH - 24, 70), (WIDTH - 24, 54), (24, 54), (24, 70))
    axes.plot([x for x, _ in path[:3]], [y for _, y in path[:3]], color=MUTED, linewidth=0.8, solid_joinstyle="round")
    _arrow(axes, path[2], path[3], MUTED)
    axes.text(
        WIDTH / 2, 55.5, "the token decides the next keys: no step overlaps another", ha="center", va="bottom", fontsize=5.8, color=MUTED
    )
    axes.text(
        WIDTH / 2, 49.5, "key = score order · inverted CTA · inverted row: the largest wins, of equal scores the lowest CTA, then the lowest row",
        ha="center", va="top", fontsize=4.9, color=MUTED,
    )  # fmt: skip


def _draw_measured(axes: Axes, run: Run, fitted: Costs) -> None:
    """The chosen protocol's numbers, one box for each number of CTAs."""
    timed = [ctas for ctas in counts(run) if (CHOSEN, ctas) in fitted]
    pitch = WIDTH / len(timed)
    for place, ctas in enumerate(timed):
        slope, x = fitted[CHOSEN, ctas].slope_us, (place + 0.5) * pitch
        axes.text(x, 21, f"{slope.value:.2f} µs/step", ha="center", fontsize=7.5, color=ACCENT, weight="bold", gid=f"measured {ctas}")
        interval = "" if np.isnan(slope.low) else f" [{slope.low:.2f}, {slope.high:.2f}]"
        axes.text(x, 18, f"among {ctas} CTAs{interval}", ha="center", va="top", fontsize=5.6, color=MUTED)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=6, color=color, linewidth=0.8, shrinkA=1, shrinkB=1))


def _draw_costs(axes: Axes, run: Run, fitted: Costs) -> None:
    """A row a protocol, what leans on the hardware above what PTX promises; a point for each number of CTAs, the more the fuller."""
    grids = counts(run)
    y, ticks, labels = 0.0, [], []
    for promised, title in GROUPS:
        names = [name for name, of in protocols(run).items() if of is promised]
        if not names:
            continue
        axes.text(-0.02, y, title, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=5.6, color=MUTED, style="italic")
        for name in names:
            y -= 1
            ticks.append(y)
            labels.append(name)
            _draw_row(axes, y, name, grids, fitted)
        y -= 1.15
    axes.set_ylim(y + 0.55, 0.6)
    axes.set_yticks(ticks, [protocol_look(name).label for name in labels], fontsize=6)
    for tick, name in zip(axes.get_yticklabels(), labels, strict=True):
        tick.set_color(protocol_look(name).color)
    axes.tick_params(axis="y", length=0, pad=2)
    axes.set_xlim(0, 1.12 * max(fit.slope_us.value for fit in fitted.values()))
    axes.set_xlabel("µs/step, nothing else in the loop")
    axes.xaxis.grid(True, color=FAINT, linewidth=0.4)
    axes.set_axisbelow(True)
    axes.text(1.04, 0, f"{grids[-1]} CTAs", transform=axes.get_yaxis_transform(), fontsize=5.6, color=MUTED, va="center")
    handles = [
        Line2D(
            [], [], linestyle="", marker="o", markersize=3.6, color=INK, markerfacecolor=_face(INK, place, len(grids)), label=f"{ctas} CTAs"
        )
        for place, ctas in enumerate(grids)
    ]
    axes.legend(
        handles=handles, loc="lower center", bbox_to_anchor=(0.2, 1.0), ncols=len(grids), frameon=False, fontsize=6, handletextpad=0.0,
        columnspacing=0.8, borderpad=0.1,
    )  # fmt: skip


def _draw_row(axes: Axes, y: float, name: str, grids: list[int], fitted: Costs) -> None:
    style = protocol_look(name)
    timed = [(place, ctas, fitted[name, ctas].slope_us) for place, ctas in enumerate(grids) if (name, ctas) in fitted]
    axes.plot([slope.value for *_, slope in timed], [y] * len(timed), color=style.color, linewidth=0.6, alpha=0.6, zorder=2)
    for place, ctas, slope in timed:
        ends = np.nan_to_num([[slope.value - slope.low], [slope.high - slope.value]]).clip(min=0)
        axes.errorbar(
            slope.value, y, xerr=ends, fmt=style.marker, color=style.color, markersize=4.0, markerfacecolor=_face(style.color, place, len(grids)),
            markeredgewidth=0.7, elinewidth=0.7, capsize=1.4, capthick=0.6, zorder=3, label=f"{name} {ctas}",
        )  # fmt: skip
    last = fitted.get((name, grids[-1]))
    text = f"{last.slope_us.value:.2f}" if last else "not run"
    axes.text(1.04, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=6, color=style.color)


def _face(color: str, place: int, of: int) -> tuple[float, float, float, float]:
    """White for the fewest CTAs, the full colour for the most."""
    share = place / max(1, of - 1)
    red, green, blue, _ = to_rgba(color)
    return (1 - share * (1 - red), 1 - share * (1 - green), 1 - share * (1 - blue), 1.0)


def _foot(run: Run, fitted: Costs) -> str:
    steps = next(iter(fitted.values())).steps
    replicas = max(fit.replicas for fit in fitted.values())
    lines = [
        f"Left: schematic. Numbers: slopes over probes of {min(steps)} to {max(steps)} steps that only exchange, cold L2, with 95 % intervals over "
        f"{replicas} processes, which may be smaller than the marker; {flagged(run.table('exchange'), l2=L2)} samples with off clocks left out. "
        f"{_price(run)}{run.hardware}, run {run.run_id}.",
        *_gap_lines(run),
    ]
    return "\n".join(lines)


def _price(run: Run) -> str:
    paid = price(run, counts(run)[-1])
    if paid is None:
        return ""
    return (
        f"PTX promises neither that a 16-byte load sees both words at one moment, nor the order of the two reductions; "
        f"the cheapest protocol that needs neither, {protocol_look(paid.protocol).label}, costs {paid.extra_us:.2f} µs/step more "
        f"among {paid.ctas} CTAs. "
    )


def _gap_lines(run: Run) -> list[str]:
    """Cells that are not ok stay visible, each with its reason."""
    found = gaps(run)
    told = [
        f"{protocol_look(gap.protocol).label}, {gap.ctas} CTAs{'' if gap.whole else f', {gap.failed} of {gap.asked} probes'} "
        f"({gap.status}: {gap.reason.removeprefix('exchange_probe').lstrip(': ')[:80]})"
        for gap in found
    ]
    return [f"Not run: {'; '.join(told)}"] if told else []
