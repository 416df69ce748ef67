"""Carry out a plan: ask the experiment its question and write one record, whatever the answer is."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol, cast

from experiments import gpu, record
from experiments.convert import ConfigError
from experiments.outcome import Outcome, Status, of_error
from experiments.plan import Plan
from experiments.provenance import software
from experiments.trained_inputs import ready


class Question(Protocol):
    """A file of this room that is an experiment: `experiments/NAME.py` for `experiment=NAME`."""

    def run(self, plan: Plan) -> Outcome:
        """Ask the whole question."""
        ...

    def run_replica(self, plan: Plan, replica: int) -> Outcome:
        """One fresh process's share of it; only experiments with replicas have this."""
        ...


@dataclass(frozen=True)
class Finished:
    """A written record and how it ended."""

    folder: Path
    status: Status
    reason: str


def execute(plan: Plan) -> Finished:
    """Run the experiment of `plan` and write its folder under `config.output`.

    Raises:
        ConfigError: the plan asks for something that does not exist, or for an output that cannot be written (nothing is written).
        record.RecordError: the experiment's rows break the rules of a record (nothing is written).
    """
    _assert_writable(Path(plan.config.output))
    started, before = datetime.now(UTC), gpu.state(plan.config.device)
    try:
        prepared = ready(plan)
        plan = prepared.plan
        outcome = _question(plan).run(plan)
        outcome.protocol.update(prepared.protocol)
    except ConfigError:
        raise
    except Exception as error:
        status, reason = of_error(error)
        if status is Status.RUNTIME_ERROR:
            traceback.print_exc()
        outcome = Outcome({}, status=status, reason=reason)
    folder = Path(plan.config.output) / plan.config.experiment.name
    written = record.write(_run(plan, outcome, started, before, _free_run_id(plan, folder)), folder)
    return Finished(written, outcome.status, outcome.reason)


def execute_replica(plan: Plan, replica: int, into: Path) -> Status:
    """Run one replica and leave its outcome as `into/replica-N.json` for the parent to gather."""
    try:
        outcome = _question(plan).run_replica(plan, replica)
        part: dict[str, Any] = {"tables": outcome.tables, "protocol": outcome.protocol, "resources": outcome.resources}
        status, reason = outcome.status, outcome.reason
    except Exception as error:
        traceback.print_exc()
        status, reason = of_error(error)
        part = {"error": type(error).__name__}
    partial = into / f".replica-{replica}.json"
    partial.write_text(json.dumps({**part, "status": status, "reason": reason}))
    partial.replace(into / f"replica-{replica}.json")
    return status


def _assert_writable(output: Path) -> None:
    """Told before anything is measured. A folder is made and removed again where the first one of `output` would be made.

    Raises:
        ConfigError: no run folder can be made under `output`.
    """
    try:
        nearest = next(place for place in (output.absolute(), *output.absolute().parents) if place.exists())
        with tempfile.TemporaryDirectory(dir=nearest, prefix=".partial-"):
            pass
    except OSError as error:
        raise ConfigError(
            f"output: no run can be written under {output} ({error.strerror}); choose another folder with output=..."
        ) from error


def _question(plan: Plan) -> Question:
    return cast(Question, importlib.import_module(f"experiments.{plan.config.experiment.name}"))


def _free_run_id(plan: Plan, folder: Path) -> str:
    """YYYYMMDDTHHMMSSZ-DEVICE-CONFIG; the next free second where two runs of one config start together."""
    moment = datetime.now(UTC)
    while True:
        run_id = f"{moment:%Y%m%dT%H%M%SZ}-{plan.config.device.name}-{plan.config.sha256[:8]}"
        if not (folder / run_id).exists():
            return run_id
        moment += timedelta(seconds=1)


def _run(plan: Plan, outcome: Outcome, started: datetime, before: dict[str, Any], run_id: str) -> record.Run:
    config = plan.config
    meta = {
        "schema_version": record.schema()["schema_version"],
        "run_id": run_id,
        "experiment": config.experiment.name,
        "status": str(outcome.status),
        "reason": outcome.reason,
        "config": config.as_dict(),
        "config_sha256": config.sha256,
        "argv": list(plan.argv),
        "seed": config.seed,
        "revision": plan.revision.as_dict(),
        "device": {**gpu.describe(config.device), "before": before, "after": gpu.state(config.device)},
        "software": software(),
        "protocol": outcome.protocol,
        "resources": outcome.resources,
        "tables": {},
        "started_at": started.isoformat(timespec="seconds"),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return record.Run(meta, {name: record.table(name, rows, run_id) for name, rows in outcome.tables.items()})


def report(finished: Finished) -> int:
    """Say in one line how the run ended; the exit code is 0 if it is ok, 2 if this machine or head cannot do it, else 1."""
    if finished.status is Status.OK:
        print(finished.folder)
        return 0
    print(f"{finished.status}: {finished.reason} ({finished.folder})", file=sys.stderr)
    return 2 if finished.status is Status.UNSUPPORTED else 1
