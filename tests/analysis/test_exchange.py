from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.exchange import CHOSEN, by_clocks, costs, counts, exchange_table, gaps, price, protocols
from analysis.load import InvalidRun, Run, load_run, newest_run
from tests.data import make_runs
from tests.data.make_runs import EXCHANGE_CTAS, EXCHANGES

TRUTH = {(name, ctas): slope for name, (_, slopes) in EXCHANGES.items() for ctas, slope in zip(EXCHANGE_CTAS, slopes, strict=True) if slope}


@pytest.fixture(scope="module")
def run(results: Path) -> Run:
    return newest_run(results, "exchange", "h200")


def _write(root: Path, tables: dict[str, pd.DataFrame]) -> Run:
    device = {"spec": "h200", "name": "NVIDIA H200"}
    return load_run(make_runs.write_run(root, "exchange", tables, run_id="20260101T000000Z-h200-1", device=device))


def test_every_known_slope_is_given_back_cold_and_hot(run: Run) -> None:
    for l2, entry in (("cold", 4.1), ("hot", 3.5)):
        fits = costs(run, l2)
        assert set(fits) == set(TRUTH)
        for key, fitted in fits.items():
            assert fitted.slope_us.value == pytest.approx(TRUTH[key], rel=0.03), key
            assert fitted.slope_us.low <= fitted.slope_us.value <= fitted.slope_us.high
            assert fitted.entry_us.value == pytest.approx(entry, abs=0.1)
            assert (fitted.steps, fitted.replicas) == ((8, 16, 24, 32), make_runs.REPLICAS)


def test_the_kernels_clocks_are_a_second_account(run: Run) -> None:
    fits, clocks = costs(run), by_clocks(run)
    assert set(clocks) == set(TRUTH)
    for key, estimate in clocks.items():
        assert estimate.value == pytest.approx(1.01 * fits[key].slope_us.value, rel=0.01)


def test_what_is_promised_and_what_was_asked(run: Run) -> None:
    assert protocols(run) == {name: promised for name, (promised, _) in EXCHANGES.items()}
    assert list(protocols(run)) == list(EXCHANGES)
    assert counts(run) == [8, 66, 132]
    assert CHOSEN in EXCHANGES


def test_the_price_is_that_of_the_cheapest_promised_protocol_replica_by_replica(run: Run) -> None:
    for ctas, cheapest in ((132, "grid_sync"), (8, "mailboxes")):
        paid = price(run, ctas)
        assert paid is not None
        extra = TRUTH[cheapest, ctas] - TRUTH["pair", ctas]
        assert (paid.protocol, paid.ctas) == (cheapest, ctas)
        assert paid.extra_us.value == pytest.approx(extra, abs=0.02)
        assert paid.extra_us.low < paid.extra_us.value < paid.extra_us.high
        assert paid.share == pytest.approx(extra / TRUTH["pair", ctas], abs=0.03)


def test_what_slows_a_whole_replica_is_not_in_the_price(tmp_path: Path) -> None:
    tables = make_runs.exchange_tables({"pair": (False, (0.5, 0.7, 0.8)), "grid_sync": (True, (1.0, 1.1, 1.2))})
    samples = tables["exchange"]
    slow = samples["replica"] == 2
    samples.loc[slow, "time_us"] += 0.5 * samples.loc[slow, "steps"]
    paid = price(_write(tmp_path, tables), 132)
    assert paid is not None
    assert paid.extra_us.high - paid.extra_us.low < 0.05
    assert paid.extra_us.value == pytest.approx(0.4, abs=0.02)


@pytest.mark.parametrize("lost", ["pair", "grid_sync"])
def test_without_one_of_the_two_there_is_no_price(tmp_path: Path, lost: str) -> None:
    tables = make_runs.exchange_tables({"pair": (False, (0.5, 0.7, 0.8)), "grid_sync": (True, (1.0, 1.1, 1.2))})
    tables = {name: rows[rows["protocol"] != lost] for name, rows in tables.items()}
    assert price(_write(tmp_path, tables), 132) is None


def test_flagged_samples_are_in_no_slope(tmp_path: Path) -> None:
    tables = make_runs.exchange_tables({"pair": (False, (0.5, 0.7, 0.8))})
    samples = tables["exchange"]
    bad = (samples["round"] == 1) & (samples["steps"] == 32)
    samples.loc[bad, ["time_us", "valid"]] = [1000.0, False]
    run = _write(tmp_path, tables)
    assert costs(run)["pair", 132].slope_us.value == pytest.approx(0.8, rel=0.03)
    assert exchange_table(run).splitlines()[2].endswith(f"| {3 * make_runs.REPLICAS} |")


def test_gaps_keep_their_reason_and_their_number(tmp_path: Path, run: Run) -> None:
    found = {(gap.protocol, gap.ctas): gap for gap in gaps(run)}
    assert set(found) == {("cluster_4", 66), ("cluster_4", 132), ("cluster_8", 66), ("cluster_8", 132)}
    assert all(gap.whole and gap.status == "unsupported" for gap in found.values())
    assert "66 CTAs are no whole number of clusters of 4" in found["cluster_4", 66].reason
    tables = make_runs.exchange_tables({"pair": (False, (0.5, 0.7, 0.8))})
    cells, samples = tables["exchange_cells"], tables["exchange"]
    cells.loc[(cells["replica"] == 0) & (cells["ctas"] == 66), ["status", "reason"]] = ["incorrect", "step 3"]
    tables["exchange"] = samples[(samples["replica"] != 0) | (samples["ctas"] != 66)]
    (gap,) = gaps(_write(tmp_path, tables))
    assert (gap.failed, gap.asked, gap.whole, gap.reason) == (4, 20, False, "step 3")


def test_the_table_shows_every_protocol_and_says_what_the_chosen_one_leans_on(run: Run) -> None:
    text = exchange_table(run)
    lines = text.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2 : 2 + len(EXCHANGES)]] == list(EXCHANGES)
    assert lines[0].count("µs/step") == 3
    assert {line.count("|") for line in lines[: 2 + len(EXCHANGES)]} == {8}
    grid_sync = [cell.strip() for cell in next(line for line in lines if line.startswith("| grid_sync")).split("|")]
    assert grid_sync[2] == "yes"
    assert float(grid_sync[5].split(" ")[0]) == pytest.approx(1.14, abs=0.03)
    assert lines[8].split("|")[3:6][1].strip() == "unsupported"
    assert "The walks use pair. It leans on a 16-byte load" in text
    assert "The cheapest protocol that PTX promises is grid_sync: 0.3" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda tables: tables["exchange_cells"].update({"status": np.repeat("incorrect", 60)}),
            "whose check is incorrect in exchange_cells",
        ),
        (lambda tables: tables["exchange"].update({"time_us": np.repeat(0.0, 1)}), "samples that are no times"),
        (lambda tables: tables["exchange_clocks"].update({"time_us": np.repeat(-1.0, 1)}), "exchange_clocks.parquet has 1 samples"),
    ],
)
def test_times_that_nobody_vouches_for_are_refused(tmp_path: Path, change, words: str) -> None:
    tables = make_runs.exchange_tables({"pair": (False, (0.5, 0.7, 0.8))})
    change(tables)
    with pytest.raises(InvalidRun, match=words):
        _write(tmp_path, tables)
