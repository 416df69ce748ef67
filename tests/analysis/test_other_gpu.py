from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from analysis import rivals
from analysis.anatomy import EXPERIMENT, run_of
from analysis.claim import load_claims
from analysis.latency import Cell, latencies
from analysis.load import all_runs
from analysis.other_gpu import Elsewhere, elsewhere, other_gpu_table
from tests.data import make_runs

CLAIMS = load_claims().claims
OTHER = "20260102T000000Z-h200-00000000"


@pytest.fixture
def two_anatomies(results: Path, tmp_path: Path) -> Path:
    """The fixture's runs, and SGLang's default step at V = 151,936 beside the one at 248,320."""
    for experiment in ("rivals", EXPERIMENT):
        shutil.copytree(results / experiment, tmp_path / experiment)
    make_runs.step_anatomy(tmp_path, "markov_v152k", run_id=OTHER)
    return tmp_path


def _rows(root: Path) -> list[Elsewhere]:
    return elsewhere(CLAIMS, latencies(all_runs(root, rivals.EXPERIMENT, "h200")), all_runs(root, EXPERIMENT, "h200"))


def test_a_run_is_found_by_its_walk_and_not_by_its_age(two_anatomies: Path) -> None:
    runs = all_runs(two_anatomies, EXPERIMENT, "h200")
    assert [run.run_id == OTHER for run in runs] == [True, False], "the newest first"
    main, other = run_of(runs, "markov_v248k", 1, 0.0), run_of(runs, "markov_v152k", 1, 0.0)
    assert main is runs[1]
    assert other is runs[0]
    assert run_of(runs, "markov_v152k", 2, 0.0) is None
    assert run_of(runs, "markov_v152k", 1, 1.0) is None


def test_a_gemm_takes_as_long_as_the_other_memory_needs(two_anatomies: Path) -> None:
    rows = _rows(two_anatomies)
    assert [(row.cell.steps, row.arm, row.hardware, row.published_us) for row in rows] == [
        (7, "sglang_folded", "H100", 331.0),
        (16, "sglang_folded", "H100", 741.0),
    ]
    row, here = rows[0], make_runs.grid_time("sglang_folded", 151_936, 7, 1, 0.0)
    assert row.here_us == pytest.approx(here, rel=0.01)
    assert row.gemm_us == pytest.approx(1.01 * 33)
    assert row.scaled_us == pytest.approx(row.here_us + 7 * 1.01 * 33 * (4800 / 3350 - 1))
    assert row.without_us == pytest.approx(row.here_us - 7 * 1.01 * 33)


def test_the_table_says_both_bounds() -> None:
    row = Elsewhere(Cell("markov_v129k", 5, 16, 1.0), "vllm_loop_gumbel", "GB200", 237.6, 300.0, 20.0, 0.6)
    assert (
        other_gpu_table([row]).splitlines()[2] == "| 129,280, 5, 16, 1 | `vllm_loop_gumbel` | 237.6, GB200 | 300.0 | 20.0 | 260.0 | 200.0 |"
    )
    assert other_gpu_table([]) == "Not measured yet."


def test_without_the_steps_of_a_walk_nothing_is_said_of_it(results: Path) -> None:
    assert _rows(results) == []
