from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.fits import clock_checks, fit_run, slopes_table
from analysis.load import newest_run
from analysis.roofline import floor_us, roofline
from analysis.slope import check_clocks, fit, flagged, medians, step_time
from tests.data.make_runs import TRUTH, step_slope_tables


def test_every_known_line_is_given_back(results: Path) -> None:
    fits = fit_run(newest_run(results, "step_slope", "h200"))
    assert list(fits) == list(TRUTH)
    for variant, (entry, slope) in TRUTH.items():
        fitted = fits[variant]
        assert fitted.slope_us.value == pytest.approx(slope, abs=0.03)
        assert fitted.entry_us.value == pytest.approx(entry, abs=0.5)
        assert fitted.slope_us.low <= fitted.slope_us.value <= fitted.slope_us.high
        assert 0 < fitted.slope_us.high - fitted.slope_us.low < 0.1
        assert fitted.steps == (1, 2, 4, 7, 10, 13, 16)
        assert fitted.replicas == 5


def test_cold_and_hot_and_call_and_kernel_are_different_measurements(results: Path) -> None:
    run = newest_run(results, "step_slope", "h200")
    cold, hot, kernel = fit_run(run)["resident"], fit_run(run, l2="hot")["resident"], fit_run(run, scope="kernel")["resident"]
    assert cold.entry_us.value - hot.entry_us.value == pytest.approx(4, abs=0.3)
    assert cold.entry_us.value - kernel.entry_us.value == pytest.approx(3, abs=0.3)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.floats(1, 100), min_size=4, max_size=4), min_size=1, max_size=6))
def test_the_fit_is_numpys_least_squares_over_all_points(times: list[list[float]]) -> None:
    steps = [1, 4, 7, 16]
    fitted = fit(pd.DataFrame(times, columns=steps))
    slope, entry = np.polyfit(np.tile(steps, len(times)), np.ravel(times), 1)
    assert (fitted.slope_us.value, fitted.entry_us.value) == pytest.approx((slope, entry), abs=1e-6)


def test_a_replica_that_misses_a_length_still_counts_with_the_others() -> None:
    times = pd.DataFrame([[3.0, 5.0, 9.0], [3.5, np.nan, 9.5]], columns=[1, 2, 4])
    slope, entry = np.polyfit([1, 2, 4, 1, 4], [3.0, 5.0, 9.0, 3.5, 9.5], 1)
    fitted = fit(times)
    assert (fitted.slope_us.value, fitted.entry_us.value) == pytest.approx((slope, entry))


def test_the_residual_says_that_a_curve_is_no_line() -> None:
    steps = np.array([1, 2, 4, 8, 16])
    straight = fit(pd.DataFrame([2.0 + 3.0 * steps], columns=steps))
    bent = fit(pd.DataFrame([2.0 + 3.0 * steps + 10.0 * (steps == 16)], columns=steps))
    assert straight.residual_us < 1e-9
    assert bent.residual_us > 1


def test_one_length_is_no_slope() -> None:
    with pytest.raises(ValueError, match=r"at least two lengths; got steps \[4\]"):
        fit(pd.DataFrame([[3.0]], columns=[4]))


def test_medians_are_per_replica_and_leave_out_flagged_samples() -> None:
    samples = pd.DataFrame(
        {
            "variant": "a",
            "replica": [0, 0, 0, 0, 1],
            "steps": 4,
            "time_us": [1.0, 2.0, 9.0, 500.0, 7.0],
            "valid": [True, True, True, False, True],
        }
    )
    assert medians(samples, variant="a")[4].to_dict() == {0: 2.0, 1: 7.0}
    assert flagged(samples, variant="a") == 1


def test_the_clocks_confirm_a_slope_within_the_bound_only(results: Path) -> None:
    run = newest_run(results, "step_slope", "h200")
    check = clock_checks(run, fit_run(run))["resident"]
    assert check.difference == pytest.approx(0.03, abs=0.01)
    assert check.agrees
    assert check.bound == 0.10
    fitted = fit_run(run)["resident"]
    off = run.table("step_clocks").assign(time_us=lambda rows: rows["time_us"] * 1.12)
    assert not check_clocks(fitted, off, "resident").agrees
    assert not check_clocks(fitted, run.table("step_clocks"), "resident", bound=0.01).agrees


def test_the_first_step_waits_for_the_weights_and_is_not_counted() -> None:
    clocks = step_slope_tables({"resident": (15.0, 2.0)})["step_clocks"]
    assert step_time(clocks, "resident").value == pytest.approx(2.06, abs=0.01)
    with pytest.raises(ValueError, match="clocks=true"):
        step_time(clocks, "streaming_int8")


def test_floors_are_bytes_over_bandwidth(results: Path) -> None:
    assert floor_us(38_895_616, 4800.0) == pytest.approx(8.103, abs=0.001)
    run = newest_run(results, "step_slope", "h200")
    table = roofline(run, fit_run(run)).set_index("variant")
    assert set(table.index) == {"resident", "streaming_int8", "streaming_bf16"}
    assert table["step_floor_us"]["streaming_bf16"] == pytest.approx(16.21, abs=0.01)
    assert table["entry_floor_us"]["resident"] == pytest.approx(8.23, abs=0.01)
    assert table["fits_l2"].to_dict() == {"resident": True, "streaming_int8": True, "streaming_bf16": False}


def test_the_slopes_table_shows_every_variant_and_the_second_estimate(results: Path) -> None:
    lines = slopes_table(newest_run(results, "step_slope", "h200")).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == list(TRUTH)
    assert "agrees" in lines[-1]
    assert "bound 10%" in lines[-1]
