"""One run, one folder: `run.json` and a parquet file for every table, written whole or not at all.

The shape is `results/schema.json`, which `analysis` reads too. A folder is written under a hidden name beside its place and
renamed at the end, so a killed run leaves nothing that loads.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = Path(__file__).resolve().parent.parent / "results" / "schema.json"
_TYPES = {
    "string": (pa.string(), str),
    "int32": (pa.int32(), int),
    "int64": (pa.int64(), int),
    "float32": (pa.float32(), (int, float)),
    "float64": (pa.float64(), (int, float)),
    "bool": (pa.bool_(), bool),
}
_KINDS = {"mapping": (dict, "a mapping"), "string": (str, "a text"), "bool": (bool, "true or false"), "int": (int, "a whole number")}
_AGAIN = "measure it again, or copy the whole folder again from the machine that measured it"


class RecordError(ValueError):
    """A run that must not be written, or a folder that must not be believed."""


@dataclass(frozen=True)
class Run:
    """`run.json` as a dict, and the tables by name."""

    meta: dict[str, Any]
    tables: dict[str, pa.Table]


@cache
def schema() -> dict[str, Any]:
    """results/schema.json."""
    return json.loads(SCHEMA.read_text())


def table(name: str, rows: Sequence[Mapping[str, Any]], run_id: str) -> pa.Table:
    """Rows as the typed table `name`; `run_id` becomes their first column.

    Raises:
        RecordError: unknown table, missing or extra column, wrong type, or a number that is not finite.
    """
    columns = schema()["tables"].get(name)
    if columns is None:
        raise RecordError(f"results/schema.json has no table {name!r}; it has: {', '.join(schema()['tables'])}")
    full = [{"run_id": run_id, **row} for row in rows]
    for place, row in enumerate(full):
        if set(row) != set(columns):
            missing, extra = sorted(set(columns) - set(row)), sorted(set(row) - set(columns))
            raise RecordError(f"{name} row {place}: missing columns {missing}, unknown columns {extra}")
        for column, kind in columns.items():
            _check_value(f"{name} row {place}, {column}", kind, row[column])
    try:
        return pa.Table.from_pylist(full, schema=_arrow(name))
    except (pa.ArrowInvalid, OverflowError) as error:
        raise RecordError(f"{name}: {error}") from error


def write(run: Run, folder: Path) -> Path:
    """Write `run` as `folder/RUN_ID` and return that path. Nothing is left behind on any error.

    Raises:
        RecordError: the run breaks a rule of :func:`check`, or a run of that name is there already.
    """
    place = folder / run.meta["run_id"]
    if place.exists():
        raise RecordError(f"{place} exists already; a run is never overwritten")
    partial = folder / f".partial-{run.meta['run_id']}-{os.getpid()}"
    partial.mkdir(parents=True)
    try:
        files = {}
        for name, rows in run.tables.items():
            pq.write_table(rows, partial / f"{name}.parquet")
            files[name] = {"rows": rows.num_rows, "sha256": _sha256(partial / f"{name}.parquet")}
        meta = {**run.meta, "tables": files}
        check(Run(meta, run.tables))
        (partial / "run.json").write_text(json.dumps({key: meta[key] for key in schema()["run"]}, indent=1, allow_nan=False) + "\n")
        _sync(partial)
        partial.rename(place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return place


def load(folder: Path) -> Run:
    """The run in `folder`, checked.

    Raises:
        RecordError: the folder is no finished run, or breaks a rule of :func:`check`; the message says which.
    """
    if folder.name.startswith(".") or not (folder / "run.json").is_file():
        raise RecordError(f"{folder} is not a finished run: it has no run.json, or was left by a run that did not finish")
    try:
        meta = _manifest(folder / "run.json")
        tables = {name: _read(folder, name, listed) for name, listed in meta["tables"].items()}
        check(Run(meta, tables))
    except (OSError, KeyError, ValueError) as error:  # RecordError, broken JSON or text, and ArrowInvalid are all ValueErrors
        raise RecordError(f"{folder}: {error}") from error
    return Run(meta, tables)


def check(run: Run) -> None:
    """The rules that every record keeps.

    Raises:
        RecordError: wrong keys or status; ok without rows, or measured rows without ok; samples of a cell that is not ok; foreign run_id; a time or clock that cannot be.
    """
    meta, status = run.meta, run.meta.get("status")
    if set(meta) != set(schema()["run"]):
        raise RecordError(
            f"run.json: missing {sorted(set(schema()['run']) - set(meta))}, unknown {sorted(set(meta) - set(schema()['run']))}"
        )
    if status not in schema()["status"]:
        raise RecordError(f"status {status!r} is not one of {', '.join(schema()['status'])}")
    if not meta["revision"].get("sha"):
        raise RecordError("the record lacks its commit (revision.sha)")
    if status == "ok" and not any(rows.num_rows for rows in run.tables.values()):
        raise RecordError("status is ok, but no table has a row")
    if status != "ok" and not meta["reason"]:
        raise RecordError(f"status is {status}, but no reason is given")
    for name, rows in run.tables.items():
        if rows.schema != _arrow(name):
            raise RecordError(f"{name}: columns {rows.schema.names} or their types differ from results/schema.json")
        if status != "ok" and name in schema()["timed"] and rows.num_rows:
            raise RecordError(f"status is {status}, but {name} has {rows.num_rows} rows")
        if set(rows.column("run_id").to_pylist()) - {meta["run_id"]}:
            raise RecordError(f"{name}: rows of another run than {meta['run_id']}")
    _check_times(run.tables)
    _check_cells(run.tables)


def _manifest(file: Path) -> dict[str, Any]:
    """run.json with every key that schema.json lists, each in the shape that its readers rely on."""
    meta = json.loads(file.read_text())
    if not isinstance(meta, dict):
        raise RecordError(f"{file.name} holds {_short(meta)} where a mapping with the key schema_version must be; {_AGAIN}")
    if meta.get("schema_version") != schema()["schema_version"]:
        raise RecordError(
            f"{file.name} has schema_version {meta.get('schema_version')!r}; this code reads {schema()['schema_version']}; {_AGAIN}"
        )
    missing, unknown = set(schema()["run"]) - set(meta), set(meta) - set(schema()["run"])
    if missing or unknown:
        raise RecordError(f"{file.name} lacks the keys {sorted(missing)} and has the unknown keys {sorted(unknown)}; {_AGAIN}")
    shape = {tuple(path.split(".")): kind for path, kind in schema()["types"].items()}
    for name in meta["tables"] if isinstance(meta["tables"], dict) else ():
        shape |= {("tables", name): "mapping", ("tables", name, "rows"): "int", ("tables", name, "sha256"): "string"}
    for keys, kind in shape.items():
        value: Any = meta
        for key in keys:  # parents stand before their children, so every parent is a mapping by now
            value = value.get(key)
        wanted, words = _KINDS[kind]
        if not isinstance(value, wanted):
            raise RecordError(f"{file.name} has {'.'.join(keys)} = {_short(value)}, which must be {words}; {_AGAIN}")
    return meta


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_times(tables: Mapping[str, pa.Table]) -> None:
    for name in schema()["timed"]:
        columns = tables[name].to_pydict() if name in tables else {}
        for time_us in columns.get("time_us", []):
            if time_us is None or not (math.isfinite(time_us) and time_us > 0):
                raise RecordError(f"{name}: time_us {time_us!r} is not a positive number")
        for clock_mhz in columns.get("clock_mhz", []):
            if clock_mhz is None or not (math.isfinite(clock_mhz) and clock_mhz >= 0):
                raise RecordError(f"{name}: clock_mhz {clock_mhz!r} is not a clock")


def _check_cells(tables: Mapping[str, pa.Table]) -> None:
    """Every sample belongs to a cell whose answers were right; a cell is named by the columns that both tables have."""
    known = schema()["tables"]
    for name, of in schema()["timed"].items():
        if not of or name not in tables:
            continue
        key = [column for column in known[name] if column in known[of]]
        cells = tables[of].to_pylist() if of in tables else []
        right = {tuple(row[column] for column in key) for row in cells if row["status"] == "ok"}
        for row in tables[name].select(key).to_pylist():
            if tuple(row.values()) not in right:
                arm = row.get("variant") or row.get("protocol")
                raise RecordError(f"a sample of {arm} at {row['steps']} steps, replica {row.get('replica', 0)}, whose cell is not ok")


def _check_value(where: str, kind: str, value: Any) -> None:
    accepted = _TYPES[kind][1]
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind != "bool"):
        raise RecordError(f"{where}: expected {kind}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(f"{where}: {value!r} is not a finite number")


@cache
def _arrow(name: str) -> pa.Schema:
    if name not in schema()["tables"]:
        raise RecordError(f"results/schema.json has no table {name!r}")
    return pa.schema([(column, _TYPES[kind][0]) for column, kind in schema()["tables"][name].items()])


def _read(folder: Path, name: str, listed: Mapping[str, Any]) -> pa.Table:
    path = folder / f"{name}.parquet"
    if not path.is_file() or _sha256(path) != listed["sha256"]:
        raise RecordError(f"{path.name} is missing or differs from the sha256 in run.json")
    rows = pq.read_table(path)
    if rows.num_rows != listed["rows"]:
        raise RecordError(f"{path.name} has {rows.num_rows} rows; run.json says {listed['rows']}")
    return rows


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sync(folder: Path) -> None:
    """Push every file to the disk before the rename makes them a run."""
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
