"""Figure 1: the memory tiers of a GPU, and where a resident walk keeps W2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.load import MissingResults, measure_command, newest_run
from figures.style import FAINT, INK, MUTED, PAGE_IN, TIERS, look, note

HEAD = "markov_v152k"
DEVICES = ("h200", "b200")
ON_CHIP = ("registers", "shared_memory", "tensor_memory")
WEIGHT_BYTES = {"int8": 1, "bf16": 2}
RESIDENT = look("resident").color
HOME = "#f2c9a1"  # where the weights are stored and loaded from, once a walk


@dataclass(frozen=True)
class Tier:
    """One memory of one device, all its SMs together."""

    name: str
    capacity_mb: float  # 1e6 bytes
    used_mb: float
    reason: str


def draw(results: Path, device: str) -> Figure:
    """The figure from the newest placement run; it shows the devices of DEVICES whatever machine planned them."""
    run = newest_run(results, "capacity")
    rows = run.table("placement")
    panels = {name: tiers(rows, name) for name in DEVICES}
    absent = [name for name, of_device in panels.items() if not of_device]
    if absent:
        raise MissingResults(f"run {run.run_id} plans no {HEAD} on {', '.join(absent)}", measure_command("capacity", "cpu"))
    vocab, rank = _size(rows)
    figure = plt.figure(figsize=(PAGE_IN, 2.15))
    foot = note(figure, _foot(vocab, rank, panels, run.run_id))
    limit = 1.3 * max(tier.capacity_mb for of_device in panels.values() for tier in of_device if tier.name != "hbm")
    for place, (name, of_device) in enumerate(panels.items()):
        axes = figure.add_axes((0.12 + 0.485 * place, foot + 0.16, 0.375, 0.73 - foot))
        _draw_device(axes, name, of_device, limit, vocab * rank)
    return figure


def tiers(placement: pd.DataFrame, device: str) -> list[Tier]:
    """The tiers of `device` that exist, nearest to the cores first."""
    rows = placement[(placement["device"] == device) & (placement["head"] == HEAD)].set_index("tier")
    capacity_bytes, used_bytes = (rows[column].astype(int).to_dict() for column in ("capacity_bytes", "used_bytes"))
    present = [name for name in TIERS if capacity_bytes.get(name, 0) > 0]
    return [Tier(name, capacity_bytes[name] / 1e6, used_bytes[name] / 1e6, str(rows["reason"][name])) for name in present]


def _draw_device(axes: Axes, name: str, of_device: list[Tier], limit: float, weights: int) -> None:
    """Bars on one linear axis, capacities as outlines and W2 as fills; HBM, a thousand times larger, is torn off."""
    for place, tier in enumerate(of_device):
        beyond = tier.capacity_mb > limit
        shown = 0.9 * limit if beyond else tier.capacity_mb
        axes.barh(-place, shown, height=0.62, color="white", edgecolor=MUTED, linewidth=0.7, gid=f"capacity {tier.name}")
        fill = RESIDENT if tier.name in ON_CHIP else HOME
        axes.barh(-place, tier.used_mb, height=0.62, color=fill, gid=f"used {tier.name}")
        if beyond:
            _tear(axes, 0.8 * limit, -place, limit)
        axes.text(shown + 0.015 * limit, -place, _label(tier, limit), va="center", fontsize=6.2)
        if _fits_inside(tier, limit):
            color = "white" if tier.name in ON_CHIP else INK
            axes.text(tier.used_mb / 2, -place, f"{tier.used_mb:.1f}", va="center", ha="center", fontsize=5.8, color=color)
    axes.set_title(_title(name, of_device, weights), loc="left")
    axes.set_yticks([-place for place in range(len(of_device))], [TIERS[tier.name] for tier in of_device])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, limit)
    axes.set_ylim(-len(of_device) + 0.45, 0.55)
    axes.set_xlabel("MB")
    axes.set_axisbelow(True)
    axes.xaxis.grid(True, color=FAINT, linewidth=0.4)


def _tear(axes: Axes, x: float, y: float, limit: float) -> None:
    """A gap in a bar that goes on beyond the axis."""
    slant = 0.012 * limit
    for offset in (0.0, 0.02 * limit):
        axes.plot((x + offset - slant, x + offset + slant), (y - 0.42, y + 0.42), color=INK, linewidth=0.8, clip_on=False, zorder=4)
    axes.fill_between((x - slant, x + slant + 0.02 * limit), y - 0.36, y + 0.36, color="white", zorder=3, linewidth=0)


def _title(name: str, of_device: list[Tier], weights: int) -> str:
    """What is kept on chip, or what would be: the widest weights that fit, on a device that the planner does not place."""
    chip_mb = sum(tier.capacity_mb for tier in of_device if tier.name in ON_CHIP)
    used_mb = sum(tier.used_mb for tier in of_device if tier.name in ON_CHIP)
    limit_mb = used_mb or chip_mb
    fitting = [(size * weights / 1e6, dtype) for dtype, size in WEIGHT_BYTES.items() if size * weights / 1e6 <= limit_mb]
    if not fitting:
        return f"{name.upper()}: W2 does not fit {chip_mb:.1f} MB on chip"
    size_mb, dtype = max(fitting)
    return f"{name.upper()}{'' if used_mb else ', not run'}: {dtype} W2, {size_mb:.1f} of {chip_mb:.1f} MB on chip"


def _label(tier: Tier, limit: float) -> str:
    """The capacity, and what is used of it where the fill has no room for the number."""
    size = f"{tier.capacity_mb / 1e3:.0f} GB" if tier.capacity_mb >= 1e3 else f"{tier.capacity_mb:.1f} MB"
    return f"{size}, {tier.used_mb:.1f} used" if tier.used_mb and not _fits_inside(tier, limit) else size


def _fits_inside(tier: Tier, limit: float) -> bool:
    return tier.used_mb > 0.065 * limit


def _size(rows: pd.DataFrame) -> tuple[int, int]:
    head = rows[rows["head"] == HEAD]
    return int(head["vocab"].iloc[0]), int(head["rank"].iloc[0])


def _foot(vocab: int, rank: int, panels: dict[str, list[Tier]], run_id: str) -> str:
    text = (
        f"W2 of V = {vocab:,}, r = {rank}; MB of the whole GPU. Outlines: capacities. Filled: what a resident walk keeps on chip as the planner places it, "
        f"W2 and buffers (bright), loaded once a walk from the head's weights in HBM (pale). SMs exchange one {{key, count}} pair a step through L2. "
        f"HBM is drawn torn. Run {run_id}."
    )
    reasons = {name: next((tier.reason for tier in of_device if tier.reason), "") for name, of_device in panels.items()}
    return "\n".join([text, *(f"{name.upper()}: {reason}" for name, reason in reasons.items() if reason)])
