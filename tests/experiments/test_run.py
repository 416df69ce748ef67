"""The door itself, as a user meets it: exit codes, one line on stderr, no litter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import plan as plans
from experiments import record, run
from experiments.plan import Plan
from experiments.provenance import ROOT, Revision, source_digest

SHA = "0123456789abcdef" * 2 + "01234567"
SMALL = ["head.vocab=64", "head.rank=8", "head.w2_std=0.5", "experiment.steps=[1,2]", "experiment.timing.rounds=2"]


@pytest.fixture(autouse=True)
def at_a_known_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WTS_REVISION", str(Revision(SHA, dirty=False, digest=source_digest())))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)


def _runs(experiment: str) -> list[record.Run]:
    return [record.load(folder) for folder in sorted(Path("runs", experiment).glob("[!.]*"))]


def test_a_bare_run_writes_a_record_and_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-m", "experiments.run"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = _runs("smoke")
    assert done.stdout.strip() == f"runs/smoke/{found.meta['run_id']}"
    assert (found.meta["status"], found.meta["revision"]["sha"], found.meta["argv"]) == ("ok", SHA, [])
    assert [path.name for path in Path().iterdir()] == ["runs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["experiment.stepz=3"], "run: experiment.stepz: Key 'stepz' not in 'Smoke' (did you mean 'steps'?)"),
        (["head.vocab=0"], "run: head.vocab: must be at least 1; got 0"),
        (
            ["+backend.options.roundin=int8"],
            "run: backend.options.roundin: unknown key (did you mean 'rounding'?); backend.options has: rounding",
        ),
        (["output=/dev/null/runs"], "run: output: no run can be written under /dev/null/runs (Not a directory); choose another"),
        (["output=/dev/null/runs", "-m", "seed=1,2"], "run: output: /dev/null/runs/.hydra can not be written (Not a directory)"),
        (["--plan", "none.json"], "run: none.json is not a plan"),
        (["--plan", "none.json", "seed=1"], "run: a plan is executed as it is; it takes no seed=1"),
    ],
)
def test_a_wrong_request_is_one_line_and_code_2(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run.main(arguments) == 2
    error = capfd.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1
    assert list(Path().iterdir()) == []


def test_a_plan_that_can_not_be_written_is_one_line_and_code_2(capfd: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    for place in ("missing/plan.json", "folder"):
        assert plans.main(["-o", place, *SMALL]) == 2
        error = capfd.readouterr().err
        assert error.startswith(f"plan: {place} cannot be written")
        assert error.count("\n") == 1
    assert [path.name for path in Path().rglob("*")] == ["folder"]


def test_debug_shows_the_traceback_instead() -> None:
    with pytest.raises(run.ConfigError):
        run.main(["--debug", "head.vocab=0"])


def test_what_this_machine_cannot_do_is_one_line_code_2_and_a_record(capfd: pytest.CaptureFixture[str]) -> None:
    assert run.main([*SMALL, "device=h200"]) == 2
    assert capfd.readouterr().err.startswith("unsupported: device=h200 needs a CUDA GPU")
    assert [found.meta["status"] for found in _runs("smoke")] == ["unsupported"]


def test_a_sweep_runs_every_job_in_a_process_of_its_own_and_outlives_a_bad_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert run.main([*SMALL, "-m", "seed=1", "head.vocab=64,0"]) == 2
    assert "run: head.vocab: must be at least 1" in capfd.readouterr().err
    (found,) = _runs("smoke")
    assert (found.meta["config"]["head"]["vocab"], "seed=1" in found.meta["argv"]) == (64, True)


def test_the_jobs_of_a_sweep_do_not_share_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def note(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, len(commands))

    monkeypatch.setattr(plans.subprocess, "run", note)
    assert run.main([*SMALL, "-m", "seed=1,2,3"]) == 3  # the worst of them
    assert [command[:4] for command in commands] == [[sys.executable, "-m", "experiments.run", "--plan"]] * 3


WITHOUT_HYDRA = """
import sys
for missing in ("hydra", "omegaconf", "scipy", "matplotlib"):
    sys.modules[missing] = None
from experiments.run import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_plan_composed_here_runs_where_there_is_no_hydra_and_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plans.main(["-o", "plan.json", *SMALL, "seed=7"]) == 0
    monkeypatch.delenv("WTS_REVISION")
    command = [sys.executable, "-c", WITHOUT_HYDRA, "--plan", "plan.json"]
    done = subprocess.run(command, env={**os.environ, "PATH": "/nowhere"}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = _runs("smoke")
    assert (found.meta["seed"], found.meta["argv"]) == (7, [*SMALL, "seed=7"])
    assert found.meta["revision"] == {"sha": SHA, "dirty": False, "digest": source_digest()}


def test_a_plan_made_from_other_sources_is_marked_dirty(plan: Plan) -> None:
    other = Plan(plan.config, plan.argv, Revision(SHA, dirty=False, digest="0" * 64))
    other.write(Path("plan.json"))
    revision = plans.read(Path("plan.json")).revision
    assert (revision.dirty, revision.digest, revision.plan_digest) == (True, source_digest(), "0" * 64)


def test_a_plan_survives_the_journey(plan: Plan) -> None:
    plan.write(Path("plan.json"))
    assert plans.read(Path("plan.json")) == plan
    assert [path.name for path in Path().iterdir()] == ["plan.json"]


def test_a_plan_with_a_typo_is_told_like_an_override(capfd: pytest.CaptureFixture[str], plan: Plan) -> None:
    plan.write(Path("plan.json"))
    Path("plan.json").write_text(Path("plan.json").read_text().replace('"vocab"', '"vocap"'))
    assert run.main(["--plan", "plan.json"]) == 2
    assert "head.vocap: unknown key (did you mean 'vocab'?)" in capfd.readouterr().err


TELLS_OF_ITS_ROUNDS = """
import sys
from pathlib import Path
from experiments import measure, run
one_round = measure._round
def told(*arguments):
    Path("round").touch()
    one_round(*arguments)
measure._round = told
sys.exit(run.main(sys.argv[1:]))
"""


def test_a_killed_run_leaves_nothing_that_loads() -> None:
    """SIGKILL in the middle of the rounds: the longest part of a run."""
    command = [sys.executable, "-c", TELLS_OF_ITS_ROUNDS, "experiment.timing.rounds=1000000"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        ends = time.monotonic() + 60
        while not Path("round").exists() and time.monotonic() < ends:
            time.sleep(0.02)
        assert Path("round").exists()
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [path for path in Path().rglob("*") if path.name == "run.json"] == []
