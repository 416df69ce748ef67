from __future__ import annotations

from pathlib import Path

import pytest

from analysis.load import newest_run
from analysis.placement import Split, placement_table, splits
from tests.data import make_runs
from tests.data.make_runs import NO_LAUNCH, SPLITS


@pytest.fixture
def found(results: Path) -> list[Split]:
    return splits(newest_run(results, "placement", "h200"))


def test_every_known_line_is_given_back_beside_its_expectation(found: list[Split]) -> None:
    assert [split.variant for split in found] == [f"rf{near}" for (near, _, _), *_ in SPLITS]
    for split, (tiles, spilled, line, expected) in zip(found, SPLITS, strict=True):
        assert (split.register_tiles, split.shared_tiles, split.streamed_tiles) == tuple(8 * count for count in tiles)
        assert split.tiles == 72
        assert (split.spill_bytes, split.spills) == (spilled, spilled > 0)
        assert (split.expected_entry_us, split.expected_step_us) == expected
        assert (split.measured is None) == (line is None)
        if split.measured and line:
            assert split.measured.entry_us.value == pytest.approx(line[0], abs=0.15)
            assert split.measured.slope_us.value == pytest.approx(line[1], abs=0.02)
            assert split.measured.slope_us.low < split.measured.slope_us.value < split.measured.slope_us.high
            assert split.measured.steps == (1, 7, 16)
            assert split.gaps == ()


def test_a_split_that_was_not_timed_says_why(found: list[Split]) -> None:
    assert found[-1].gaps == (f"15 of 15 walks failed (runtime_error: {NO_LAUNCH})",)


def test_plans_may_come_in_any_order_and_without_price_or_place(tmp_path: Path) -> None:
    tables = make_runs.placement_tables()
    plans = tables["plans"].iloc[::-1].reset_index(drop=True)
    plans.loc[plans["variant"] == "rf4", ["unpriced", "entry_us", "step_us"]] = ["no rates", 0.0, 0.0]
    lost = plans["variant"] == "rf5"
    plans.loc[lost, ["register_tiles", "shared_tiles", "streamed_tiles"]] = 0
    plans.loc[lost, ["reason", "unpriced"]] = "does not fit"
    samples = tables["samples"]
    tables |= {"plans": plans, "samples": samples[samples["variant"] != "rf5"]}
    cells = tables["cells"]
    cells.loc[cells["variant"] == "rf5", ["status", "reason"]] = ["unsupported", "does not fit"]
    found = {split.variant: split for split in splits(newest_run(make_runs.placement(tmp_path, tables).parent.parent, "placement"))}
    order = [split.register_tiles for split in found.values()]
    assert order == sorted(order)
    assert (found["rf4"].expected_step_us, found["rf4"].gaps) == (None, ("no expected cost: no rates",))
    assert found["rf4"].measured
    assert (found["rf5"].tiles, found["rf5"].measured) == (0, None)
    assert found["rf5"].gaps == ("15 of 15 walks failed (unsupported: does not fit)",)
    assert "rf5: 15 of 15 walks failed (unsupported: does not fit)" in placement_table(list(found.values()))


def test_the_table_shows_every_split(found: list[Split]) -> None:
    lines = placement_table(found).splitlines()
    assert len(lines) == 2 + len(SPLITS)
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| 0 / 32 / 40 | 78 | 0 | 208 |")
    assert "| 2.01 |" in lines[8]
    assert f"{found[6].measured.slope_us:.2f}" in lines[8] if found[6].measured else False
    assert NO_LAUNCH in lines[-1]
