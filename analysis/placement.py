"""Where the resident walk keeps its tiles, what that costs, and what the planner expected: one split of W2 after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from analysis.fits import fit_run
from analysis.load import Run
from analysis.slope import Fit

EXPERIMENT = "placement"


@dataclass(frozen=True)
class Split:
    """One way to divide the tiles of a CTA, 16 rows each, and its cost.

    registers, spill_bytes: of a thread, as the compiler reports them; smem_bytes: of a CTA
    expected_*:             of the cost model, None where it has no answer
    measured:               None where nothing, or only one length, was timed
    gaps:                   why walks, or the expectation, are missing; one line each
    """

    variant: str
    register_tiles: int
    shared_tiles: int
    streamed_tiles: int
    registers: int
    spill_bytes: int
    smem_bytes: int
    expected_entry_us: float | None
    expected_step_us: float | None
    measured: Fit | None
    gaps: tuple[str, ...]

    @property
    def tiles(self) -> int:
        """All tiles of a CTA; 0 where there is no plan."""
        return self.register_tiles + self.shared_tiles + self.streamed_tiles

    @property
    def spills(self) -> bool:
        return self.spill_bytes > 0


def splits(run: Run, *, l2: str = "cold", scope: str = "call") -> list[Split]:
    """Every variant of a placement run, by its tiles in registers."""
    fits, cells = fit_run(run, l2=l2, scope=scope), run.table("cells")
    plans = run.table("plans").sort_values(["register_tiles", "shared_tiles"], kind="stable")
    return [_split(plan, fits.get(plan["variant"]), cells[cells["variant"] == plan["variant"]]) for _, plan in plans.iterrows()]


def placement_table(found: Sequence[Split]) -> str:
    """A Markdown table: the split of every variant, its kernel, and its fitted beside its expected cost (complete calls, cold L2)."""
    rows = [
        "| tiles in registers / shared / streamed | registers a thread | spilled, B a thread | shared memory, KB | step, µs | expected | entry, µs | expected |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for split in found:
        if not split.tiles:
            rows.append(f"| {split.variant}: {'; '.join(split.gaps)} | | | | | | | |")
            continue
        fit = split.measured
        step, entry = (f"{fit.slope_us:.2f}", f"{fit.entry_us:.1f}") if fit else ("; ".join(split.gaps), "")
        rows.append(
            f"| {split.register_tiles} / {split.shared_tiles} / {split.streamed_tiles} | {split.registers} | {split.spill_bytes} "
            f"| {split.smem_bytes / 1024:.0f} | {step} | {_shown(split.expected_step_us, 2)} | {entry} | {_shown(split.expected_entry_us, 1)} |"
        )
    return "\n".join(rows)


def _split(plan: pd.Series, fit: Fit | None, cells: pd.DataFrame) -> Split:
    priced = not plan["unpriced"]
    failed = cells[cells["status"] != "ok"]
    gaps = []
    if len(failed):
        first = failed.iloc[0]
        gaps.append(f"{len(failed)} of {len(cells)} walks failed ({first['status']}: {first['reason']})")
    elif plan["reason"]:
        gaps.append(str(plan["reason"]))
    if not priced and plan["unpriced"] != plan["reason"]:
        gaps.append(f"no expected cost: {plan['unpriced']}")
    counts = {
        name: int(plan[name]) for name in ("register_tiles", "shared_tiles", "streamed_tiles", "registers", "spill_bytes", "smem_bytes")
    }
    return Split(
        variant=str(plan["variant"]),
        **counts,
        expected_entry_us=float(plan["entry_us"]) if priced else None,
        expected_step_us=float(plan["step_us"]) if priced else None,
        measured=fit,
        gaps=tuple(gaps),
    )


def _shown(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
