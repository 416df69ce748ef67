"""Paired cluster bootstrap of a ratio of sums: how far one arm is from another where both ran the same prompts.

Rounds of one prompt are alike, in both arms and in every pass. So a prompt is drawn whole, with all its rounds, passes and arms; rounds drawn
one by one would give intervals that are too narrow. Percentile intervals, from the same draws as `scipy.stats.bootstrap(paired=True)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analysis.bootstrap import DRAWS, LEVEL, SEED, Estimate, percentiles, resample

NARROW = 0.90  # the level of the interval that an equivalence test at 5 % looks at


@dataclass(frozen=True)
class RatioChange:
    """The ratio of sums of one arm over that of the other, less one, in %.

    wide, narrow:   the same value with its interval at LEVEL and at NARROW
    standard_error: of the value, in %: the spread over draws. Like the ends of both intervals it is NaN where there is one cluster
    clusters:       how many there are
    """

    wide: Estimate
    narrow: Estimate
    standard_error: float
    clusters: int

    @property
    def value(self) -> float:
        return self.wide.value


def ratio_change(
    ours: NDArray[np.float64], default: NDArray[np.float64], *, draws: int = DRAWS, seed: int = SEED, level: float = LEVEL
) -> RatioChange:
    """How far sum(tokens) / sum(rounds) of `ours` lies from that of `default`.

    Args:
        ours, default: [clusters, 2], the tokens and the rounds of every cluster, summed over all that is drawn together. Row i of both is
            the same cluster.
        level: coverage of the wide interval.

    Raises:
        ValueError: shapes that do not pair, no cluster, counts that are not finite, or an arm without tokens or rounds in some cluster.
    """
    if ours.shape != default.shape or ours.shape[1:] != (2,) or not len(ours):
        raise ValueError(f"paired clusters need two arrays [clusters, 2] of one length, at least 1; got {ours.shape} and {default.shape}")
    sums = np.concatenate([ours, default], axis=1).astype(np.float64)
    if not (np.isfinite(sums).all() and (sums > 0).all()):
        bad = int(np.argmin((np.isfinite(sums) & (sums > 0)).all(axis=1)))
        raise ValueError(f"every cluster needs finite tokens and rounds above 0 in both arms; cluster {bad} has {sums[bad].tolist()}")
    value = float(_change(sums[None])[0])
    if len(sums) == 1:
        nothing = Estimate(value, float("nan"), float("nan"))
        return RatioChange(nothing, nothing, float("nan"), 1)
    drawn = resample(sums, _change, draws=draws, seed=seed)
    wide, narrow = (Estimate(value, *percentiles(drawn, each)) for each in (level, NARROW))
    return RatioChange(wide, narrow, float(drawn.std(ddof=1)), len(sums))


def _change(drawn: NDArray[np.float64]) -> NDArray[np.float64]:
    """[draws, clusters, 4] tokens and rounds of ours, then of the default, to [draws] in %."""
    tokens, rounds, default_tokens, default_rounds = drawn.sum(axis=1).T
    return 100 * (tokens / rounds / (default_tokens / default_rounds) - 1)
