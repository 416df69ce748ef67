"""Figure 3: (a) how large the matrix of every public vocabulary is beside a GPU's memories; (b) what one step of SGLang's default walk is made of."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.anatomy import EXPERIMENT, IDLE, MAIN_WALK, Part, Step, run_of, steps
from analysis.load import Run, all_runs, measure_command, newest_run
from figures.style import FAINT, INK, MUTED, PAGE_IN, look, note

ARM = "sglang_folded"
DEVICES = ("h100", "h200", "b200", "b300")
ON_CHIP = ("registers", "shared_memory", "tensor_memory")
WEIGHTS = {"bf16": (2, "#222222", "s"), "int8": (1, "#D55E00", "o")}  # bytes an element, as for the walks that read them
SMALL_US = 1.0  # kernels of less are drawn as one


def draw(results: Path, device: str) -> Figure:
    """The figure from the newest capacity run, and the newest step_anatomy run on `device` if there is one."""
    capacity = newest_run(results, "capacity")
    traced = run_of(all_runs(results, EXPERIMENT, device), *MAIN_WALK)
    figure = plt.figure(figsize=(PAGE_IN, 2.75))
    foot = note(figure, _foot(capacity, traced, device))
    grid = figure.add_gridspec(1, 2, left=0.065, right=0.985, bottom=foot + 0.13, top=0.91, wspace=0.34, width_ratios=(1, 0.82))
    _draw_sizes(figure.add_subplot(grid[0]), capacity.table("placement"))
    _draw_step(figure.add_subplot(grid[1]), None if traced is None else steps(traced).get(ARM))
    return figure


def memories_mb(placement: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Of every device: on chip (registers, shared and tensor memory of all SMs) and L2, in MB."""
    one = placement.drop_duplicates(["device", "tier"]).pivot(index="device", columns="tier", values="capacity_bytes").fillna(0) / 1e6
    on_chip = one[[tier for tier in ON_CHIP if tier in one]].sum(axis=1)
    return {device: (float(on_chip[device]), float(one["l2"][device])) for device in DEVICES if device in one.index}


def _draw_sizes(axes: Axes, placement: pd.DataFrame) -> None:
    sizes = placement[["vocab", "rank"]].drop_duplicates().sort_values("vocab")
    for dtype, (size, color, marker) in WEIGHTS.items():
        mb = sizes["vocab"] * sizes["rank"] * size / 1e6
        axes.plot(
            sizes["vocab"] / 1e3, mb, color=color, marker=marker, markersize=3, linewidth=0.7, label=f"W2 in {dtype}", gid=f"size {dtype}"
        )
    limit = 1.06 * float(sizes["vocab"].max()) / 1e3
    _draw_memories(axes, memories_mb(placement))
    axes.set_xlim(0, limit)
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.set_xlabel("vocabulary, thousands of tokens (rank 256)")
    axes.set_ylabel("MB")
    axes.set_title("(a) W2 beside a GPU's memories", loc="left")
    axes.legend(loc="lower right", frameon=False)


def _draw_memories(axes: Axes, found: dict[str, tuple[float, float]]) -> None:
    """A line for each capacity, named above it, or below where another line is close above."""
    levels: dict[tuple[float, bool], list[str]] = {}
    for name, (on_chip, l2) in found.items():
        levels.setdefault((round(on_chip, 1), True), []).append(name.upper())
        levels.setdefault((round(l2, 1), False), []).append(name.upper())
    for (level, on_chip), names in levels.items():
        axes.axhline(level, color=MUTED, linewidth=0.7, linestyle="-" if on_chip else ":", zorder=1)
        crowded = any(0 < other - level < 12 for other, _ in levels) and not on_chip
        text = f"{', '.join(names)} {'on chip' if on_chip else 'L2'}, {level:.0f} MB"
        axes.annotate(
            text,
            (2, level),
            (0, -1.5 if crowded else 1.5),
            textcoords="offset points",
            fontsize=5.4,
            color=MUTED,
            va="top" if crowded else "bottom",
        )


def _draw_step(axes: Axes, step: Step | None) -> None:
    axes.set_title("(b) One step of SGLang's default walk", loc="left")
    if step is None:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=MUTED, fontsize=6.5)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    large = [part for part in step.parts if part.time_us.value >= SMALL_US or part.kernel == IDLE]
    small = [part for part in step.parts if part not in large]
    if len(small) == 1:
        large, small = list(step.parts), []
    bars: list[tuple[str, float, Part | None]] = [(_bar_name(part), part.time_us.value, part) for part in large]
    if small:
        launches = sum(part.launches for part in small)
        bars.insert(
            len(bars) - 1, (f"others, {launches:g}×" if launches > 1 else "others", sum(part.time_us.value for part in small), None)
        )
    for place, (name, time_us, part) in enumerate(bars):
        color = FAINT if part is not None and part.kernel == IDLE else look(ARM).color
        axes.barh(-place, time_us, height=0.66, color=color, gid=f"part {name}")
        if part is not None and part.time_us.low == part.time_us.low:
            ends = [[max(0.0, time_us - part.time_us.low)], [max(0.0, part.time_us.high - time_us)]]
            axes.errorbar(time_us, -place, xerr=ends, color=MUTED, elinewidth=0.7, capsize=1.2)
        axes.annotate(f"{time_us:.1f}", (time_us, -place), (4, 0), textcoords="offset points", va="center", fontsize=6)
    axes.axvline(step.floor_us, color=INK, linewidth=0.7, linestyle="--")
    axes.text(step.floor_us, 0.52, f"W2 at HBM's peak: {step.floor_us:.1f} ", fontsize=5.4, color=MUTED, va="bottom", ha="right")
    axes.set_yticks([-place for place in range(len(bars))], [name for name, _, _ in bars], fontsize=6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.2 * max(max(time_us for _, time_us, _ in bars), step.floor_us))
    axes.set_ylim(-len(bars) + 0.4, 0.95)
    axes.set_xlabel("µs a step")


def _bar_name(part: Part) -> str:
    return f"{part.kernel}, {part.launches:g}×" if part.launches > 1 else part.kernel


def _foot(capacity: Run, traced: Run | None, device: str) -> str:
    text = (
        "(a) Lines: registers, shared and tensor memory of all SMs; dotted: L2. Dots: vocabularies of public drafters. B200 and B300 are from data sheets, "
        f"not run on this hardware. Run {capacity.run_id}. "
    )
    if traced is None:
        return f"{text}(b) Not measured: {measure_command(EXPERIMENT, device)}"
    return (
        f"{text}(b) V = 248,320, one request: what 15 steps have more than 7, a step, by kernel, from the profiler under graph replay; bars: 95 % intervals "
        f"over processes. {traced.hardware}, run {traced.run_id}."
    )
