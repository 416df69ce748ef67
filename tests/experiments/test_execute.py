from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments import record
from experiments.convert import ConfigError
from experiments.execute import execute, report
from experiments.floor import FloorViolation
from experiments.outcome import Outcome, Status
from experiments.plan import Plan
from kernels.build import BuildError
from kernels.walk import Unsupported

Swap = Callable[[Callable[[Plan], Outcome]], None]


def _raise(error: BaseException) -> Callable[[Plan], Outcome]:
    def question(plan: Plan) -> Outcome:
        raise error

    return question


def test_a_smoke_run_becomes_a_record_with_its_commit_and_samples(plan: Plan) -> None:
    finished = execute(plan)
    run = record.load(finished.folder)
    assert (finished.status, report(finished)) == (Status.OK, 0)
    assert finished.folder.parent == Path(plan.config.output) / "smoke"
    assert run.meta["run_id"].endswith(f"-cpu-{plan.config.sha256[:8]}")
    assert run.meta["revision"] == plan.revision.as_dict()
    assert (run.meta["argv"], run.meta["config"]) == (["head=test"], plan.config.as_dict())
    assert run.meta["protocol"]["rounds"] == 4
    assert run.meta["resources"]["reference"]["registers"] == 0
    assert run.tables["samples"].num_rows == 2 * 2 * 4  # lengths x (cold, hot) x rounds
    assert run.tables["cells"].column("status").to_pylist() == ["ok", "ok"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Unsupported("needs sm_90a; this is sm_80"), "unsupported", 2),
        (BuildError("walk spills 8 bytes"), "build_error", 1),
        (FloorViolation("walk took 1 us, below its floor of 2 us"), "runtime_error", 1),
        (ZeroDivisionError("oops"), "runtime_error", 1),
    ],
)
def test_however_it_ends_there_is_a_record_with_the_reason(plan: Plan, outcome_of: Swap, error: Exception, status: str, code: int) -> None:
    outcome_of(_raise(error))
    finished = execute(plan)
    meta = record.load(finished.folder).meta
    assert meta["status"] == status
    assert str(error) in meta["reason"]
    assert report(finished) == code


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), ConfigError("head: no")])
def test_a_run_that_was_stopped_or_never_made_sense_leaves_nothing(plan: Plan, outcome_of: Swap, error: BaseException) -> None:
    outcome_of(_raise(error))
    with pytest.raises(type(error)):
        execute(plan)
    assert not Path(plan.config.output).exists()


def test_rows_that_break_the_rules_are_refused_whole(plan: Plan, outcome_of: Swap) -> None:
    outcome_of(lambda plan: Outcome({"step_clocks": [{"backend": "b"}]}))
    with pytest.raises(record.RecordError, match="missing columns"):
        execute(plan)
    assert not Path(plan.config.output).exists()


def test_two_runs_of_one_config_in_one_second_are_two_folders(plan: Plan, outcome_of: Swap) -> None:
    row: dict[str, Any] = {"backend": "b", "variant": "v", "steps": 1, "replica": 0, "step": 0, "time_us": 1.0}
    outcome_of(lambda plan: Outcome({"step_clocks": [row]}))
    assert len({execute(plan).folder for _ in range(3)}) == 3


def test_an_unsupported_backend_has_rows_that_say_so(plan: Plan) -> None:
    from dataclasses import replace

    from experiments.schema import BackendConfig

    asked = replace(plan, config=replace(plan.config, backend=BackendConfig("resident_sm90")))
    run = record.load(execute(asked).folder)
    assert run.meta["status"] == "unsupported"
    assert {row["reason"] for row in run.tables["cells"].to_pylist()} == {run.meta["reason"]}
    assert run.tables["cells"].num_rows == 2
