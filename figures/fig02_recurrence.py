"""Figure 2: serial refinement with a shared vocabulary projection. Every number of a toy walk; each chosen token feeds the next step."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Rectangle

from analysis.load import MissingResults, measure_command, newest_run
from figures.style import INK, PAGE_IN, look, note

COLUMNS = ("base", "bias", "logit")
TITLES = ("base", "W2·u", "sum")
MAP = "PRGn"
ACCENT = look("resident").color


def draw(results: Path, device: str) -> Figure:
    """The figure from the newest toy walk, on whatever device it ran: its numbers do not depend on one."""
    run = newest_run(results, "toy_walk")
    walk = run.table("walk_steps")
    if walk.empty:
        raise MissingResults(f"run {run.run_id} walked no steps", measure_command("toy_walk", "cpu"))
    steps = sorted(walk["step"].unique())
    vocab, rank = int(walk["vocab"].iloc[0]), int(walk["rank"].iloc[0])
    largest = float(np.abs(walk[list(COLUMNS)].to_numpy(dtype=np.float64)).max())
    norm = Normalize(-largest, largest)
    figure = plt.figure(figsize=(PAGE_IN, 2.35))
    foot = note(figure, _foot(vocab, rank, len(steps), str(walk["rounding"].iloc[0]), run.run_id))
    width, left = 0.15, 0.06
    pitch = (0.89 - left - width) / max(1, len(steps) - 1) if len(steps) > 1 else 0.0
    panels: list[Axes] = []
    for place, step in enumerate(steps):
        axes = figure.add_axes((left + place * min(pitch, 0.31), foot + 0.03, width, 0.82 - foot))
        _draw_step(axes, walk[walk["step"] == step], norm)
        panels.append(axes)
    panels[0].set_ylabel("token of the vocabulary")
    _draw_feedback(figure, panels, walk, steps)
    bar = figure.add_axes((0.915, foot + 0.03, 0.012, 0.82 - foot))
    figure.colorbar(ScalarMappable(norm, MAP), cax=bar, label="logit")
    return figure


def _draw_step(axes: Axes, rows: pd.DataFrame, norm: Normalize) -> None:
    """One step: base logits, bias and their sum over the vocabulary, the chosen token framed."""
    rows = rows.sort_values("row")
    values = rows[list(COLUMNS)].to_numpy(dtype=np.float64)
    token = int(rows["token"].iloc[0])
    axes.imshow(values, cmap=MAP, norm=norm, aspect="auto", gid=f"step {int(rows['step'].iloc[0])}")
    axes.set_xticks(range(len(COLUMNS)), TITLES)
    axes.tick_params(length=0, top=False)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(rows)), [str(row) for row in rows["row"]])
    for spine in axes.spines.values():
        spine.set_visible(False)
    for edge in range(1, len(COLUMNS)):
        axes.axvline(edge - 0.5, color="white", linewidth=1.5)
    axes.add_patch(Rectangle((1.5, token - 0.5), 1, 1, fill=False, edgecolor=ACCENT, linewidth=1.4, clip_on=False, zorder=4))
    peak = values[token, 2]
    ink = "white" if abs(norm(peak) - 0.5) > 0.3 else INK
    axes.text(2, token, f"{peak:.1f}", ha="center", va="center", fontsize=5.8, color=ink)
    axes.set_title(f"step {int(rows['step'].iloc[0]) + 1}: u = W1[{int(rows['previous'].iloc[0])}]", pad=14, color=INK)


def _draw_feedback(figure: Figure, panels: list[Axes], walk: pd.DataFrame, steps: list[int]) -> None:
    """An arrow from every chosen token to the latent of the next step."""
    for panel, following, step in zip(panels, panels[1:], steps, strict=False):
        rows = walk[walk["step"] == step]
        token, box, target = int(rows["token"].iloc[0]), panel.get_position(), following.get_position()
        y = box.y1 - box.height * (token + 0.5) / len(rows)
        bend, top, end = box.x1 + 0.055, box.y1 + 0.118, target.x0 - 0.004
        figure.add_artist(Line2D((box.x1 + 0.004, bend, bend), (y, y, top), color=ACCENT, linewidth=1.0))
        figure.add_artist(
            FancyArrowPatch((bend, top), (end, top), arrowstyle="-|>", mutation_scale=7, color=ACCENT, linewidth=1.0, shrinkA=0, shrinkB=0)
        )
        figure.text(bend + 0.008, y, f"token {token}", color=ACCENT, fontsize=6.5, va="center")


def _foot(vocab: int, rank: int, steps: int, rounding: str, run_id: str) -> str:
    return (
        f"A walk of {steps} steps at V = {vocab}, r = {rank}, computed by the reference (rounding: {rounding}). Each column holds one number a token; "
        f"the largest sum (framed) is the step's token, and its row of W1 the next step's latent u. W2 is the same at every step. Run {run_id}."
    )
