"""Figure 11: what one fused launch saves, and what keeping the weights on chip saves. Complete calls over steps, cold L2."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis.bootstrap import Estimate, bootstrap, median
from analysis.fits import fit_run
from analysis.load import Run, newest_run
from analysis.slope import Fit, flagged, medians
from figures.style import COLUMN_IN, break_axis, look, note

CELL = {"l2": "cold", "scope": "call"}
LOWER_SHARE = 0.62  # of the height, for the values below the break


def draw(results: Path, device: str) -> Figure:
    """The figure from the newest step_slope run on `device`."""
    run = newest_run(results, "step_slope", device)
    fits, points = fit_run(run, **CELL), point_estimates(run)
    figure = plt.figure(figsize=(COLUMN_IN, 3.15))
    foot = note(figure, _foot(run, fits))
    panels = _panels(figure, points, bottom=foot + 0.1)
    for variant, fitted in fits.items():
        for axes in panels:
            _draw_variant(axes, variant, points[variant], fitted)
    _label_lines(figure, panels, fits)
    panels[0].set_xlabel("steps in one walk")
    panels[0].set_ylabel("time of one call, µs")
    return figure


def point_estimates(run: Run) -> dict[str, dict[int, Estimate]]:
    """What the figure plots: by variant and steps, the median time in us with its interval over replicas."""
    estimates = {}
    for variant in fit_run(run, **CELL):
        times = medians(run.table("samples"), variant=variant, **CELL)
        columns = zip(times.columns.to_numpy(dtype=int).tolist(), times.to_numpy(dtype=np.float64).T, strict=True)
        estimates[variant] = {steps: bootstrap(column[np.isfinite(column)], median) for steps, column in columns}
    return estimates


def slope_label(fitted: Fit) -> str:
    """A slope with its interval, in us a step, to about three digits."""
    return f"{fitted.slope_us:.2f}" if fitted.slope_us.value < 10 else f"{fitted.slope_us:.1f}"


def choose_break(values: list[float], least: float) -> tuple[float, float] | None:
    """The widest gap between consecutive `values` at or above `least`, a little inside its ends; None if no gap is worth a break.

    No measured point lies in the break; only fitted lines cross it.
    """
    ordered = sorted(value for value in values if value >= least)
    gaps = [(high - low, low, high) for low, high in pairwise(ordered)]
    if not gaps or max(gaps)[0] < 0.08 * max(values):
        return None
    width, low, high = max(gaps)
    return low + 0.15 * width, high - 0.15 * width


def _panels(figure: Figure, points: dict[str, dict[int, Estimate]], bottom: float) -> list[Axes]:
    """One panel, or a lower and a compressed upper one around the break."""
    values = [estimate.value for of_variant in points.values() for estimate in of_variant.values()]
    fused = [
        estimate.value
        for variant, of_variant in points.items()
        if look(variant).label.startswith("one launch")
        for estimate in of_variant.values()
    ]
    gap = choose_break(values, max(fused)) if fused and max(values) > 1.5 * max(fused) else None
    left, right, top = 0.135, 0.60, 0.975
    longest = max(steps for of_variant in points.values() for steps in of_variant)
    height = top - bottom
    if gap is None:
        panels = [figure.add_axes((left, bottom, right - left, height))]
        panels[0].set_ylim(0, 1.04 * max(values))
    else:
        split, space = bottom + LOWER_SHARE * height, 0.02
        panels = [
            figure.add_axes((left, bottom, right - left, split - bottom)),
            figure.add_axes((left, split + space, right - left, top - split - space)),
        ]
        panels[0].set_ylim(0, gap[0])
        panels[1].set_ylim(gap[1], 1.04 * max(values))
        break_axis(figure, panels[0], panels[1])
    for axes in panels:
        axes.set_xlim(0, longest + 0.6)
        axes.yaxis.set_major_locator(
            MaxNLocator(6 if axes is panels[0] else 4, steps=[1, 2, 2.5, 5, 10], prune="upper" if axes is panels[0] else None)
        )
    panels[0].set_xticks(sorted({steps for of_variant in points.values() for steps in of_variant}))
    return panels


def _draw_variant(axes: Axes, variant: str, points: dict[int, Estimate], fitted: Fit) -> None:
    style = look(variant)
    steps = np.array(list(points), dtype=np.float64)
    values = np.array([estimate.value for estimate in points.values()])
    ends = np.array([[estimate.value - estimate.low, estimate.high - estimate.value] for estimate in points.values()]).T
    line = np.array([0.0, steps.max()])
    axes.plot(line, fitted.at(line), color=style.color, linewidth=0.9, zorder=2, gid=f"fit {variant}")
    axes.errorbar(
        steps, values, yerr=np.nan_to_num(ends).clip(min=0), fmt=style.marker, color=style.color, markersize=3.4, markeredgewidth=0,
        elinewidth=0.7, capsize=1.2, capthick=0.6, zorder=3, label=f"points {variant}",
    )  # fmt: skip


def _label_lines(figure: Figure, panels: list[Axes], fits: dict[str, Fit]) -> None:
    """Name every line at its right end with its slope, in us a step, pushed apart where labels would touch."""
    ends = []
    for variant, fitted in fits.items():
        last = max(fitted.steps)
        time = float(fitted.at(float(last)))
        axes = next((axes for axes in reversed(panels) if axes.get_ylim()[0] <= time), panels[0])
        box = axes.get_position()
        low, high = axes.get_ylim()
        ends.append((box.y0 + box.height * (time - low) / (high - low), variant))
    pitch, places = 0.093, []
    for wanted, variant in sorted(ends):
        places.append((max(wanted - 0.02, places[-1][0] + pitch if places else 0.0), wanted, variant))
    spill = max(0.0, places[-1][0] + 0.05 - 0.975) if places else 0.0
    for rank, (place, wanted, variant) in enumerate(places):
        # labels pushed above the top come down again, each no further than the one above it allows
        y = min(place, places[-1][0] - spill - pitch * (len(places) - 1 - rank))
        style, box = look(variant), panels[0].get_position()
        figure.text(
            box.x1 + 0.045, y, f"{style.label}\n{slope_label(fits[variant])}", color=style.color, fontsize=5.9, va="bottom", linespacing=1.2
        )
        figure.add_artist(Line2D((box.x1 - 0.01, box.x1 + 0.038), (wanted, y + 0.022), color=style.color, linewidth=0.5))


def _foot(run: Run, fits: dict[str, Fit]) -> str:
    samples = run.table("samples")
    replicas = max(fitted.replicas for fitted in fits.values())
    out = sum(flagged(samples, variant=variant, **CELL) for variant in fits)
    text = (
        f"Labels: slope in µs/step [95 % interval over {replicas} processes]. Points: medians of complete calls with cold L2, and their intervals, "
        f"which may be smaller than the marker; {out} samples with off clocks left out. Above a break the axis is compressed. "
        f"{run.hardware}, run {run.run_id}."
    )
    return "\n".join([text, *_gaps(run.table("cells"), fits)])


def _gaps(cells: pd.DataFrame, fits: dict[str, Fit]) -> list[str]:
    """Cells that are not ok stay visible: one line for each of their variants, with the first reason."""
    lines = []
    for variant, rows in cells.groupby("variant", sort=False):
        failed = rows[rows["status"] != "ok"]
        if len(failed):
            what = f"{len(failed)} of {len(rows)} walks failed" if variant in fits else "not drawn"
            lines.append(f"{look(str(variant)).label}: {what} ({failed['status'].iloc[0]}: {failed['reason'].iloc[0][:80]})")
    return lines
