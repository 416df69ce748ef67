from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from experiments import record
from scripts import publish

RUN_ID = "20260101T000000Z-cpu-01234567"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A minimal finished run."""
    row = {"backend": "b", "variant": "resident", "steps": 1, "replica": 0, "step": 0, "time_us": 2.0}
    empty: dict[str, Any] = dict.fromkeys(record.schema()["run"], "")
    revision = {"sha": "a" * 40, "dirty": False, "digest": "b" * 64}
    meta = {**empty, "schema_version": 1, "run_id": RUN_ID, "experiment": "step_slope", "status": "ok", "revision": revision}
    meta |= {"config": {"device": {}}, "device": {"spec": "cpu"}}
    return record.write(record.Run(meta, {"step_clocks": record.table("step_clocks", [row], RUN_ID)}), tmp_path / "runs")


def _edit(folder: Path, **change: Any) -> None:
    meta = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**meta, **change}))


def test_a_finished_clean_run_is_copied_as_it_is(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "scratch.log").write_text("not part of the record")
    assert publish.main([str(run_dir), "--results", str(tmp_path / "results")]) == 0
    place = tmp_path / "results" / "step_slope" / RUN_ID
    assert capsys.readouterr().out.strip() == str(place)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == {
        name: (run_dir / name).read_bytes() for name in ("run.json", "step_clocks.parquet")
    }
    assert record.load(place).tables["step_clocks"].column("time_us").to_pylist() == [2.0]
    assert publish.main([str(run_dir), "--results", str(tmp_path / "results")]) == 2
    assert "is published already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: _edit(folder, revision={"sha": "a" * 40, "dirty": True, "digest": "b" * 64}), "differs from commit aaaaaaaaaaaa"),
        (lambda folder: _edit(folder, status="timeout", reason="slow"), "status is timeout, but step_clocks has 1 rows"),
        (lambda folder: (folder / "step_clocks.parquet").write_bytes(b"x"), "differs from the sha256"),
        (
            lambda folder: pq.write_table(
                pq.read_table(folder / "step_clocks.parquet"), folder / "step_clocks.parquet", compression="gzip"
            ),
            "sha256",
        ),
        (lambda folder: (folder / "run.json").unlink(), "not a finished run"),
    ],
)
def test_anything_else_is_refused_in_one_sentence(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Any, message: str
) -> None:
    spoil(run_dir)
    assert publish.main([str(run_dir), "--results", str(tmp_path / "results")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list((tmp_path / "results").rglob("*.json"))


def test_one_refused_run_keeps_the_others_from_being_copied(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    assert publish.main([str(run_dir), str(tmp_path / "none"), "--results", str(results)]) == 2
    assert "none is not a finished run" in capsys.readouterr().err
    assert not results.exists()
    assert publish.main([str(run_dir), str(run_dir), "--results", str(results)]) == 0
    assert [path.name for path in (results / "step_slope").iterdir()] == [RUN_ID]


def test_results_that_can_not_be_written_are_one_sentence(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results").write_text("a file")
    assert publish.main([str(run_dir), "--results", str(tmp_path / "results")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"publish: {tmp_path / 'results'}")
    assert error.count("\n") == 1


def test_a_copy_that_does_not_load_is_never_in_its_place(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish.shutil, "copyfile", lambda source, target: target.write_bytes(source.read_bytes()[:-9]))
    with pytest.raises(record.RecordError):
        publish.publish(run_dir, tmp_path / "results")
    assert list((tmp_path / "results" / "step_slope").iterdir()) == []


def test_a_run_that_is_not_ok_is_refused(run_dir: Path, tmp_path: Path) -> None:
    run = record.load(run_dir)
    empty = {"step_clocks": run.tables["step_clocks"].slice(0, 0)}
    failed = record.write(record.Run({**run.meta, "run_id": "r", "status": "timeout", "reason": "slow"}, empty), tmp_path / "runs")
    with pytest.raises(publish.Refused, match="ended as timeout"):
        publish.publish(failed, tmp_path / "results")
