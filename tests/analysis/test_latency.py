from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analysis.latency import BATCHES, WALKS, Cell, Latency, commands, latencies, latency_table, median_time, sampling_cost, speedup
from analysis.load import InvalidRun, all_runs, load_run
from tests.data import make_runs
from tests.data.make_runs import grid_time

DEVICE = {"spec": "h200", "name": "NVIDIA H200"}
HEAD, VOCAB = "markov_v152k", 151_936


def _cell(steps: int = 7, batch: int = 1, temperature: float = 0.0) -> Cell:
    return Cell(HEAD, steps, batch, temperature)


@pytest.fixture(scope="module")
def found(results: Path) -> dict[Cell, Latency]:
    """Every cell of the fixture runs."""
    return latencies(all_runs(results, "walk_latency", "h200"))


def test_every_cell_gives_its_arms_times_back(found: dict[Cell, Latency]) -> None:
    assert len(found) == 28 + 14 + 7  # 129k was measured greedy only
    for (head, vocab, steps), batch, temperature in [(walk, batch, t) for walk in WALKS for batch in BATCHES for t in (0.0, 1.0)]:
        cell = found.get(Cell(head, steps, batch, temperature))
        if cell is None:
            assert (head, temperature) == ("markov_v129k", 1.0)
            continue
        stock = ["sglang_folded"] if temperature else ["sglang_folded", "sglang_greedy", "vllm_addmm"]
        ours = [] if (steps, batch, temperature) == (16, 64, 1.0) else ["resident"]
        assert list(cell.times) == stock + ours
        truth = {arm: grid_time(arm, vocab, steps, batch, temperature) for arm in cell.times}
        assert {arm: time.value for arm, time in cell.times.items()} == pytest.approx(truth, rel=0.01)
        assert all(time.low <= time.value <= time.high for time in cell.times.values())
        if ours:
            ratios = {arm: truth[arm] / truth["resident"] for arm in stock}
            assert {arm: ratio.value for arm, ratio in cell.speedups.items()} == pytest.approx(ratios, rel=0.01)
            assert cell.fastest is not None
            assert cell.fastest.value == pytest.approx(min(ratios.values()), rel=0.01)  # vllm_addmm greedy, the default at T = 1


def test_what_was_not_timed_has_its_reason(found: dict[Cell, Latency]) -> None:
    refused = found[_cell(16, 64, 1.0)]
    assert refused.gaps["resident"] == "unsupported: no room for 64 requests of 16 steps."
    assert "greedy only" in refused.gaps["vllm_addmm"]
    assert (refused.speedups, refused.fastest) == ({}, None)
    assert found[_cell(16, 64, 0.0)].gaps == {}


def test_a_cell_is_taken_whole_from_the_newest_run_that_has_it(tmp_path: Path) -> None:
    old = make_runs.walk_latency(tmp_path, HEAD, batches=(1, 2))
    new = make_runs.walk_latency(
        tmp_path,
        HEAD,
        run_id="20260102T000000Z-h200-0",
        steps=(7,),
        batches=(1,),
        temperatures=(0.0,),
        refused={("vllm_addmm", 7, 1, 0.0): "no cuBLAS."},
        factor=3.0,
    )
    make_runs.write_run(
        tmp_path, "walk_latency", make_runs.walk_latency_tables(HEAD, (7,)), run_id="20260103T000000Z-b200-0", device={"spec": "b200"}
    )
    found = latencies(all_runs(tmp_path, "walk_latency", "h200"))
    assert {cell: latency.run.path for cell, latency in found.items()} == {
        _cell(steps, batch, temperature): new if (steps, batch, temperature) == (7, 1, 0.0) else old
        for steps in (7, 16)
        for batch in (1, 2)
        for temperature in (0.0, 1.0)
    }
    assert found[_cell()].times["resident"].value == pytest.approx(3 * grid_time("resident", VOCAB, 7, 1, 0.0), rel=0.01)
    assert "vllm_addmm" not in found[_cell()].times  # the older run's time is of another process


def test_a_ratio_is_over_the_replicas_that_have_both_arms(tmp_path: Path) -> None:
    tables = make_runs.walk_latency_tables(HEAD, (7,), (1,), (0.0, 1.0))
    samples = tables["samples"]
    lost = (samples["replica"] == 0) & (samples["variant"] == "sglang_folded")
    samples.loc[samples["replica"] == 0, "time_us"] *= 100.0
    tables["samples"] = samples[~lost]
    tables["cells"].loc[(tables["cells"]["replica"] == 0) & (tables["cells"]["variant"] == "sglang_folded"), ["status", "reason"]] = (
        "timeout",
        "gone",
    )
    path = make_runs.write_run(tmp_path, "walk_latency", tables, run_id="20260101T000000Z-h200-0", device=DEVICE)
    cell = latencies([load_run(path)])[_cell()]
    truth = {arm: grid_time(arm, VOCAB, 7, 1, 0.0) for arm in ("sglang_folded", "resident")}
    ratio = cell.speedups["sglang_folded"]
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx([truth["sglang_folded"] / truth["resident"]] * 3, rel=0.02)
    assert cell.gaps["sglang_folded"] == "timeout: gone"  # and yet it has times, of the other replicas
    assert cell.times["resident"].high > 100


def test_the_measures_want_every_arm_and_cell(results: Path) -> None:
    samples = load_run(next((results / "walk_latency").glob("*-00000000"))).table("samples")
    cell = {"head": HEAD, "steps": 7, "batch": 2, "l2": "cold", "scope": "call"}
    hot = median_time(samples, "resident", temperature=1.0, **cell | {"l2": "hot"})
    cold = median_time(samples, "resident", temperature=1.0, **cell)
    assert hot is not None
    assert cold is not None
    assert cold.value - hot.value == pytest.approx(4.0, abs=0.3)
    assert speedup(samples, "resident", ["sglang_folded", "vllm_addmm"], temperature=1.0, **cell) is None
    assert median_time(samples, "resident", temperature=0.5, **cell) is None
    cost = sampling_cost(samples, "resident", temperature=1.0, **cell)
    assert cost is not None
    expected = grid_time("resident", VOCAB, 7, 2, 1.0) / grid_time("resident", VOCAB, 7, 2, 0.0)
    assert cost.value == pytest.approx(expected, rel=0.01)
    assert sampling_cost(samples[samples["temperature"] > 0], "resident", temperature=1.0, **cell) is None


def test_flagged_samples_are_in_no_median(tmp_path: Path) -> None:
    tables = make_runs.walk_latency_tables(HEAD, (7,), (1,), (0.0,))
    samples = tables["samples"]
    off = (samples["round"] < 2) & (samples["variant"] == "resident")
    samples.loc[off, "time_us"] = 1.0
    samples.loc[off, "valid"] = False
    path = make_runs.write_run(tmp_path, "walk_latency", tables, run_id="20260101T000000Z-h200-0", device=DEVICE)
    assert latencies([load_run(path)])[_cell()].times["resident"].value == pytest.approx(grid_time("resident", VOCAB, 7, 1, 0.0), rel=0.02)


def test_one_replica_has_a_value_and_no_interval(tmp_path: Path) -> None:
    tables = make_runs.walk_latency_tables(HEAD, (7,), (1,), (0.0,))
    one = {name: table[table["replica"] == 0] for name, table in tables.items()}
    path = make_runs.write_run(tmp_path, "walk_latency", one, run_id="20260101T000000Z-h200-0", device=DEVICE)
    cell = latencies([load_run(path)])[_cell()]
    assert cell.fastest is not None
    assert np.isnan(cell.fastest.low)
    assert np.isnan(cell.times["resident"].low)


def test_the_table_says_what_is_missing(found: dict[Cell, Latency]) -> None:
    lines = latency_table(found).splitlines()
    assert len(lines) == 2 + 2 * len(WALKS)
    by_walk = {line.split("|")[1].strip(): [entry.strip() for entry in line.split("|")[2:-1]] for line in lines}
    assert set(by_walk["129,280, 5, 1"]) == {"not measured"}
    assert by_walk["151,936, 16, 1"][-1] == "unsupported"
    assert by_walk["151,936, 7, 0"][0] == "30.3 µs (9.7×, 8.7×)"
    assert by_walk["151,936, 7, 1"][0] == "33.6 µs (10.3×)"  # one stock arm is left, so one ratio
    assert latency_table({}) == "Not measured yet."


def test_a_command_measures_all_lengths_of_a_head() -> None:
    lines = commands("h200")
    assert set(lines) == {(head, steps) for head, _, steps in WALKS}
    assert lines[HEAD, 7] == lines[HEAD, 16]
    assert lines[HEAD, 7].endswith(f"experiment=walk_latency device=h200 head={HEAD} 'experiment.steps=[7,16]'")
    assert lines["markov_v248k", 15].endswith("head=markov_v248k 'experiment.steps=[15]'")


def test_a_corrupt_run_of_the_grid_is_not_passed_over(tmp_path: Path) -> None:
    make_runs.walk_latency(tmp_path, HEAD, batches=(1,))
    path = make_runs.walk_latency(tmp_path, HEAD, batches=(2,), run_id="20260102T000000Z-h200-0")
    (path / "samples.parquet").write_bytes(b"")
    with pytest.raises(InvalidRun, match="was altered"):
        all_runs(tmp_path, "walk_latency", "h200")
    assert all_runs(tmp_path, "step_slope", "h200") == []
