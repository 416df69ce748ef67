"""Recorded runs, validated as they are loaded. `results/schema.json` is the only definition of their shape."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

RESULTS = Path(__file__).resolve().parent.parent / "results"
AGAIN = "measure it again, or copy the whole folder again from the machine that measured it"
_KINDS = {"mapping": (dict, "a mapping"), "string": (str, "a text"), "bool": (bool, "true or false"), "int": (int, "a whole number")}


class InvalidRun(ValueError):
    """A run folder that must not be believed. The message names the file, the values and the fix."""


class MissingResults(LookupError):
    """No published run answers the question. `command` is the shell line that measures it."""

    def __init__(self, what: str, command: str) -> None:
        super().__init__(f"{what}; measure it with `{command}`, then publish it with `python -m scripts.publish RUN_DIR`.")
        self.command = command


@dataclass(frozen=True)
class Run:
    """One measured run: its folder, its `run.json` and its tables by name."""

    path: Path
    manifest: Mapping[str, Any]
    tables: Mapping[str, pd.DataFrame]

    @property
    def run_id(self) -> str:
        return self.manifest["run_id"]

    @property
    def experiment(self) -> str:
        return self.manifest["experiment"]

    @property
    def hardware(self) -> str:
        """The GPU as the driver names it, or the name of its spec where there is none."""
        device = self.manifest["device"]
        return str(device.get("name") or device["spec"])

    def table(self, name: str) -> pd.DataFrame:
        """The table called `name`; InvalidRun if this run did not write it."""
        if name not in self.tables:
            known = ", ".join(self.tables) or "none"
            raise InvalidRun(f"{self.path} has no table {name!r} (it has: {known}); {AGAIN}.")
        return self.tables[name]


@cache
def schema(path: Path = RESULTS / "schema.json") -> Mapping[str, Any]:
    """The shape of `run.json` and of every table."""
    return json.loads(path.read_text())


def measure_command(experiment: str, device: str) -> str:
    """The shell line that measures `experiment` on `device`."""
    return f"python -m experiments.run experiment={experiment} device={device}"


def load_run(path: Path | str) -> Run:
    """The run in folder `path`, checked against the schema.

    Raises:
        InvalidRun: an unfinished, unknown, altered or self-contradicting run; one sentence with the file, the values and the fix.
    """
    path = Path(path)
    manifest = _manifest(path)
    listed = manifest["tables"]
    for file in sorted(path.glob("*.parquet")):
        if file.stem not in listed:
            raise InvalidRun(f"{file} is not listed among the tables of run.json ({', '.join(listed) or 'none'}); delete the stray file.")
    run = Run(path, manifest, {name: _table(path / f"{name}.parquet", name, manifest) for name in listed})
    _check_status(run)
    for timed, cells in schema()["timed"].items():
        _check_samples(run, timed, cells)
    return run


def all_runs(root: Path | str, experiment: str, device: str | None) -> list[Run]:
    """Every run of `experiment` with status ok on `device`, or on any if that is None, the newest first.

    Raises:
        InvalidRun: one of them, or the run.json of any other of `experiment`, must not be believed.
    """
    return [load_run(path) for path in reversed(_ok_folders(root, experiment, device))]


def newest_run(root: Path | str, experiment: str, device: str | None = None) -> Run:
    """The newest run of `experiment` with status ok, on `device` if given.

    Raises:
        MissingResults: there is none; the error carries the command that measures it.
        InvalidRun: that run, or the run.json of any other of `experiment`, must not be believed.
    """
    paths = _ok_folders(root, experiment, device)
    if not paths:
        on = f" on device={device}" if device else ""
        raise MissingResults(f"{root} holds no run of experiment={experiment}{on}", measure_command(experiment, device or "cpu"))
    return load_run(paths[-1])


def _ok_folders(root: Path | str, experiment: str, device: str | None) -> list[Path]:
    folders = [path for path in sorted((Path(root) / experiment).glob("[!.]*")) if path.is_dir()]
    return [path for path in folders if _is_ok(_manifest(path), device)]


def _is_ok(manifest: Mapping[str, Any], device: str | None) -> bool:
    return manifest["status"] == "ok" and device in (None, manifest["device"]["spec"])


def _manifest(path: Path) -> dict[str, Any]:
    file = path / "run.json"
    if path.name.startswith("."):
        raise InvalidRun(f"{path} is an unfinished run; delete it and measure again.")
    try:
        manifest = json.loads(file.read_text())
    except FileNotFoundError:
        raise InvalidRun(f"{file} does not exist, so {path} is not a run; {AGAIN}.") from None
    except ValueError as error:
        raise InvalidRun(f"{file} is not JSON ({error}); {AGAIN}.") from None
    if not isinstance(manifest, dict):
        raise InvalidRun(f"{file} holds {_short(manifest)} where a mapping with the key schema_version must be; {AGAIN}.")
    version, known = manifest.get("schema_version"), schema()["schema_version"]
    if version != known:
        raise InvalidRun(
            f"{file} has schema_version {version} but this suite reads {known}; use the suite of that version, or measure it again."
        )
    missing, unknown = set(schema()["run"]) - set(manifest), set(manifest) - set(schema()["run"])
    if missing or unknown:
        raise InvalidRun(f"{file} lacks the keys {sorted(missing)} and has the unknown keys {sorted(unknown)}; {AGAIN}.")
    _check_shape(file, manifest)
    if manifest["status"] not in schema()["status"]:
        raise InvalidRun(f"{file} has status {manifest['status']!r}, which is none of {', '.join(schema()['status'])}; {AGAIN}.")
    if (manifest["run_id"], manifest["experiment"]) != (path.name, path.parent.name):
        own = f"{manifest['experiment']}/{manifest['run_id']}"
        raise InvalidRun(f"{file} describes {own} but lies in {path.parent.name}/{path.name}; move the folder to {own}.")
    return manifest


def _check_shape(file: Path, manifest: Mapping[str, Any]) -> None:
    shape = {tuple(path.split(".")): kind for path, kind in schema()["types"].items()}
    for name in manifest["tables"] if isinstance(manifest["tables"], dict) else ():
        shape |= {("tables", name): "mapping", ("tables", name, "rows"): "int", ("tables", name, "sha256"): "string"}
    for keys, kind in shape.items():
        value: Any = manifest
        for key in keys:  # parents stand before their children, so every parent is a mapping by now
            value = value.get(key)
        wanted, words = _KINDS[kind]
        if not isinstance(value, wanted):
            raise InvalidRun(f"{file} has {'.'.join(keys)} = {_short(value)}, which must be {words}; {AGAIN}.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _table(file: Path, name: str, manifest: Mapping[str, Any]) -> pd.DataFrame:
    if name not in schema()["tables"]:
        raise InvalidRun(
            f"{file.parent / 'run.json'} lists a table {name!r} that results/schema.json does not know; add it there or remove it."
        )
    if not file.exists():
        raise InvalidRun(f"{file} is missing though run.json lists it; {AGAIN}.")
    stated, found = manifest["tables"][name], hashlib.sha256(file.read_bytes()).hexdigest()
    if found != stated["sha256"]:
        raise InvalidRun(f"{file} was altered: its sha256 is {found[:12]}... but run.json says {stated['sha256'][:12]}...; {AGAIN}.")
    try:
        table = pq.read_table(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise InvalidRun(f"{file} is not a parquet file ({error}); {AGAIN}.") from None
    wanted = {column: pa.type_for_alias(alias) for column, alias in schema()["tables"][name].items()}
    wrong = {column for column in wanted.keys() | set(table.column_names) if _type(table, column) != wanted.get(column)}
    if wrong:
        detail = "; ".join(f"{column}: {_type(table, column)}, wanted {wanted.get(column)}" for column in sorted(wrong))
        raise InvalidRun(f"{file} has wrong columns ({detail}); {AGAIN}.")
    if table.num_rows != stated["rows"]:
        raise InvalidRun(f"{file} has {table.num_rows} rows but run.json says {stated['rows']}; {AGAIN}.")
    strangers = set(table["run_id"].unique().to_pylist()) - {manifest["run_id"]}
    if strangers:
        raise InvalidRun(f"{file} has rows of another run ({sorted(strangers)[0]}, not {manifest['run_id']}); {AGAIN}.")
    return table.to_pandas()


def _type(table: pa.Table, column: str) -> pa.DataType | None:
    return table.schema.field(column).type if column in table.column_names else None


def _check_status(run: Run) -> None:
    rows = {name: len(table) for name, table in run.tables.items()}
    status = run.manifest["status"]
    if status == "ok" and not sum(rows.values()):
        raise InvalidRun(f"{run.path} has status ok but no rows in any table ({rows}); {AGAIN}.")
    measured = sum(rows.get(name, 0) for name in schema()["timed"])
    if status != "ok" and measured:
        raise InvalidRun(
            f"{run.path} has status {status} and yet {measured} measured rows, which nobody checked; delete it and measure it again."
        )


def _check_samples(run: Run, timed: str, checked: str) -> None:
    """Every time of the table `timed` must be a time, and belong to a cell of the table `checked`, if there is one, whose answers are right."""
    samples = run.tables.get(timed, pd.DataFrame())
    if samples.empty:
        return
    file = run.path / f"{timed}.parquet"
    bad = samples[~(samples["time_us"] > 0) | (samples["time_us"] == float("inf"))]
    if len(bad):
        raise InvalidRun(f"{file} has {len(bad)} samples that are no times (first: {bad['time_us'].iloc[0]} us); {AGAIN}.")
    if not checked:
        return
    tables = schema()["tables"]
    key = [column for column in tables[timed] if column in tables[checked]]
    cells = run.table(checked)
    named = samples[key].drop_duplicates().merge(cells[[*key, "status"]], on=key, how="left")
    if named.duplicated(key).any():
        raise InvalidRun(f"{run.path / checked}.parquet states a cell twice; {AGAIN}.")
    unchecked = named[named["status"] != "ok"]
    if len(unchecked):
        cell = unchecked.iloc[0]
        verdict = cell["status"] if isinstance(cell["status"], str) else "absent"
        where = f"{cell.get('variant') or cell.get('protocol')}, steps {cell['steps']}, replica {cell.get('replica', 0)}"
        raise InvalidRun(f"{file} times the cell ({where}) whose check is {verdict} in {checked}.parquet; {AGAIN}.")
