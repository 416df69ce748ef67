"""Figure 4: one walk on a time axis. Fusion removes launch boundaries; residency removes the repeated reads of W2. Drawn from the fits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.fits import fit_run
from analysis.load import MissingResults, Run, measure_command, newest_run
from analysis.slope import Fit
from figures.style import INK, MUTED, PAGE_IN, look, note

STEPS = 7
ROWS = ("sglang_folded", "streaming_int8", "resident")
SHOWN_STEPS = 1  # of the SGLang row, whose whole walk would not fit the axis
# How one SGLang step is shared out is illustrative: the fits know only its length.
SGLANG_SHARES = (("latent", 0.06), ("weights", 0.5), ("pick", 0.44))
KINDS = {
    "entry": ("launch, staging", "#c4c4c4"),
    "load": ("shard load, once", "#E69F00"),
    "weights": ("read W2 again", "#8fc1e3"),
    "pick": ("multiply, pick the token", "#5b8c6e"),
    "latent": ("small kernels", "#e6d5e8"),
}


@dataclass(frozen=True)
class Segment:
    """A stretch of one row, in us."""

    kind: str
    start_us: float
    length_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.length_us


def draw(results: Path, device: str) -> Figure:
    """The figure from the fits of the newest step_slope run on `device`."""
    run = newest_run(results, "step_slope", device)
    fits = _fits(run, device)
    rows = segments(fits)
    figure = plt.figure(figsize=(PAGE_IN, 1.95))
    foot = note(figure, _foot(run))
    axes = figure.add_axes((0.155, foot + 0.17, 0.83, 0.98 - foot - 0.30))
    limit = 1.25 * max(chain[-1].end_us for chain in rows.values())
    for place, variant in enumerate(ROWS):
        _draw_row(axes, -place, rows[variant], fits[variant], variant)
    _cut(axes, 0, rows["sglang_folded"], fits["sglang_folded"])
    axes.set_xlim(0, limit)
    axes.set_ylim(-len(ROWS) + 0.45, 0.55)
    axes.set_yticks([-place for place in range(len(ROWS))], [look(variant).label.replace(", ", ",\n") for variant in ROWS])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"time since the call, µs ({STEPS} steps)")
    handles = [Patch(color=color, label=label) for label, color in (KINDS[kind] for kind in ("entry", "load", "weights", "pick", "latent"))]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.145, 1.0),
        ncols=5,
        frameon=False,
        handlelength=1.0,
        columnspacing=1.4,
        borderpad=0.2,
    )
    return figure


def segments(fits: dict[str, Fit]) -> dict[str, list[Segment]]:
    """Every row's segments, end to end.

    A row's entry cost and step length are its fit. What a streaming step takes more than a resident one is its read of W2; what the resident
    entry takes more than the streaming one is its shard load. Both are zero where the fits have no such excess.
    """
    resident, streaming, sglang = fits["resident"], fits["streaming_int8"], fits["sglang_folded"]
    reread = max(0.0, streaming.slope_us.value - resident.slope_us.value)
    load = max(0.0, resident.entry_us.value - streaming.entry_us.value)
    sglang_step = [(kind, share * sglang.slope_us.value) for kind, share in SGLANG_SHARES]
    return {
        "sglang_folded": _chain([("entry", sglang.entry_us.value), *sglang_step * SHOWN_STEPS]),
        "streaming_int8": _chain(
            [("entry", streaming.entry_us.value), *[("weights", reread), ("pick", streaming.slope_us.value - reread)] * STEPS]
        ),
        "resident": _chain([("entry", resident.entry_us.value - load), ("load", load), *[("pick", resident.slope_us.value)] * STEPS]),
    }


def _chain(parts: list[tuple[str, float]]) -> list[Segment]:
    chain, start = [], 0.0
    for kind, length in parts:
        if length > 0:
            chain.append(Segment(kind, start, length))
            start += length
    return chain


def _fits(run: Run, device: str) -> dict[str, Fit]:
    fits = fit_run(run)
    missing = [variant for variant in ROWS if variant not in fits]
    if missing:
        raise MissingResults(f"run {run.run_id} has no timed walks of {', '.join(missing)}", measure_command("step_slope", device))
    return fits


def _draw_row(axes: Axes, y: float, chain: list[Segment], fitted: Fit, variant: str) -> None:
    for segment in chain:
        hatch = "////" if variant == "sglang_folded" and segment.kind != "entry" else None
        color = KINDS[segment.kind][1]
        axes.barh(
            y, segment.length_us, left=segment.start_us, height=0.5, color=color, edgecolor="white", linewidth=0.4, hatch=hatch, gid=variant
        )
    end = chain[-1].end_us
    if variant != "sglang_folded":
        axes.text(end + 0.6, y, f"{fitted.at(float(STEPS)):.0f} µs", va="center", fontsize=6.5, color=INK)


def _cut(axes: Axes, y: float, chain: list[Segment], fitted: Fit) -> None:
    """Where the row stops being drawn: a torn edge, and how long the walk really is."""
    end = chain[-1].end_us
    zigzag = [(end - 0.25, y - 0.32), (end + 0.35, y - 0.16), (end - 0.25, y), (end + 0.35, y + 0.16), (end - 0.25, y + 0.32)]
    axes.fill_betweenx([at for _, at in zigzag], [x for x, _ in zigzag], [end + 0.5] * len(zigzag), color="white", zorder=3)
    axes.plot([x for x, _ in zigzag], [at for _, at in zigzag], color=INK, linewidth=0.7, zorder=4)
    axes.text(
        end + 1.0,
        y,
        f"cut after step {SHOWN_STEPS} of {STEPS};\nin all {fitted.at(float(STEPS)):.0f} µs",
        va="center",
        fontsize=6.5,
        color=MUTED,
    )


def _foot(run: Run) -> str:
    return (
        "Lengths of entry and steps are the fits of complete calls with cold L2. The resident entry's excess over streaming is drawn as the shard load, "
        "a streaming step's excess over a resident one as its read of W2 (both hold W2 as int8). Segments within the SGLang step (hatched) are illustrative. "
        f"{run.hardware}, run {run.run_id}."
    )
