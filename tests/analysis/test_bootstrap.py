from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from analysis.bootstrap import bootstrap, mean, median, median_ratio


def test_the_interval_equals_a_resampling_written_out_by_hand() -> None:
    values = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    rng = np.random.default_rng(7)
    draws = [np.mean(values[picked]) for picked in rng.integers(5, size=(500, 5))]
    estimate = bootstrap(values, mean, draws=500, seed=7, level=0.9)
    assert estimate.value == pytest.approx(6.2)
    assert (estimate.low, estimate.high) == pytest.approx(np.quantile(draws, [0.05, 0.95]))


def test_the_interval_of_a_mean_has_the_width_of_the_normal_one() -> None:
    values = np.random.default_rng(0).normal(10, 2, size=400)
    estimate = bootstrap(values, mean)
    expected = 2 * 1.96 * values.std() / np.sqrt(400)
    assert estimate.high - estimate.low == pytest.approx(expected, rel=0.05)


def test_replicas_are_the_unit_so_more_samples_of_one_process_do_not_narrow_it() -> None:
    offsets = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    few = bootstrap(np.median(offsets[:, None] + np.zeros((5, 3)), axis=1), median)
    many = bootstrap(np.median(offsets[:, None] + np.zeros((5, 3000)), axis=1), median)
    assert few == many
    assert few.high - few.low >= 2


def test_a_ratio_is_paired_and_takes_the_fastest_other_arm() -> None:
    ours = np.array([10.0, 20.0, 40.0])
    values = np.stack([ours, 3 * ours, 2 * ours], axis=1)
    estimate = bootstrap(values, median_ratio)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((2, 2, 2))


def test_one_replica_gives_a_value_and_no_interval() -> None:
    estimate = bootstrap(np.array([3.0]), median)
    assert estimate.value == 3
    assert np.isnan(estimate.low)
    assert f"{estimate:.1f}" == "3.0"


def test_nothing_and_nan_are_refused() -> None:
    for values in (np.array([]), np.array([1.0, np.nan])):
        with pytest.raises(ValueError, match="at least one replica and finite values"):
            bootstrap(values, median)


@settings(max_examples=20, deadline=None)
@given(arrays(np.float64, st.integers(2, 8), elements=st.floats(1, 1000)))
def test_an_interval_lies_within_the_replicas_and_shifts_with_them(values: np.ndarray) -> None:
    estimate = bootstrap(values, median, draws=200)
    assert values.min() <= estimate.low <= estimate.high <= values.max()
    moved = bootstrap(values + 5, median, draws=200)
    assert (moved.value, moved.low, moved.high) == pytest.approx((estimate.value + 5, estimate.low + 5, estimate.high + 5))
