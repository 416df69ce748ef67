from __future__ import annotations

from pathlib import Path

import pytest

from analysis.claim import load_claims
from analysis.latency import Cell, latencies
from analysis.load import all_runs
from analysis.rivals import EXPERIMENT, Ratio, ratio_table, ratios, rivals_table
from tests.data.make_runs import grid_time

HEAD, VOCAB = "markov_v152k", 151_936


@pytest.fixture(scope="module")
def of_vllm(results: Path) -> list[Ratio]:
    return ratios(load_claims().claims, latencies(all_runs(results, EXPERIMENT, "h200")))


def test_every_published_pair_is_met_by_the_arms_of_its_cell(of_vllm: list[Ratio]) -> None:
    """vLLM's own table: 7 cells twice, greedy and sampled; and six batches of its inverse CDF, two of them beyond this suite's."""
    assert [(ratio.fast, ratio.hardware) for ratio in of_vllm] == [("vllm_int8_walk", "H100")] * 14 + [("vllm_inverse_cdf", "GB200")] * 6
    assert {ratio.cell.batch for ratio in of_vllm[14:]} == {1, 16, 32, 64, 128, 253}
    by_cell = {(ratio.fast, ratio.cell): ratio for ratio in of_vllm}
    greedy = by_cell["vllm_int8_walk", Cell(HEAD, 7, 16, 0.0)]
    truth = [grid_time(arm, VOCAB, 7, 16, 0.0) for arm in ("vllm_loop_greedy", "vllm_int8_walk")]
    assert greedy.published_us == (431.0, 68.0)
    assert greedy.ours_us == pytest.approx(truth, rel=0.01)
    assert greedy.ours == pytest.approx(truth[0] / truth[1], rel=0.01)
    assert greedy.deviation == pytest.approx(truth[0] / truth[1] * 68 / 431 - 1, abs=0.02)
    sampled = by_cell["vllm_inverse_cdf", Cell("markov_v129k", 5, 64, 1.0)]
    truth = [grid_time(arm, 129_280, 5, 64, 1.0) for arm in ("vllm_loop_gumbel", "vllm_inverse_cdf")]
    assert sampled.ours_us == pytest.approx(truth, rel=0.01)


def test_a_cell_that_was_not_timed_has_no_ratio(of_vllm: list[Ratio]) -> None:
    missing = next(ratio for ratio in of_vllm if ratio.cell == Cell("markov_v248k", 16, 1, 0.0))
    assert (missing.ours_us, missing.ours, missing.deviation) == (None, None, None)
    assert "248,320" not in ratio_table(of_vllm)
    assert ratio_table([missing]) == "Not measured yet."


def test_the_tables_say_what_was_timed_and_why_not(results: Path, of_vllm: list[Ratio]) -> None:
    lines = rivals_table(latencies(all_runs(results, EXPERIMENT, "h200"))).splitlines()
    assert lines[0] == "| µs a call | greedy, bs 1 | greedy, bs 16 | greedy, bs 64 | T = 1, bs 1 | T = 1, bs 16 | T = 1, bs 64 |"
    loop = next(line for line in lines if "`vllm_loop_greedy`" in line).split(" | ")
    assert float(loop[1]) == pytest.approx(grid_time("vllm_loop_greedy", VOCAB, 7, 1, 0.0), rel=0.01)
    assert loop[4] == "unsupported"
    assert rivals_table({}) == "Not measured yet."
    row = next(line for line in ratio_table(of_vllm).splitlines() if line.startswith("| 151,936, 7, 1, 0 "))
    assert "298.2 / 60.5 µs, H100" in row
    assert "4.93" in row
