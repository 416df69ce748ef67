from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.floor import FloorViolation
from experiments.outcome import Status
from experiments.plan import Plan
from experiments.provenance import ROOT
from experiments.replicas import run_replicas
from experiments.schema import StepSlope, Variant

# A replica in a few milliseconds: what it does is chosen by its number.
SCRIPT = """
import argparse, json, os, pathlib, subprocess, sys, time
parser = argparse.ArgumentParser()
for name in ("--plan", "--replica", "--into"):
    parser.add_argument(name)
args = parser.parse_args()
json.loads(pathlib.Path(args.plan).read_text())["revision"]["sha"]
acts = {acts}
act = acts[int(args.replica)]
def leave(**part):
    pathlib.Path(args.into, f"replica-{{args.replica}}.json").write_text(json.dumps(part))
if act == "ok":
    leave(status="ok", reason="", tables={{"samples": [{{"replica": int(args.replica)}}]}}, protocol={{}}, resources={{}})
elif act == "crash":
    os.abort()
elif act == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    pathlib.Path({here!r}, "child").write_text(str(child.pid))
    time.sleep(60)
elif act == "slow":
    pathlib.Path({here!r}, "slow").write_text(str(os.getpid()))
    time.sleep(60)
elif act == "error":
    leave(status="runtime_error", reason="ValueError: x", error="ValueError")
elif act == "floor":
    leave(status="runtime_error", reason="walk took 1 us", error="FloorViolation")
"""


def _program(folder: Path, *acts: str) -> tuple[str, str]:
    script = folder / "replica.py"
    script.write_text(SCRIPT.format(acts=acts, here=str(folder)))
    return sys.executable, str(script)


def test_a_replica_that_crashes_hangs_or_fails_loses_only_itself(plan: Plan, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parts = run_replicas(plan, 5, 1.5, _program(tmp_path, "ok", "crash", "hang", "error", "ok"))
    assert [part.status for part in parts] == [Status.OK, Status.RUNTIME_ERROR, Status.TIMEOUT, Status.RUNTIME_ERROR, Status.OK]
    assert [part.replica for part in parts] == [0, 1, 2, 3, 4]
    assert [row["replica"] for part in parts for row in part.tables.get("samples", [])] == [0, 4]
    assert "signal 6" in parts[1].reason
    assert "1.5 s" in parts[2].reason
    assert parts[3].reason == "ValueError: x"
    assert "replica 2 of 5: runtime_error" in capfd.readouterr().err


def test_a_hung_replica_takes_its_children_with_it(plan: Plan, tmp_path: Path) -> None:
    run_replicas(plan, 1, 1.5, _program(tmp_path, "hang"))
    child = int((tmp_path / "child").read_text())
    assert _soon(lambda: not _runs(child)), "the child of a hung replica still runs"


PARENT = """
import functools, sys
from experiments import replicas, run, step_slope
step_slope.run_replicas = functools.partial(replicas.run_replicas, program=sys.argv[2:])
sys.exit(run.main(["--plan", sys.argv[1]]))
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_takes_its_replica_with_it(plan: Plan, tmp_path: Path, how: signal.Signals) -> None:
    if how is signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux ends a child with its parent")
    replace(plan, config=replace(plan.config, experiment=StepSlope((Variant("a", "reference"),)))).write(tmp_path / "plan.json")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-c", PARENT, str(tmp_path / "plan.json"), *_program(tmp_path, "slow")]
    parent = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}, cwd=tmp_path)
    noted = tmp_path / "slow"
    try:
        assert _soon(lambda: noted.exists() and noted.read_text() != "", 60)
        parent.send_signal(how)
        code = parent.wait(10)
    finally:
        parent.kill()
        parent.wait()
    assert _soon(lambda: not _runs(int(noted.read_text()))), "the replica outlives its run"
    assert not list(tmp_path.rglob("run.json"))
    if how is signal.SIGTERM:
        assert code == 143
        assert list(scratch.iterdir()) == []


def _soon(holds: Callable[[], bool], within_s: float = 2) -> bool:
    ends = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > ends:
            return False
        time.sleep(0.02)
    return True


def _runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_an_impossible_time_in_one_replica_fails_them_all(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(FloorViolation, match="replica 1: walk took 1 us"):
        run_replicas(plan, 3, 5, _program(tmp_path, "ok", "floor", "ok"))
