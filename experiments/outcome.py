"""What an experiment hands back: rows for the tables of `results/schema.json`, and how it went."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kernels.build import BuildError
from kernels.walk import Unsupported

Row = dict[str, Any]


class Status(StrEnum):
    """How a run or one of its cells ended; the words of `results/schema.json`."""

    OK = "ok"
    UNSUPPORTED = "unsupported"
    BUILD_ERROR = "build_error"
    INCORRECT = "incorrect"
    RUNTIME_ERROR = "runtime_error"
    TIMEOUT = "timeout"


class Incorrect(RuntimeError):
    """A walk gave an answer that the oracle does not, or at a time when it should have been there."""


@dataclass(frozen=True)
class Outcome:
    """Tables by name (rows without `run_id`, which the record adds), the protocol in words, and resources by variant."""

    tables: dict[str, list[Row]]
    protocol: dict[str, Any] = field(default_factory=dict)
    resources: dict[str, dict[str, Any]] = field(default_factory=dict)
    status: Status = Status.OK
    reason: str = ""


def of_error(error: BaseException) -> tuple[Status, str]:
    """The status and reason of a cell or run that ended in `error`."""
    if isinstance(error, Unsupported):
        return Status.UNSUPPORTED, str(error)
    if isinstance(error, BuildError):
        return Status.BUILD_ERROR, str(error)
    if isinstance(error, Incorrect):
        return Status.INCORRECT, str(error)
    return Status.RUNTIME_ERROR, f"{type(error).__name__}: {error}"


def of_cells(cells: Iterable[Row]) -> tuple[Status, str]:
    """A run is ok if one of its cells is; otherwise it ends as the first cell that failed did, and is unsupported only if all cells are."""
    rows = list(cells)
    if not rows:
        return Status.RUNTIME_ERROR, "no cell was measured"
    if any(row["status"] == Status.OK for row in rows):
        return Status.OK, ""
    first = next((row for row in rows if row["status"] != Status.UNSUPPORTED), rows[0])
    return Status(first["status"]), first["reason"]
