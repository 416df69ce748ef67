"""The replay: its rows are the measured times of what was chosen, and what it chose is what the streams deserve."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import pytest

from experiments.dispatch_replay import dispatched, measured_cost
from experiments.outcome import Row
from experiments.record import schema

SETS = 60
BASE, AGAIN, SEARCHED = 15.0, 1.5, 8.0


def _rows(counts: list[tuple[int, int]], **cell: object) -> list[Row]:
    of = {"device": "h200", "head": "h", "vocab": 5000, "rank": 256, "steps": 7, "batch": 1, "temperature": 0.0, "l2": "cold"} | cell
    arms = []
    for number, (again, searched) in enumerate(counts):
        certified = {"time_us": BASE + AGAIN * again + SEARCHED * searched, "again": again, "searched": searched}
        serial = {"again": -1, "searched": -1}
        of_set = of | {"set": number, "order": 0, "clock_mhz": 1975.0, "valid": True}
        arms += [
            of_set | {"backend": "certified_sm80", "variant": "certified_sm80"} | certified,
            of_set | {"backend": "sglang_folded", "variant": "sglang_folded", "time_us": 280.0} | serial,
            of_set | {"backend": "resident_sm90", "variant": "resident", "time_us": 28.0 + number % 2} | serial,
        ]
    return arms


GOOD, BAD = [(number % 2, 0) for number in range(SETS)], [(7, 7)] * SETS


def test_rows_are_those_of_the_schema_in_the_order_of_the_sets() -> None:
    found = dispatched(_rows(GOOD)[::-1], passes=2)
    assert {*found[0], "run_id"} == set(schema()["tables"]["certified_dispatch"])
    assert [(row["pass"], row["set"]) for row in found] == [(number, place) for number in range(2) for place in range(SETS)]


def test_good_sets_are_certified_and_bad_ones_hardly_ever() -> None:
    good, bad = dispatched(_rows(GOOD)), dispatched(_rows(BAD), passes=20)
    assert {row["choice"] for row in good} == {"certified"}
    assert all(row["time_us"] == row["certified_us"] == BASE + AGAIN * (row["set"] % 2) for row in good)
    assert {row["serial"] for row in bad} == {"resident"}
    assert all(row["time_us"] == (row["certified_us"] if row["choice"] == "certified" else row["serial_us"]) for row in bad)
    assert fmean(row["time_us"] for row in bad) < 1.05 * fmean(row["serial_us"] for row in bad)
    tried = [place for place, row in enumerate(bad) if row["choice"] == "certified"]
    assert len(tried) > 4, "it goes on trying"
    gaps = [later - former for former, later in pairwise(tried)][3:]
    assert gaps == sorted(gaps)


def test_what_is_told_late_is_learnt_late() -> None:
    firsts = []
    for late in (0, 5):
        choices = [row["choice"] for row in dispatched(_rows(BAD), late=late)]
        firsts.append(choices.index("serial"))
    assert firsts[1] == firsts[0] + 5


def test_cells_and_l2_states_are_apart() -> None:
    rows = [*_rows(GOOD), *_rows(BAD, l2="hot"), *_rows(BAD, temperature=1.0)]
    found = dispatched(rows)
    share = {
        key: [row["choice"] for row in found if (row["l2"], row["temperature"]) == key].count("certified")
        for key in (("cold", 0.0), ("hot", 0.0), ("cold", 1.0))
    }
    assert share["cold", 0.0] == SETS
    assert 0 < share["hot", 0.0] == share["cold", 1.0] < SETS / 4


def test_sets_with_a_stray_clock_are_left_out_and_arms_alone_have_no_replay() -> None:
    rows = _rows(GOOD)
    for row in rows:
        row["valid"] = (row["set"], row["variant"]) not in ((3, "certified_sm80"), (5, "resident"))
    assert [row["set"] for row in dispatched(rows)] == [number for number in range(SETS) if number not in (3, 5)]
    assert dispatched([row for row in rows if row["again"] >= 0]) == []
    assert dispatched([row for row in rows if row["again"] < 0]) == []
    assert dispatched([]) == []


def test_a_set_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="certified_sm80 has the set 0 twice"):
        dispatched([*_rows(GOOD), _rows(GOOD)[0]])


def test_the_cost_is_that_of_the_times() -> None:
    mixed = [row for row in _rows([(0, 0), (1, 0), (2, 0), (2, 1), (7, 7)]) if row["again"] >= 0]
    cost = measured_cost(mixed)
    assert (cost.base_us, cost.again_us, cost.searched_us) == pytest.approx((BASE, AGAIN, SEARCHED))
    same = measured_cost([row for row in _rows(BAD) if row["again"] >= 0])
    assert same.us(7, 7) == pytest.approx(BASE + 7 * (AGAIN + SEARCHED))
    assert min(same.base_us, same.again_us, same.searched_us) > 0


def test_no_cost_is_below_zero() -> None:
    rows = [row for row in _rows([(0, 0), (1, 0), (2, 0), (3, 1), (4, 2)]) if row["again"] >= 0]
    for row in rows:
        row["time_us"] = 20.0 - row["again"] + 9 * row["searched"]
    cost = measured_cost(rows)
    assert cost.base_us > 0
    assert cost.again_us == 0
    assert cost.searched_us > 0
