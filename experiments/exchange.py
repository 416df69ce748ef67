"""What agreeing on one token costs, under every protocol and on several numbers of CTAs, with nothing else in the loop (Figure 8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import cast

import torch

from experiments.convert import ConfigError, nearest
from experiments.examiner import Repeating
from experiments.measure import ask as ask_subject
from experiments.measure import cell_row, measure
from experiments.outcome import Outcome, Row, Status, of_error
from experiments.plan import Plan
from experiments.protocol import protocol
from experiments.replicas import Part, gather, run_replicas
from experiments.schema import Config, Exchange
from experiments.stopwatch import L2, Shot, Stopwatch
from experiments.subject import Subject
from experiments.workload import stopwatch_for
from kernels.device import DeviceSpec, check_live
from kernels.exchange_probe import PROTOCOLS, ExchangeProbe, check
from kernels.walk import Draft, Unsupported

_TABLES = ("exchange", "exchange_cells", "exchange_clocks")
_STEP_FLOOR_US = 0.1  # a step is at least one read from L2, which takes 288 cycles on an H200: 0.145 us at 1,980 MHz
_WHAT = {
    "call": "one launch of the probe, replayed as a graph between two events on the stream",
    "kernel": "the duration of the kernel alone",
    "check": "every winner, and a digest of what each CTA heard, against the CPU: two anchors before timing, every round under timing, once after",
    "check_sampled": "no winner depends on chance",
    "clocks": "exchange_clocks: us a step between the first and the last winner of CTA 0, by the SM's own counters, at the longest length",
}


@dataclass(frozen=True)
class _Probed(Subject):
    """A probe of one protocol on some CTAs at one length, as `measure` wants it."""

    def __str__(self) -> str:
        return f"{self.cell['protocol']} among {self.cell['ctas']} CTAs at {self.cell['steps']} steps"


def run(plan: Plan) -> Outcome:
    """Every replica in a fresh process; their rows together."""
    ask = _ask(plan)
    _assert_known(ask.protocols)
    _assert_gpu(plan.config.device)
    parts = run_replicas(plan, ask.replicas, ask.replica_timeout_s)
    return gather(parts, _TABLES, lambda part: _lost(plan, part), ask.timing.clock_tolerance)


def run_replica(plan: Plan, replica: int) -> Outcome:
    """All protocols on all numbers of CTAs at all lengths, interleaved, in this process."""
    ask, config = _ask(plan), plan.config
    _assert_gpu(config.device)
    stopwatch = stopwatch_for(config.device)
    bench = _Bench(config)
    probes: dict[tuple[str, int], ExchangeProbe] = {}
    cells: list[Row] = []
    for name in ask.protocols:
        for ctas in ask.ctas:
            try:
                probes[name, ctas] = ExchangeProbe(name, ctas, config.device)
            except Exception as error:  # its cells say why; the others are measured
                cells += _failed(config, ask, name, ctas, replica, *of_error(error))
    subjects = [bench.subject(name, probe, steps) for (name, _), probe in probes.items() for steps in ask.steps]
    measured = measure(subjects, stopwatch, ask.timing, config.seed, replica)
    cells += [_checked(row) for row in measured.cells]
    clocks, notes = _clocks(bench, probes, stopwatch, ask, cells, replica)
    return Outcome(
        tables={"exchange": measured.samples, "exchange_cells": cells, "exchange_clocks": clocks},
        protocol={**protocol(ask.timing, stopwatch, ask.replicas, measured.notes + notes), **_WHAT, "protocols": _described(ask.protocols)},
        resources={f"{name} {ctas}": asdict(probe.resources) for (name, ctas), probe in probes.items()},
    )


class _Bench:
    """What all probes of a process share: the anchor, of which there are two."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._anchors = (config.inputs.seed, config.inputs.seed + 1)
        self._anchor = torch.zeros(1, dtype=torch.int64, device="cuda" if torch.cuda.is_available() else "cpu")

    def subject(self, name: str, probe: ExchangeProbe, steps: int) -> Subject:
        """One probe of `steps` steps; its draft is [1, steps + ctas], see `ExchangeProbe.launch`."""
        draft = Draft(torch.empty(1, steps + probe.ctas, dtype=torch.int64, device=self._anchor.device))
        return _Probed(
            cell=_columns(self._config, name, probe.ctas, steps),
            launch=lambda: probe.launch(self._anchor, draft.tokens[0]),
            load=lambda which: cast(None, self._anchor.fill_(self._anchors[which])),
            examiner=Repeating(lambda which, heard: check(heard[0], self._anchors[which], probe.ctas)),
            draft=draft,
            floor_us=dict.fromkeys(L2, _STEP_FLOOR_US * steps),
            rounding="",
        )


def _clocks(
    bench: _Bench,
    probes: dict[tuple[str, int], ExchangeProbe],
    stopwatch: Stopwatch,
    ask: Exchange,
    cells: Sequence[Row],
    replica: int,
) -> tuple[list[Row], list[str]]:
    """A second account of a step: by the stamps of the kernel, without any event or launch."""
    steps = max(ask.steps)
    right = {(row["protocol"], row["ctas"]) for row in cells if row["steps"] == steps and row["status"] == Status.OK}
    rows, notes = [], []
    for (name, ctas), probe in probes.items():
        if (name, ctas) not in right:
            continue
        try:
            time_us, clock_mhz = _step_by_clocks(bench.subject(name, probe, steps), probe.stamps, stopwatch, ask.timing.rounds)
            named = {"protocol": name, "ctas": ctas, "steps": steps, "replica": replica}
            rows.append({**named, "time_us": time_us, "clock_mhz": clock_mhz})
        except Exception as error:
            notes.append(f"no in-kernel clocks of {name} among {ctas} CTAs: {': '.join(of_error(error))}")
    return rows, notes


def _step_by_clocks(subject: Subject, stamps: Callable[[], tuple[int, int]], stopwatch: Stopwatch, rounds: int) -> tuple[float, float]:
    """Median us a step and MHz over `rounds` replays with cold L2.

    Raises:
        Incorrect: a winner is wrong.
        ValueError: the wall clock in the kernel stood still.
    """
    subject.load(0)
    replay = stopwatch.capture(subject.launch, warmup=1)
    subject.examiner.examine(0, ask_subject(subject, replay, 0, stopwatch))
    passed = []
    for _ in range(rounds):
        stopwatch.time_calls([Shot(replay, "cold")])
        passed.append(stamps())
    if min(nanoseconds for _, nanoseconds in passed) <= 0:
        raise ValueError(f"the wall clock in the kernel passed {passed[0][1]} ns in {passed[0][0]} cycles")
    step_us = [nanoseconds / 1e3 / (subject.cell["steps"] - 1) for _, nanoseconds in passed]
    return median(step_us), median(cycles / nanoseconds * 1e3 for cycles, nanoseconds in passed)


def _ask(plan: Plan) -> Exchange:
    return cast(Exchange, plan.config.experiment)


def _assert_known(names: Sequence[str]) -> None:
    """Raises:
    ConfigError: a name that is no protocol.
    """
    for place, name in enumerate(names):
        if name not in PROTOCOLS:
            raise ConfigError(f"experiment.protocols[{place}]: {name!r} is not one of {', '.join(PROTOCOLS)}{nearest(name, PROTOCOLS)}")


def _assert_gpu(device: DeviceSpec) -> None:
    """Raises:
    Unsupported: this machine, or the device of the config, has no SMs that could agree on anything.
    """
    if not device.is_cuda:
        raise Unsupported(
            f"experiment=exchange measures how the SMs of a CUDA GPU agree; device={device.name} has none; choose device=h200."
        )
    check_live(device)


def _columns(config: Config, name: str, ctas: int, steps: int) -> Row:
    return {"device": config.device.name, "protocol": name, "promised": PROTOCOLS[name].promised, "ctas": ctas, "steps": steps}


def _checked(row: Row) -> Row:
    """A row of `exchange_cells` from one of `cells`; a winner has no rounding and no near ties."""
    return {column: value for column, value in row.items() if column not in ("rounding", "near_ties")}


def _failed(config: Config, ask: Exchange, name: str, ctas: int, replica: int, status: Status, reason: str) -> list[Row]:
    return [_checked(cell_row(_columns(config, name, ctas, steps), replica, status, reason)) for steps in ask.steps]


def _lost(plan: Plan, part: Part) -> list[Row]:
    """The cells of a replica that gave nothing."""
    ask, config = _ask(plan), plan.config
    pairs = [(name, ctas) for name in ask.protocols for ctas in ask.ctas]
    return [row for name, ctas in pairs for row in _failed(config, ask, name, ctas, part.replica, part.status, part.reason)]


def _described(names: Sequence[str]) -> dict[str, dict[str, str]]:
    return {name: {"what": PROTOCOLS[name].what, "leans_on": PROTOCOLS[name].leans_on} for name in names}
