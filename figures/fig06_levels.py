"""Figure 6: where the weights of W2 lie, and where 8-bit formats have their levels. Cumulative shares over |w| / largest of the row."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.levels import LEVELS
from analysis.load import MissingResults, Run, all_runs, measure_command
from analysis.quantization import EXPERIMENT, TRAINED, magnitude_band, run_of
from figures.style import COLUMN_IN, FAINT, FORMATS, INK, note

LABEL_PT = 5.8
FLOATS = ("e4m3", "e5m2")
PLACES = {"e4m3": (0.48, 0.305), "e5m2": (0.48, 0.11)}  # of the words about a crossing, left end and centre


def draw(results: Path, device: str) -> Figure:
    """The figure from the newest quantization run of trained heads on any device, or of the synthetic head where there is none."""
    run = run_of(all_runs(results, EXPERIMENT, None))
    if run is None:
        raise MissingResults(f"{results} holds no run of experiment={EXPERIMENT}", measure_command(EXPERIMENT, "cpu"))
    band = magnitude_band(run)
    if band.empty:
        raise MissingResults(f"run {run.run_id} has no magnitudes", measure_command(EXPERIMENT, "cpu"))
    figure = plt.figure(figsize=(COLUMN_IN, 2.75))
    foot = note(figure, _foot(run))
    axes = figure.add_axes((0.17, foot + 0.115, 0.805, 0.975 - foot - 0.115))
    _draw_weights(axes, band)
    for name in FORMATS:
        _draw_levels(axes, name)
    for name in FLOATS:
        _draw_crossing(axes, name, band)
    _name_curves(axes, run)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.005)
    axes.set_xlabel("|w| / largest |w| of the row")
    axes.set_ylabel("cumulative share")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.grid(color=FAINT, linewidth=0.4)
    axes.set_axisbelow(True)
    return figure


def weights_below(band: pd.DataFrame, magnitude: float) -> tuple[float, float]:
    """The share of weights at or below `magnitude`, of the head with the least and the one with the most. Between recorded points a line."""
    at = band.index.to_numpy(dtype=np.float64)
    low, high = (float(np.interp(magnitude, at, band[name].to_numpy(dtype=np.float64))) for name in ("low", "high"))
    return low, high


def _draw_weights(axes: Axes, band: pd.DataFrame) -> None:
    axes.fill_between(band.index, band["low"], band["high"], color=INK, alpha=0.25, linewidth=0, label="band")
    axes.plot(band.index, band["median"], color=INK, linewidth=1.2, gid="weights", zorder=3)


def _draw_levels(axes: Axes, name: str) -> None:
    positive = LEVELS[name].positive
    shares = np.arange(1, len(positive) + 1) / len(positive)
    axes.step([0, *positive], [0, *shares], where="post", color=FORMATS[name].color, linewidth=0.8, gid=f"levels {name}", zorder=2)


def _draw_crossing(axes: Axes, name: str, band: pd.DataFrame) -> None:
    """Left of the line the steps of a float are finer than int8's: how many of its levels lie there, and how many weights."""
    at, look = LEVELS[name].crossover(LEVELS["int8"]), FORMATS[name]
    levels, (low, high) = LEVELS[name].below(at), weights_below(band, at)
    axes.axvline(at, color=look.color, linewidth=0.7, linestyle=(0, (4, 2)), zorder=1, gid=f"crossing {name}")
    axes.plot([at], [levels], look.marker, color=look.color, markersize=3.6, markeredgewidth=0, zorder=4, gid=f"levels left of {name}")
    axes.plot([at, at], [low, high], look.marker, color=INK, markersize=2.6, markeredgewidth=0, zorder=4, gid=f"weights left of {name}")
    words = (
        f"{name}'s steps are finer than int8's\nleft of {at:.3f}: {100 * levels:.0f} % of its levels,\n{_span(low, high)} of the weights"
    )
    x, y = PLACES[name]
    axes.annotate(
        words, (at, high), (x, y), textcoords="axes fraction", fontsize=LABEL_PT, color=look.color, va="center", linespacing=1.25,
        arrowprops={"arrowstyle": "-", "color": look.color, "linewidth": 0.5, "shrinkA": 1, "shrinkB": 2},
    )  # fmt: skip


def _span(low: float, high: float) -> str:
    ends = f"{100 * low:.0f}", f"{100 * high:.0f}"
    return f"{ends[0]} %" if ends[0] == ends[1] else f"{ends[0]}–{ends[1]} %"


def _name_curves(axes: Axes, run: Run) -> None:
    for name, (x, y) in {"e5m2": (0.095, 0.99), "e4m3": (0.105, 0.765), "int8": (0.75, 0.70)}.items():
        axes.text(x, y, FORMATS[name].label, fontsize=LABEL_PT, color=FORMATS[name].color, va="top")
    axes.text(0.405, 0.645, "W2" if _trained(run) else "W2\n(synthetic)", fontsize=LABEL_PT, color=INK, va="top")


def _trained(run: Run) -> bool:
    return bool((run.table("magnitudes")["weights"] == TRAINED).all())


def _foot(run: Run) -> str:
    heads = list(dict.fromkeys(run.table("magnitudes")["head"]))
    kind = "trained" if _trained(run) else "synthetic, normally distributed"
    whose = f"of {heads[0]} ({kind})" if len(heads) == 1 else f"median and, shaded, all of {len(heads)} {kind} heads ({', '.join(heads)})"
    return (
        f"Black: elements of W2, {whose}. Coloured: positive levels of a format whose largest is the row's largest weight. Dashed: where a "
        f"format's steps become wider than int8's 1/127. Run {run.run_id}."
    )
