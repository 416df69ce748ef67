from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments import record
from experiments.record import RecordError, Run

MakeRun = Callable[..., Run]


def test_what_is_written_is_what_loads(make_run: MakeRun, tmp_path: Path) -> None:
    place = record.write(make_run(sample={"time_us": 12.5}), tmp_path)
    found = record.load(place)
    assert place.name == found.meta["run_id"]
    assert found.tables["samples"].column("time_us").to_pylist() == [12.5, 5.0]
    assert found.tables["samples"].schema.field("steps").type == pa.int32()
    assert found.meta["tables"]["samples"]["rows"] == 2
    assert {path.name for path in place.iterdir()} == {"run.json", "samples.parquet", "cells.parquet"}
    assert [path.name for path in tmp_path.iterdir()] == [place.name]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"time_us": None}, "time_us: expected float64, got None"),
        ({"time_us": float("nan")}, "nan is not a finite number"),
        ({"steps": 3.0}, "steps: expected int32, got 3.0"),
        ({"steps": True}, "steps: expected int32, got True"),
        ({"valid": 1}, "valid: expected bool, got 1"),
        ({"l2": None}, "l2: expected string, got None"),
        ({"extra": 1}, "unknown columns \\['extra'\\]"),
        ({"vocab": 2**31}, "samples"),
    ],
)
def test_a_row_of_another_shape_is_no_table(make_run: MakeRun, rows: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        make_run(sample=rows)


def test_a_missing_column_and_an_unknown_table_are_named() -> None:
    with pytest.raises(RecordError, match="missing columns .*'step'"):
        record.table("step_clocks", [{"backend": "b"}], "r")
    with pytest.raises(RecordError, match="no table 'sample'; it has: samples"):
        record.table("sample", [], "r")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample": {"time_us": -1.0}}, "time_us -1.0 is not a positive"),
        ({"sample": {"time_us": 0.0}}, "time_us 0.0 is not a positive"),
        ({"sample": {"clock_mhz": -1.0}}, "clock_mhz -1.0"),
        ({"sample": {"steps": 4}}, "a sample of reference at 4 steps, replica 0, whose cell is not ok"),
        ({"cell": {"status": "incorrect", "reason": "x"}}, "whose cell is not ok"),
        ({"cell": {"replica": 1}}, "replica 0, whose cell is not ok"),
        ({"status": "timeout", "reason": "late"}, "status is timeout, but samples has 2 rows"),
        ({"status": "fine"}, "status 'fine' is not one of"),
        ({"revision": {}}, "lacks its commit"),
        ({"run_id": "other"}, "rows of another run"),
        ({"more": 1}, "unknown \\['more'\\]"),
    ],
)
def test_a_record_that_breaks_a_rule_is_not_written(make_run: MakeRun, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        record.write(make_run(**change), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_ok_needs_rows_and_anything_else_a_reason(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    empty = {name: rows.slice(0, 0) for name, rows in run.tables.items()}
    with pytest.raises(RecordError, match="no table has a row"):
        record.write(Run(run.meta, empty), tmp_path)
    with pytest.raises(RecordError, match="no reason is given"):
        record.write(Run({**run.meta, "status": "unsupported"}, empty), tmp_path)
    record.write(Run({**run.meta, "status": "unsupported", "reason": "no GPU"}, empty), tmp_path)


def test_a_run_is_never_overwritten(make_run: MakeRun, tmp_path: Path) -> None:
    place = record.write(make_run(), tmp_path)
    with pytest.raises(RecordError, match="never overwritten"):
        record.write(make_run(sample={"time_us": 1.0}), tmp_path)
    assert record.load(place).tables["samples"].column("time_us").to_pylist() == [5.0, 5.0]


def _edit(place: Path, **change: Any) -> None:
    meta = json.loads((place / "run.json").read_text())
    (place / "run.json").write_text(json.dumps({**meta, **change}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda place: (place / "run.json").unlink(), "not a finished run"),
        (lambda place: (place / "run.json").write_text("{"), "Expecting"),
        (lambda place: (place / "samples.parquet").unlink(), "samples.parquet is missing or differs"),
        (
            lambda place: (place / "samples.parquet").write_bytes((place / "samples.parquet").read_bytes()[:-1] + b"x"),
            "differs from the sha256",
        ),
        (
            lambda place: pq.write_table(pq.read_table(place / "cells.parquet").slice(0, 0), place / "cells.parquet"),
            "differs from the sha256",
        ),
        (lambda place: _edit(place, schema_version=2), "schema_version 2; this code reads 1"),
        (lambda place: _edit(place, status="timeout", reason="x"), "samples has 2 rows"),
        (lambda place: _edit(place, run_id="other"), "rows of another run"),
    ],
)
def test_a_spoiled_folder_does_not_load(make_run: MakeRun, tmp_path: Path, spoil: Callable[[Path], Any], message: str) -> None:
    place = record.write(make_run(), tmp_path)
    spoil(place)
    with pytest.raises(RecordError, match=message):
        record.load(place)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "holds [] where a mapping with the key schema_version must be"),
        ("null", "holds None where a mapping with the key schema_version must be"),
        ('{"schema_version": 1}', "lacks the keys ['argv', 'config'"),
        ({"device": "h200"}, "has device = 'h200', which must be a mapping"),
        ({"device": {"name": "NVIDIA H200"}}, "has device.spec = None, which must be a text"),
        ({"config": {"device": "h200"}}, "has config.device = 'h200', which must be a mapping"),
        ({"revision": None}, "has revision = None, which must be a mapping"),
        ({"revision": {"sha": "abc", "dirty": ""}}, "has revision.dirty = '', which must be true or false"),
        ({"tables": ["samples"]}, "has tables = ['samples'], which must be a mapping"),
        ({"tables": {"samples": 3}}, "has tables.samples = 3, which must be a mapping"),
        ({"tables": {"samples": {"rows": 1}}}, "has tables.samples.sha256 = None, which must be a text"),
    ],
)
def test_a_corrupt_manifest_is_refused_by_file_key_and_remedy(
    make_run: MakeRun, tmp_path: Path, text: str | dict[str, Any], words: str
) -> None:
    place = record.write(make_run(), tmp_path)
    if isinstance(text, str):
        (place / "run.json").write_text(text)
    else:
        _edit(place, **text)
    with pytest.raises(RecordError) as error:
        record.load(place)
    assert str(error.value).startswith(f"{place}: run.json {words}")
    assert "; measure it again, or copy the whole folder again" in str(error.value)


def test_bytes_that_are_no_text_are_refused(make_run: MakeRun, tmp_path: Path) -> None:
    place = record.write(make_run(), tmp_path)
    (place / "run.json").write_bytes(b"\xff\xfe")
    with pytest.raises(RecordError, match="can't decode"):
        record.load(place)


@pytest.mark.parametrize("moment", ["run.json", "rename"])
def test_a_killed_writer_leaves_nothing_that_loads(make_run: MakeRun, tmp_path: Path, moment: str) -> None:
    run = make_run()
    child = os.fork()
    if child == 0:
        kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        setattr(Path, "write_text" if moment == "run.json" else "rename", kill)
        record.write(run, tmp_path)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".partial-")
    with pytest.raises(RecordError, match="did not finish"):
        record.load(left)
    assert record.load(record.write(run, tmp_path)).meta["status"] == "ok"  # and the next try is not in its way
