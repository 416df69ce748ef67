from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from experiments import record
from experiments.compose import compose
from experiments.execute import execute
from experiments.kernel_trace import Activity
from experiments.plan import Plan
from experiments.schema import StepAnatomy, Timing, Variant
from experiments.step_anatomy import IDLE, kernel_rows
from experiments.workload import create


def test_the_config_asks_every_greedy_way() -> None:
    ask = compose(["experiment=step_anatomy", "device=h200"]).experiment
    assert isinstance(ask, StepAnatomy)
    assert (ask.steps, ask.batch) == ((7, 15), 1)
    for variant in ask.variants:
        assert create(variant.backend, variant.options).name == variant.backend


def test_every_request_has_the_temperature(plan: Plan) -> None:
    """The check of the draws knows each walk's rounds, so both lengths must be right though they are timed interleaved."""
    timing = Timing(rounds=2, warmup=1, kernel_replays=0)
    ask = StepAnatomy((Variant("bits", "reference"),), steps=(1, 3), temperature=1.0, replicas=1, replica_timeout_s=120, timing=timing)
    run = record.load(execute(replace(plan, config=replace(plan.config, experiment=ask))).folder)
    rows = run.tables["cells"].to_pylist()
    assert [(row["temperature"], row["status"], row["reason"]) for row in rows] == [(1.0, "ok", "")] * 2
    assert {row["temperature"] for row in run.tables["samples"].to_pylist()} == {1.0}
    with pytest.raises(ValueError, match="temperature: needs a finite one, 0 for greedy; got nan"):
        replace(ask, temperature=float("nan"))


def test_one_length_says_nothing_of_a_step() -> None:
    with pytest.raises(ValueError, match=r"difference of two lengths; got \[7\]"):
        StepAnatomy((Variant("bits", "reference"),), steps=(7,))


def test_kernels_of_one_name_are_counted_and_summed() -> None:
    replays = [[Activity("gemv", 0, 3000), Activity("add", 4000, 1000), Activity("gemv", 5000, slow)] for slow in (3000, 5000, 4000)]
    assert kernel_rows(replays) == [
        {"kernel": "gemv", "launches": 2, "time_us": 7.0},
        {"kernel": "add", "launches": 1, "time_us": 1.0},
        {"kernel": IDLE, "launches": 0, "time_us": 1.0},
    ]
    with pytest.raises(RuntimeError, match="lost some"):
        kernel_rows([*replays, replays[0][:2]])


def test_without_a_profiler_the_calls_are_recorded_all_the_same(plan: Plan) -> None:
    ask = StepAnatomy(
        (Variant("bits", "reference"),),
        steps=(1, 3),
        replicas=1,
        replica_timeout_s=120,
        timing=Timing(rounds=2, warmup=1, kernel_replays=0),
    )
    run = record.load(execute(replace(plan, config=replace(plan.config, experiment=ask))).folder)
    assert Counter(row["status"] for row in run.tables["cells"].to_pylist()) == {"ok": 2}
    assert run.tables["step_kernels"].num_rows == 0
