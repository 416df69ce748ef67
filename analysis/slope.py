"""Slope and entry cost of a walk: time = entry + slope * steps, least squares over several lengths.

The slope is what one more step costs; the entry cost is the fitted intercept, i.e. what a call costs before its first step
(launch, staging, and for a resident walk the load of the weights).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.bootstrap import Estimate, bootstrap, mean

CLOCK_BOUND = 0.10  # the two estimates of a slope may differ by this share of the fitted one


@dataclass(frozen=True)
class Fit:
    """A fitted line with 95 % intervals over replicas."""

    slope_us: Estimate  # us per step
    entry_us: Estimate  # us per call
    residual_us: float  # largest distance of a length's mean time from the line: whether a line is adequate
    steps: tuple[int, ...]  # the lengths that were fitted
    replicas: int

    def at(self, steps: NDArray[np.float64] | float) -> NDArray[np.float64] | float:
        """The line's time in us at `steps`."""
        return self.entry_us.value + self.slope_us.value * steps


@dataclass(frozen=True)
class ClockCheck:
    """The in-kernel clocks' estimate of a slope beside the fitted one."""

    step_us: Estimate
    difference: float  # (clocks - fit) / fit
    bound: float

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= self.bound


def medians(samples: pd.DataFrame, **cell: object) -> pd.DataFrame:
    """Median time in us of every replica (rows) at every length (columns), over the valid samples of one cell.

    `cell` fixes columns of the table: `variant="resident", l2="cold", scope="call"`. Flagged samples are left out; see `flagged`.
    """
    kept = _where(samples, cell)
    kept = kept[kept["valid"]]
    return kept.groupby(["replica", "steps"])["time_us"].median().unstack("steps")


def flagged(samples: pd.DataFrame, **cell: object) -> int:
    """How many samples of the cell were flagged (throttled clocks) and are therefore in no median."""
    return int((~_where(samples, cell)["valid"]).sum())


def fit(medians_us: pd.DataFrame) -> Fit:
    """The least-squares line through the points of `medians`, all replicas pooled.

    Raises:
        ValueError: fewer than two lengths, so that there is no line.
    """
    steps = np.array(medians_us.columns, dtype=np.float64)
    if len(steps) < 2:
        raise ValueError(f"a slope needs walks of at least two lengths; got steps {list(medians_us.columns)}.")
    times = medians_us.to_numpy(dtype=np.float64)
    seen = np.isfinite(times)
    x, y = np.where(seen, steps, 0.0), np.where(seen, times, 0.0)
    # A pooled least-squares fit needs these five sums only, and sums over replicas add up: a draw costs one addition a replica.
    sums = np.stack([seen, x, y, x * x, x * y], axis=-1).astype(np.float64).sum(axis=1)
    slope, entry = bootstrap(sums, _slope), bootstrap(sums, _entry)
    residuals = np.nanmean(times, axis=0) - (entry.value + slope.value * steps)
    return Fit(slope, entry, float(np.abs(residuals).max()), tuple(int(step) for step in steps), len(times))


def slopes(medians_us: pd.DataFrame) -> pd.Series:
    """us a step of every replica by itself that has at least two lengths; for differences between arms, replica by replica."""
    whole = {replica: row.dropna() for replica, row in medians_us.iterrows()}
    fitted = {
        replica: np.polyfit(row.index.to_numpy(dtype=np.float64), row.to_numpy(dtype=np.float64), 1)[0]
        for replica, row in whole.items()
        if len(row) > 1
    }
    return pd.Series(fitted, dtype=np.float64)


def step_time(step_clocks: pd.DataFrame, variant: str) -> Estimate:
    """Mean time of a step in us by the SM's own counter, over steps >= 1 (step 0 also waits for the weights)."""
    rows = step_clocks[(step_clocks["variant"] == variant) & (step_clocks["step"] >= 1)]
    if rows.empty:
        raise ValueError(
            f"the table step_clocks has no steps after the first for variant {variant!r}; measure it with the backend option clocks=true."
        )
    launches = rows.groupby(["replica", "steps", "step"])["time_us"].median()
    return bootstrap(launches.groupby("replica").mean().to_numpy(dtype=np.float64), mean)


def check_clocks(fitted: Fit, step_clocks: pd.DataFrame, variant: str, bound: float = CLOCK_BOUND) -> ClockCheck:
    """Whether the in-kernel clocks confirm the fitted slope within `bound`."""
    step_us = step_time(step_clocks, variant)
    return ClockCheck(step_us, (step_us.value - fitted.slope_us.value) / fitted.slope_us.value, bound)


def _where(samples: pd.DataFrame, cell: dict[str, object]) -> pd.DataFrame:
    for column, value in cell.items():
        samples = samples[samples[column] == value]
    return samples


def _slope(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    n, x, y, xx, xy = np.moveaxis(sums.sum(axis=1), -1, 0)
    return (n * xy - x * y) / (n * xx - x * x)


def _entry(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    n, x, y, _, _ = np.moveaxis(sums.sum(axis=1), -1, 0)
    return (y - _slope(sums) * x) / n
