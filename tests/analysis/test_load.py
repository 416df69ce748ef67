from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from analysis.load import InvalidRun, MissingResults, load_run, newest_run, schema
from tests.data import make_runs

DEVICE = {"spec": "h200", "name": "NVIDIA H200"}


def _write(root: Path, change: Callable[[dict[str, pd.DataFrame]], None] = lambda tables: None, **manifest: Any) -> Path:
    tables = make_runs.step_slope_tables({"resident": (15.0, 2.5)})
    change(tables)
    return make_runs.write_run(root, "step_slope", tables, run_id="20260101T000000Z-h200-00000000", device=DEVICE, **manifest)


def test_a_good_run_loads_with_all_its_rows(tmp_path: Path) -> None:
    run = load_run(_write(tmp_path))
    assert (run.run_id, run.experiment, run.hardware) == ("20260101T000000Z-h200-00000000", "step_slope", "NVIDIA H200")
    assert len(run.table("samples")) == 5 * 7 * 2 * 2 * 3
    assert set(run.table("samples").columns) == set(schema()["tables"]["samples"])


def _edit_manifest(path: Path, **values: Any) -> None:
    data = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(data | values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"schema_version": 99}, "schema_version 99"),
        ({"status": "fine"}, "status 'fine'"),
        ({"status": "incorrect"}, "status incorrect and yet"),
        ({"run_id": "other"}, "describes step_slope/other"),
        ({"experiment": "other"}, "describes other/"),
        ({"surprise": 1}, "unknown keys ['surprise']"),
        ({"tables": {}}, "not listed"),
        ({"tables": {"strange": {"rows": 0, "sha256": ""}}}, "not listed"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    path = _write(tmp_path)
    _edit_manifest(path, **values)
    with pytest.raises(InvalidRun) as error:
        load_run(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_key_is_refused_by_name(tmp_path: Path) -> None:
    path = _write(tmp_path)
    data = json.loads((path / "run.json").read_text())
    del data["revision"]
    (path / "run.json").write_text(json.dumps(data))
    with pytest.raises(InvalidRun, match=r"lacks the keys \['revision'\]"):
        load_run(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "holds [] where a mapping with the key schema_version must be"),
        ("null", "holds None where a mapping with the key schema_version must be"),
        ('{"schema_version": 1}', "lacks the keys ['argv', 'config'"),
        ({"device": "h200"}, "has device = 'h200', which must be a mapping"),
        ({"device": {"name": "NVIDIA H200"}}, "has device.spec = None, which must be a text"),
        ({"config": {"device": "h200"}}, "has config.device = 'h200', which must be a mapping"),
        ({"revision": "abc"}, "has revision = 'abc', which must be a mapping"),
        ({"revision": {"sha": "abc"}}, "has revision.dirty = None, which must be true or false"),
        ({"tables": ["samples"]}, "has tables = ['samples'], which must be a mapping"),
        ({"tables": {"samples": 3}}, "has tables.samples = 3, which must be a mapping"),
        ({"tables": {"samples": {"rows": 1}}}, "has tables.samples.sha256 = None, which must be a text"),
        ({"run_id": 3}, "has run_id = 3, which must be a text"),
    ],
)
def test_a_corrupt_manifest_is_refused_by_file_key_and_remedy(tmp_path: Path, text: str | dict[str, Any], words: str) -> None:
    path = _write(tmp_path)
    if isinstance(text, str):
        (path / "run.json").write_text(text)
    else:
        _edit_manifest(path, **text)
    for read in (lambda: load_run(path), lambda: newest_run(tmp_path, "step_slope", "h200")):
        with pytest.raises(InvalidRun) as error:
            read()
        assert f"{path / 'run.json'} {words}" in str(error.value)
        assert "; measure it again, or copy the whole folder again" in str(error.value)


def test_an_altered_table_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path)
    with (path / "samples.parquet").open("ab") as file:
        file.write(b"x")
    with pytest.raises(InvalidRun, match=r"samples.parquet was altered: its sha256 is"):
        load_run(path)


def test_a_missing_table_and_a_cut_manifest_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path)
    (path / "cells.parquet").unlink()
    with pytest.raises(InvalidRun, match=r"cells\.parquet is missing"):
        load_run(path)
    (path / "run.json").write_text("{")
    with pytest.raises(InvalidRun, match="is not JSON"):
        load_run(path)
    (path / "run.json").unlink()
    with pytest.raises(InvalidRun, match="does not exist"):
        load_run(path)


def test_an_unfinished_run_is_refused_and_never_found(tmp_path: Path) -> None:
    path = _write(tmp_path)
    partial = path.with_name(f".partial-{path.name}")
    shutil.copytree(path, partial)
    with pytest.raises(InvalidRun, match="unfinished"):
        load_run(partial)
    assert newest_run(tmp_path, "step_slope").path == path
    shutil.rmtree(path)
    with pytest.raises(MissingResults):
        newest_run(tmp_path, "step_slope")


def test_wrong_rows_columns_and_types_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path)
    data = json.loads((path / "run.json").read_text())
    data["tables"]["samples"]["rows"] += 1
    _edit_manifest(path, tables=data["tables"])
    with pytest.raises(InvalidRun, match=r"samples\.parquet has 420 rows but run.json says 421"):
        load_run(path)
    table = pq.read_table(path / "samples.parquet").drop_columns("order")
    table = table.set_column(table.column_names.index("steps"), "steps", table["steps"].cast("int64"))
    pq.write_table(table, path / "samples.parquet")
    data["tables"]["samples"] = {"rows": 420, "sha256": hashlib.sha256((path / "samples.parquet").read_bytes()).hexdigest()}
    _edit_manifest(path, tables=data["tables"])
    with pytest.raises(InvalidRun, match="order: None, wanted int32; steps: int64, wanted int32"):
        load_run(path)


def _fail_cell(tables: dict[str, pd.DataFrame]) -> None:
    tables["cells"].loc[3, ["status", "reason"]] = ["incorrect", "token 3 differs"]


def _forget_cell(tables: dict[str, pd.DataFrame]) -> None:
    tables["cells"] = tables["cells"].drop(index=3)


def _repeat_cell(tables: dict[str, pd.DataFrame]) -> None:
    tables["cells"] = pd.concat([tables["cells"], tables["cells"].iloc[[3]]])


def _negative(tables: dict[str, pd.DataFrame]) -> None:
    tables["samples"].loc[7, "time_us"] = -1.0


def _not_a_number(tables: dict[str, pd.DataFrame]) -> None:
    tables["samples"].loc[7, "time_us"] = float("nan")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_fail_cell, "(resident, steps 7, replica 0) whose check is incorrect"),
        (_forget_cell, "(resident, steps 7, replica 0) whose check is absent"),
        (_repeat_cell, "states a cell twice"),
        (_negative, "1 samples that are no times (first: -1.0 us)"),
        (_not_a_number, "1 samples that are no times (first: nan us)"),
        (lambda tables: tables.pop("cells"), "has no table 'cells'"),
    ],
)
def test_samples_that_nobody_vouches_for_are_refused(tmp_path: Path, change: Callable[[dict[str, pd.DataFrame]], Any], words: str) -> None:
    path = _write(tmp_path, change)
    with pytest.raises(InvalidRun) as error:
        load_run(path)
    assert words in str(error.value)


def test_ok_without_rows_is_refused(tmp_path: Path) -> None:
    def empty(tables: dict[str, pd.DataFrame]) -> None:
        for name in tables:
            tables[name] = tables[name].iloc[:0]

    with pytest.raises(InvalidRun, match="status ok but no rows in any table"):
        load_run(_write(tmp_path, empty))


def test_a_failed_run_without_samples_loads_and_is_never_the_newest(tmp_path: Path) -> None:
    good = _write(tmp_path)
    make_runs.write_run(tmp_path, "step_slope", {}, run_id="20270101T000000Z-h200-00000000", device=DEVICE, status="timeout")
    assert load_run(tmp_path / "step_slope" / "20270101T000000Z-h200-00000000").manifest["status"] == "timeout"
    assert newest_run(tmp_path, "step_slope", "h200").path == good


def test_the_newest_run_of_a_device_is_chosen(tmp_path: Path) -> None:
    for run_id, device in (("20260101T000000Z-a", "h200"), ("20260301T000000Z-b", "h200"), ("20260401T000000Z-c", "b200")):
        make_runs.write_run(
            tmp_path,
            "step_slope",
            make_runs.step_slope_tables({"resident": (15.0, 2.5)}),
            run_id=run_id,
            device={"spec": device, "name": ""},
        )
    assert newest_run(tmp_path, "step_slope", "h200").run_id == "20260301T000000Z-b"
    assert newest_run(tmp_path, "step_slope").run_id == "20260401T000000Z-c"
    assert newest_run(tmp_path, "step_slope", "b200").run_id == "20260401T000000Z-c"


def test_missing_results_carry_the_command_that_measures_them(tmp_path: Path) -> None:
    with pytest.raises(MissingResults) as error:
        newest_run(tmp_path, "step_slope", "h200")
    assert error.value.command == "python -m experiments.run experiment=step_slope device=h200"
    assert error.value.command in error.value.args[0]


def test_the_committed_fixture_runs_load() -> None:
    root = Path(make_runs.__file__).parent / "results"
    for experiment in ("step_slope", "toy_walk", "capacity", "packing_map"):
        assert newest_run(root, experiment).manifest["status"] == "ok"
