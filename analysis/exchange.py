"""What agreeing on one token costs: us a step by protocol and number of CTAs, and the price of what the PTX memory model promises."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.bootstrap import Estimate, bootstrap, mean
from analysis.load import Run
from analysis.slope import Fit, fit, flagged, medians, slopes

CHOSEN = "pair"  # the protocol of the walks
L2 = "cold"  # as everywhere: a walk starts with its exchange's lines in HBM


@dataclass(frozen=True)
class Gap:
    """Probes of a protocol on some number of CTAs that were not timed: how many, and why the first was not."""

    protocol: str
    ctas: int
    failed: int
    asked: int
    status: str
    reason: str

    @property
    def whole(self) -> bool:
        """Whether nothing was timed."""
        return self.failed == self.asked


@dataclass(frozen=True)
class Price:
    """What the cheapest protocol that PTX promises costs more than the chosen one."""

    protocol: str
    ctas: int
    extra_us: Estimate  # us a step
    share: float  # of the chosen one's step


def protocols(run: Run) -> dict[str, bool]:
    """Every protocol that was asked for, in that order, and whether the PTX memory model promises that it works."""
    cells = run.table("exchange_cells")
    promised = {str(name): bool(rows["promised"].iloc[0]) for name, rows in cells.groupby("protocol", sort=False)}
    return {name: promised[name] for name in (*run.manifest["protocol"].get("protocols", {}), *promised) if name in promised}


def counts(run: Run) -> list[int]:
    """The numbers of CTAs, rising."""
    return sorted(int(ctas) for ctas in run.table("exchange_cells")["ctas"].unique())


def costs(run: Run, l2: str = L2) -> dict[tuple[str, int], Fit]:
    """The line of every protocol on every number of CTAs that has at least two timed lengths; its slope is us a step."""
    points = {(name, ctas): _medians(run, name, ctas, l2) for name in protocols(run) for ctas in counts(run)}
    return {key: fit(times) for key, times in points.items() if len(times.columns) > 1}


def by_clocks(run: Run) -> dict[tuple[str, int], Estimate]:
    """us a step by the stamps in the kernel: a second account that knows of no launch and no event."""
    rows = run.tables.get("exchange_clocks", pd.DataFrame())
    if rows.empty:
        return {}
    times = rows.set_index(["protocol", "ctas"])["time_us"]
    keys = [(name, ctas) for name in protocols(run) for ctas in counts(run) if (name, ctas) in times.index]
    return {key: bootstrap(times.loc[[key]].to_numpy(dtype=np.float64), mean) for key in keys}


def gaps(run: Run) -> list[Gap]:
    """What was asked for and has no time."""
    cells = run.table("exchange_cells")
    found = []
    for name in protocols(run):
        for ctas in counts(run):
            rows = cells[(cells["protocol"] == name) & (cells["ctas"] == ctas)]
            failed = rows[rows["status"] != "ok"]
            if len(failed):
                found.append(Gap(name, ctas, len(failed), len(rows), str(failed["status"].iloc[0]), str(failed["reason"].iloc[0])))
    return found


def price(run: Run, ctas: int, l2: str = L2) -> Price | None:
    """The cheapest promised protocol against the chosen one, replica by replica; None where one of the two was not timed."""
    by_replica = {name: slopes(_medians(run, name, ctas, l2)) for name in protocols(run)}
    safe = [name for name, promised in protocols(run).items() if promised and len(by_replica[name])]
    chosen = by_replica.get(CHOSEN, pd.Series(dtype=float))
    if not safe or chosen.empty:
        return None
    cheapest = min(safe, key=lambda name: by_replica[name].mean())
    extra = (by_replica[cheapest] - chosen).dropna().to_numpy(dtype=np.float64)
    if not len(extra):
        return None
    return Price(cheapest, ctas, bootstrap(extra, mean), float(extra.mean() / chosen.mean()))


def exchange_table(run: Run) -> str:
    """Markdown: us a step with 95 % intervals, what each protocol leans on, and the price of not leaning on anything."""
    fits, clocks, grids = costs(run), by_clocks(run), counts(run)
    untimed = {(gap.protocol, gap.ctas): gap.status for gap in gaps(run) if gap.whole}
    most = grids[-1]
    heads = ["protocol", "PTX promises it", *(f"µs/step, {ctas} CTAs" for ctas in grids), f"in the kernel, {most} CTAs", "flagged samples"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, promised in protocols(run).items():
        cells = [f"{fits[name, ctas].slope_us:.2f}" if (name, ctas) in fits else untimed.get((name, ctas), "") for ctas in grids]
        clock = f"{clocks[name, most]:.2f}" if (name, most) in clocks else ""
        out = flagged(run.table("exchange"), protocol=name, l2=L2)
        lines.append(f"| {' | '.join([name, 'yes' if promised else 'no', *cells, clock, str(out)])} |")
    return "\n".join([*lines, "", *_sentences(run)])


def _sentences(run: Run) -> list[str]:
    described = run.manifest["protocol"].get("protocols", {})
    reasons = [
        f"- {gap.protocol} among {gap.ctas} CTAs, {gap.failed} of {gap.asked} probes {gap.status}: {gap.reason}" for gap in gaps(run)
    ]
    paid = price(run, counts(run)[-1])
    if paid is None:
        return reasons
    leans = described.get(CHOSEN, {}).get("leans_on") or "nothing beyond the PTX memory model"
    return [
        f"- The walks use {CHOSEN}. It leans on {leans}.",
        f"- The cheapest protocol that PTX promises is {paid.protocol}: {paid.extra_us:.2f} µs/step more among {paid.ctas} CTAs "
        f"({100 * paid.share:+.0f} %).",
        *reasons,
    ]


def _medians(run: Run, name: str, ctas: int, l2: str) -> pd.DataFrame:
    return medians(run.table("exchange"), protocol=name, ctas=ctas, l2=l2, scope="call")
