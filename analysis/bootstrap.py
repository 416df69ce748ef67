"""Percentile bootstrap with the replica (a fresh process) as the unit of resampling.

Samples of one process share its memory layout and clocks, so they are not independent; processes are. A statistic is therefore
recomputed over whole replicas drawn with replacement. With five replicas such intervals are somewhat too narrow: read them as spread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 10_000
SEED = 0
LEVEL = 0.95
HELD = 4_000_000  # drawn numbers in memory at once, 32 MB


@dataclass(frozen=True)
class Estimate:
    """A value with its interval, all in the value's unit. The ends are NaN where one replica allows no interval."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """`f"{estimate:.1f}"` gives `2.5 [2.4, 2.6]`."""
        if np.isnan(self.low):
            return format(self.value, spec)
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def bootstrap(values: NDArray[np.float64], statistic: Statistic, *, draws: int = DRAWS, seed: int = SEED, level: float = LEVEL) -> Estimate:
    """`statistic` of `values` with its percentile interval over replicas.

    Args:
        values: [replicas, ...], one entry a replica.
        statistic: maps [draws, replicas, ...] to [draws]; it sees many draws at once.
        level: coverage of the interval.

    Raises:
        ValueError: no replica, or a value that is not finite.
    """
    if not len(values) or not np.isfinite(values).all():
        raise ValueError(f"a bootstrap needs at least one replica and finite values; got {np.array2string(values, threshold=20)}")
    value = float(statistic(values[None])[0])
    if len(values) == 1:
        return Estimate(value, float("nan"), float("nan"))
    return Estimate(value, *percentiles(resample(values, statistic, draws=draws, seed=seed), level))


def resample(values: NDArray[np.float64], statistic: Statistic, *, draws: int = DRAWS, seed: int = SEED) -> NDArray[np.float64]:
    """[draws] `statistic` over `values` drawn with replacement along their first axis, some draws at a time so that memory is bounded.

    The draws are those of `scipy.stats.bootstrap` (scipy 1.17, one sample or paired ones) with `rng=np.random.default_rng(seed)`.
    """
    rng, size = np.random.default_rng(seed), len(values)
    together = max(1, HELD // values.size)
    parts = [min(together, draws - start) for start in range(0, draws, together)]
    return np.concatenate([statistic(values[rng.integers(size, size=(part, size))]) for part in parts])


def percentiles(drawn: NDArray[np.float64], level: float = LEVEL) -> tuple[float, float]:
    """The ends of the percentile interval of `drawn` [draws] that covers `level`."""
    tail = (1 - level) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return float(low), float(high)


def median(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median over replicas: [draws, replicas] to [draws]."""
    return np.median(values, axis=1)


def mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean over replicas: [draws, replicas] to [draws]."""
    return values.mean(axis=1)


def median_ratio(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The best of the other arms over the first: [draws, replicas, 1 + others] to [draws].

    Each arm is its median over the same drawn replicas, so what slowed one process slows both sides of the ratio.
    """
    arms = np.median(values, axis=1)
    return arms[:, 1:].min(axis=1) / arms[:, 0]
