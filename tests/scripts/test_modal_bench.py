"""The launcher without an account and without a network: Modal's own `.local()` runs the container's half in this process."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

modal = pytest.importorskip("modal", reason="needs the extra [modal]; `make test` installs it")

from experiments import plan as planning  # noqa: E402
from experiments import provenance, record  # noqa: E402
from kernels import device  # noqa: E402
from scripts import modal_bench  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = "experiment=smoke head.vocab=64 head.rank=8 experiment.timing.rounds=2 experiment.steps=[1,2]"


REVISION = "0123456789" * 4


@pytest.fixture(scope="module", autouse=True)
def _a_known_revision() -> Iterator[None]:
    """The tests must not depend on the state of this checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(provenance.VARIABLE, f"{REVISION}@{provenance.source_digest()}")
        yield


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """What the container's half returns for a small plan on the CPU."""
    return modal_bench.measure.local(modal_bench.compose("cpu", SMALL)[0])


def test_every_gpu_is_a_known_device_and_none_may_be_swapped() -> None:
    for name in modal_bench.GPUS:
        assert device.load(name.lower()).product == name
    assert modal_bench.GPUS["H100"] == "H100!"
    assert not any("+" in word or ":" in word for word in modal_bench.GPUS.values())


def test_the_function_retries_nothing_and_shares_no_container(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    real = modal.App.function
    monkeypatch.setattr(modal.App, "function", lambda self, **options: asked.append(options) or real(self, **options))
    again = importlib.reload(modal_bench)
    assert asked[0]["retries"] == 0
    assert asked[0]["single_use_containers"]
    assert asked[0]["image"] is again.image
    with pytest.warns(match="registered_functions"):
        assert list(again.app.registered_functions) == ["measure"]


def test_the_image_holds_what_decides_a_number() -> None:
    assert set(modal_bench.SOURCES) == set(provenance.ROOMS)


def test_it_sends_the_plan_that_plan_py_writes(tmp_path: Path) -> None:
    overrides = ["experiment=step_slope", "experiment.replicas=5"]
    assert planning.main(["-o", str(tmp_path / "plan.json"), *overrides, "device=b200"]) == 0
    assert modal_bench.compose("B200", " ".join(overrides)) == [(tmp_path / "plan.json").read_text()]


def test_a_semicolon_starts_the_next_plan() -> None:
    plans = [json.loads(text) for text in modal_bench.compose("H200", "experiment=step_slope; experiment=smoke ;")]
    assert [plan["config"]["experiment"]["name"] for plan in plans] == ["step_slope", "smoke"]
    assert {plan["config"]["device"]["name"] for plan in plans} == {"h200"}


@pytest.mark.parametrize(
    ("overrides", "sentence"), [("device=h100", "leave device= out"), ("experimnt=smoke", "experimnt"), (" ; ", "no plan")]
)
def test_a_wrong_order_is_refused_here(overrides: str, sentence: str) -> None:
    with pytest.raises(SystemExit, match=sentence):
        modal_bench.compose("H200", overrides)


def test_a_run_comes_home_as_it_was_written(files: dict[str, bytes], tmp_path: Path) -> None:
    (folder,) = modal_bench.bring_home(files, tmp_path)
    run = record.load(folder)
    assert run.meta["status"] == "ok"
    assert run.meta["revision"]["sha"] == REVISION
    assert run.tables["samples"].num_rows > 0
    assert folder.parent == tmp_path / "smoke"
    with pytest.raises(FileExistsError, match="never overwritten"):
        modal_bench.bring_home(files, tmp_path)


def test_a_damaged_run_is_refused_and_leaves_nothing(files: dict[str, bytes], tmp_path: Path) -> None:
    name = next(name for name in files if name.endswith("samples.parquet"))
    damaged = {**files, name: files[name][:-1] + b"?"}
    with pytest.raises(record.RecordError, match="sha256"):
        modal_bench.bring_home(damaged, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_gpu_than_the_plans_is_an_error() -> None:
    import torch

    name = "B200" if not torch.cuda.is_available() or "B200" not in torch.cuda.get_device_name(0) else "H200"
    with pytest.raises(RuntimeError, match=f"device={name.lower()}"):
        modal_bench.measure.local(modal_bench.compose(name, "experiment=smoke")[0])


class RentedGpus:
    """Plays Modal's side: every plan of a starmap runs through `.local()`, or fails as a container would."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.gpu, self.sent = files, "", 0

    def with_options(self, *, gpu: str) -> RentedGpus:
        self.gpu = gpu
        return self

    def starmap(self, inputs: Sequence[tuple[str]], **options: Any) -> Iterator[Any]:
        assert options == {"order_outputs": False, "return_exceptions": True}
        for (plan,) in inputs:
            self.sent += 1
            name = json.loads(plan)["config"]["experiment"]["name"]
            yield {"smoke": self.files, "capacity": {"capacity/x/run.json": b"{}"}}.get(name, RuntimeError("the container fell over"))


def test_plans_fan_out_and_one_failure_costs_no_other_run(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rented = RentedGpus(files)
    monkeypatch.setattr(modal_bench, "measure", rented)
    with pytest.raises(SystemExit) as ended:
        modal_bench.main(
            "--gpu", "H100", "--overrides", "experiment=step_slope; experiment=capacity; experiment=smoke", "--output", str(tmp_path)
        )
    said = capsys.readouterr()
    assert ended.value.code == 1
    assert (rented.gpu, rented.sent) == ("H100!", 3)
    assert "no run came back: the container fell over" in said.err
    assert "the run that came back is refused" in said.err
    assert ": ok on " in said.out
    assert len(list(tmp_path.glob("smoke/*/run.json"))) == 1


def test_a_dry_run_needs_no_account(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MODAL_")} | {"HOME": str(tmp_path)}
    order = ["scripts/modal_bench.py", "--gpu", "B200", "--overrides", "experiment=step_slope", "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-m", "modal", "run", *order], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "gpu: B200" in done.stdout
    assert "requirements/dev.txt" in done.stdout
    assert '"name": "step_slope"' in done.stdout
