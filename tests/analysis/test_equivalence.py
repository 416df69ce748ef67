from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from scipy import stats

from analysis.bootstrap import Estimate
from analysis.clusters import RatioChange, ratio_change
from analysis.equivalence import ALPHA, Equivalence, clusters_needed, equivalence

NAN = float("nan")
NORMAL = NormalDist()


def _change(value: float, narrow: tuple[float, float], wide: tuple[float, float], error: float = 0.1, clusters: int = 605) -> RatioChange:
    return RatioChange(Estimate(value, *wide), Estimate(value, *narrow), error, clusters)


@pytest.mark.parametrize(
    ("value", "narrow", "wide", "expected"),
    [
        (0.0, (-0.3, 0.3), (-0.4, 0.4), Equivalence.EQUIVALENT),
        (0.2, (0.0, 0.49), (-0.1, 0.6), Equivalence.EQUIVALENT),  # only the 95 % interval leaves the margin
        (0.2, (0.1, 0.3), (0.05, 0.35), Equivalence.EQUIVALENT),  # different from 0 and too little to matter
        (0.3, (-0.1, 0.5), (-0.2, 0.6), Equivalence.UNDECIDED),  # it must lie inside, not reach the edge
        (0.0, (-0.5, 0.3), (-0.6, 0.4), Equivalence.UNDECIDED),
        (0.1, (-3.0, 3.2), (-4.0, 4.2), Equivalence.UNDECIDED),  # covers 0, and everything else
        (0.7, (0.1, 1.3), (-0.1, 1.5), Equivalence.UNDECIDED),  # only the 90 % interval leaves out 0
        (0.7, (0.2, 1.2), (0.1, 1.3), Equivalence.DIFFERENT),
        (-0.7, (-1.2, -0.2), (-1.3, -0.1), Equivalence.DIFFERENT),
        (0.0, (NAN, NAN), (NAN, NAN), Equivalence.UNDECIDED),
    ],
)
def test_the_verdict_follows_both_intervals(
    value: float, narrow: tuple[float, float], wide: tuple[float, float], expected: Equivalence
) -> None:
    assert equivalence(_change(value, narrow, wide), 0.5) == expected


def test_the_papers_own_intervals() -> None:
    """With normal errors its greedy changes are equivalent, and at T = 1 undecided; none is a difference."""
    expected = {(-0.09, -0.36, 0.17): "equivalent", (0.11, -0.39, 0.62): "undecided", (0.09, -0.34, 0.50): "equivalent", (0.47, -0.20, 1.07): "undecided"}  # fmt: skip
    for (value, low, high), verdict in expected.items():
        error = (high - low) / 2 / NORMAL.inv_cdf(0.975)
        reach = error * NORMAL.inv_cdf(1 - ALPHA)
        assert equivalence(_change(value, (value - reach, value + reach), (low, high)), 0.5) == verdict


def test_it_is_two_one_sided_tests() -> None:
    """Of changes just at the margin, where nothing is equivalent, it calls at most 5 % so: scipy's t test of each side agrees."""
    rng, called = np.random.default_rng(0), 0
    for seed in range(300):
        tokens = 3000 * (1.005 + 0.03 * rng.standard_normal(200))
        ours, default = (np.stack([each, np.full(200, 1000.0)], axis=1) for each in (tokens, np.full(200, 3000.0)))
        found = equivalence(ratio_change(ours, default, draws=600, seed=seed), 0.5)
        shares = 100 * (tokens / 3000 - 1)
        sides = [stats.ttest_1samp(shares, -0.5, alternative="greater"), stats.ttest_1samp(shares, 0.5, alternative="less")]
        worst = max(float(np.asarray(side)[1]) for side in sides)
        called += found == Equivalence.EQUIVALENT
        if not 0.03 < worst < 0.08:  # the draws decide near the edge
            assert (found == Equivalence.EQUIVALENT) == (worst < 0.05), seed
    assert 0.02 <= called / 300 <= 0.085


def test_so_many_clusters_would_put_the_interval_into_the_margin() -> None:
    error, clusters = 0.4, 605
    needed = clusters_needed(_change(0.1, (-0.56, 0.76), (-0.7, 0.9), error, clusters), 0.5)
    reach = NORMAL.inv_cdf(0.95) * error * math.sqrt(clusters / needed)
    assert 0.1 + reach <= 0.5
    one_less = NORMAL.inv_cdf(0.95) * error * math.sqrt(clusters / (needed - 1))
    assert 0.1 + one_less > 0.5
    assert needed == clusters_needed(_change(-0.1, (-0.76, 0.56), (-0.9, 0.7), error, clusters), 0.5)


@pytest.mark.parametrize(("value", "error", "needed"), [(0.5, 0.1, math.inf), (-0.8, 0.1, math.inf), (0.0, NAN, math.inf), (0.0, 0.0, 1)])
def test_where_no_number_or_one_would_do(value: float, error: float, needed: float) -> None:
    assert clusters_needed(_change(value, (value, value), (value, value), error), 0.5) == needed


@pytest.mark.parametrize("margin", [0.0, -0.5, NAN])
def test_a_margin_is_above_0(margin: float) -> None:
    for judge in (equivalence, clusters_needed):
        with pytest.raises(ValueError, match="margin is above 0"):
            judge(_change(0.0, (-1, 1), (-1, 1)), margin)
