"""Replicas are fresh processes: each builds its own head, kernels and graphs. They are what a bootstrap resamples."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.floor import FloorViolation
from experiments.measure import flag_clocks
from experiments.outcome import Outcome, Row, Status, of_cells
from experiments.plan import Plan
from experiments.provenance import ROOT


@dataclass(frozen=True)
class Part:
    """What one replica gave: its rows, or why it gave none."""

    replica: int
    status: Status
    reason: str
    tables: dict[str, list[Row]] = field(default_factory=dict)
    protocol: dict[str, Any] = field(default_factory=dict)
    resources: dict[str, dict[str, Any]] = field(default_factory=dict)


_PROGRAM = (sys.executable, "-m", "experiments.run")
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: a forked child must load nothing
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def run_replicas(plan: Plan, count: int, timeout_s: float, program: Sequence[str] = _PROGRAM) -> list[Part]:
    """Run `count` replicas of `plan`, one after the other. A replica that crashes or hangs loses only itself.

    program: what executes `--plan FILE --replica N --into FOLDER`.

    Raises:
        FloorViolation: a replica saw a time that cannot be; then no replica can be believed.
    """
    parts: list[Part] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        plan.write(Path(scratch) / "plan.json")
        for replica in range(count):
            parts.append(_one(Path(scratch), replica, timeout_s, program))
            spent_s = time.monotonic() - started
            left_s = spent_s / (replica + 1) * (count - replica - 1)
            ended = parts[-1].status if parts[-1].status is Status.OK else f"{parts[-1].status}: {parts[-1].reason}"
            print(
                f"replica {replica + 1} of {count}: {ended}; {spent_s:.0f} s so far, about {left_s:.0f} s left", file=sys.stderr, flush=True
            )
    return parts


def gather(parts: Sequence[Part], tables: Sequence[str], lost: Callable[[Part], list[Row]], clock_tolerance: float) -> Outcome:
    """The replicas' rows together, clocks compared over all of them.

    tables: the timed one, the one of its cells, then any others. lost: the cells of a replica that gave nothing.
    """
    rows = {name: [row for part in parts for row in part.tables.get(name, [])] for name in tables}
    samples, cells = (rows[name] for name in tables[:2])
    cells += [row for part in parts if part.status is not Status.OK for row in lost(part)]
    flag_clocks(samples, clock_tolerance)
    status, reason = of_cells(cells)
    whole = next((part for part in parts if part.protocol), Part(0, status, reason))
    notes = sorted({note for part in parts for note in part.protocol.get("notes", [])})
    return Outcome(rows, {**whole.protocol, "notes": notes}, whole.resources, status, reason)


def _one(scratch: Path, replica: int, timeout_s: float, program: Sequence[str]) -> Part:
    command = [*program, "--plan", str(scratch / "plan.json"), "--replica", str(replica), "--into", str(scratch)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, start_new_session=True, preexec_fn=_die_with_parent)
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return Part(replica, Status.TIMEOUT, f"the replica did not finish in {timeout_s:g} s and was ended")
    finally:
        _end(process)
    result = scratch / f"replica-{replica}.json"
    if not result.exists():
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return Part(replica, Status.RUNTIME_ERROR, f"the replica's process ended with {how} and left no result; its messages are above")
    return _read(result, replica)


def _read(path: Path, replica: int) -> Part:
    data = json.loads(path.read_text())
    if data.pop("error", "") == FloorViolation.__name__:
        raise FloorViolation(f"replica {replica}: {data['reason']}")
    return Part(replica, Status(data.pop("status")), data.pop("reason"), **data)


def _die_with_parent() -> None:
    """In the forked child: Linux ends it when its parent ends, however that happens; a replica must not hold the GPU for nobody."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the replica and whatever it started; it leads its own process group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
