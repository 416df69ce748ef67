"""The exchange experiment with probes that run on the CPU: honest ones are timed, wrong ones are not, absent ones keep their reason."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor

from experiments import exchange, record
from experiments.convert import ConfigError, convert
from experiments.execute import execute
from experiments.floor import FloorViolation
from experiments.outcome import Status
from experiments.plan import Plan
from experiments.replicas import Part
from experiments.schema import Exchange, Timing
from experiments.stopwatch import CpuStopwatch, Reading, Shot
from kernels.device import DeviceSpec, load
from kernels.exchange_probe import expected
from kernels.walk import Resources, Unsupported

STEPS = (2, 6)
Launch = Callable[["FakeProbe", int, Tensor], None]


class FakeStopwatch(CpuStopwatch):
    """Runs every replay, and says what it is told about its time."""

    def __init__(self, time_us: float = 10.0) -> None:
        super().__init__()
        self.time_us = time_us

    def time_calls(self, shots: Sequence[Shot]) -> list[Reading]:
        for shot in shots:
            shot.replay()
        return [Reading(self.time_us, 1900.0) for _ in shots]


class FakeProbe:
    """Hears what is right, unless its protocol is planted to do otherwise."""

    planted: ClassVar[dict[str, Launch]] = {}

    def __init__(self, protocol: str, ctas: int, device: DeviceSpec) -> None:
        if protocol == "cluster_4" and ctas % 4:
            raise Unsupported(f"{ctas} CTAs are no whole number of clusters of 4")
        self.protocol, self.ctas, self.resources = protocol, ctas, Resources(registers=26, ctas=ctas)
        self.launches = 0
        self.first: Tensor | None = None

    def launch(self, anchor: Tensor, heard: Tensor) -> None:
        self.launches += 1
        heard.copy_(expected(int(anchor), self.ctas, heard.numel() - self.ctas))
        if self.protocol in self.planted:
            self.planted[self.protocol](self, int(anchor), heard)

    def stamps(self) -> tuple[int, int]:
        return 8_550, 4_500  # 5 exchanges, 0.9 us each, at 1,900 MHz


def _deaf(probe: FakeProbe, anchor: int, heard: Tensor) -> None:
    heard[-1] += 1


def _stale(probe: FakeProbe, anchor: int, heard: Tensor) -> None:
    probe.first = heard.clone() if probe.first is None or probe.first.shape != heard.shape else probe.first
    heard.copy_(probe.first)


def _tires(probe: FakeProbe, anchor: int, heard: Tensor) -> None:
    if probe.launches > 12:
        heard[0] += 1


@pytest.fixture
def probed(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan for an H200 whose probes, stopwatch and replicas are fakes in this process."""
    monkeypatch.setattr(exchange, "ExchangeProbe", FakeProbe)
    monkeypatch.setattr(exchange, "stopwatch_for", lambda device: FakeStopwatch())
    monkeypatch.setattr(exchange, "check_live", lambda device: "cuda")
    monkeypatch.setattr(FakeProbe, "planted", {})
    ask = Exchange(("pair", "mailboxes", "cluster_4"), ctas=(8, 66), steps=STEPS, replicas=2, timing=Timing(3, 1, 0))
    asked = replace(plan, config=replace(plan.config, experiment=ask, device=load("h200")))
    monkeypatch.setattr(exchange, "run_replicas", lambda plan, count, timeout_s: [_part(plan, replica) for replica in range(count)])
    return asked


def _part(plan: Plan, replica: int) -> Part:
    outcome = exchange.run_replica(plan, replica)
    return Part(replica, Status.OK, "", json.loads(json.dumps(outcome.tables)), outcome.protocol, outcome.resources)


def _cells(tables: dict[str, list[dict[str, Any]]]) -> dict[tuple[str, int], set[tuple[str, str]]]:
    found: dict[tuple[str, int], set[tuple[str, str]]] = {}
    for row in tables["exchange_cells"]:
        found.setdefault((row["protocol"], row["ctas"]), set()).add((row["status"], row["reason"]))
    return found


def test_every_protocol_that_can_run_is_timed_and_the_others_say_why(probed: Plan) -> None:
    run = record.load(execute(probed).folder)
    tables = {name: rows.to_pylist() for name, rows in run.tables.items()}
    assert set(tables) == {"exchange", "exchange_cells", "exchange_clocks"}
    timed = Counter((row["protocol"], row["ctas"], row["steps"], row["l2"], row["replica"]) for row in tables["exchange"])
    able = [("pair", 8), ("pair", 66), ("mailboxes", 8), ("mailboxes", 66), ("cluster_4", 8)]
    assert timed == {(*each, steps, l2, replica): 3 for each in able for steps in STEPS for l2 in ("cold", "hot") for replica in (0, 1)}
    assert {(row["protocol"], row["promised"]) for row in tables["exchange"]} == {
        ("pair", False),
        ("mailboxes", True),
        ("cluster_4", False),
    }
    assert _cells(tables) == {
        **{key: {("ok", "")} for key in able},
        ("cluster_4", 66): {("unsupported", "66 CTAs are no whole number of clusters of 4")},
    }
    assert len(tables["exchange_cells"]) == 2 * 6 * len(STEPS)
    assert {row["tokens"] for row in tables["exchange_cells"] if row["status"] == "ok"} == {2 * steps for steps in STEPS}
    orders = {replica: [row["order"] for row in tables["exchange"] if row["replica"] == replica] for replica in (0, 1)}
    assert orders[0] != orders[1]
    assert run.meta["resources"]["pair 66"]["ctas"] == 66
    assert "16-byte load" in run.meta["protocol"]["protocols"]["pair"]["leans_on"]
    assert run.meta["protocol"]["protocols"]["mailboxes"]["leans_on"] == ""


def test_the_kernels_own_clocks_are_us_a_step(probed: Plan) -> None:
    rows = exchange.run_replica(probed, 1).tables["exchange_clocks"]
    assert {(row["protocol"], row["ctas"]) for row in rows} == {
        ("pair", 8),
        ("pair", 66),
        ("mailboxes", 8),
        ("mailboxes", 66),
        ("cluster_4", 8),
    }
    for row in rows:
        assert (row["steps"], row["replica"], row["time_us"]) == (6, 1, pytest.approx(0.9))
        assert row["clock_mhz"] == pytest.approx(1900)


@pytest.mark.parametrize(
    ("cheat", "reason"),
    [
        (_deaf, "heard other tokens than CTA 0"),
        (_stale, "input set 1: step 0: CTA 0 heard token"),
        (_tires, "under timing, input set"),
    ],
)
def test_a_protocol_that_once_gives_a_wrong_winner_is_not_timed(
    probed: Plan, monkeypatch: pytest.MonkeyPatch, cheat: Launch, reason: str
) -> None:
    monkeypatch.setattr(FakeProbe, "planted", {"pair": cheat})
    tables = exchange.run_replica(probed, 0).tables
    found = _cells(tables)
    assert any(status == "incorrect" and reason in words for status, words in found["pair", 8])
    assert found["mailboxes", 66] == {("ok", "")}
    wrong = {(row["protocol"], row["ctas"], row["steps"]) for row in tables["exchange_cells"] if row["status"] == "incorrect"}
    assert not wrong & {(row["protocol"], row["ctas"], row["steps"]) for row in tables["exchange"]}
    record.table("exchange_cells", tables["exchange_cells"], "r")


def test_wrong_winners_under_the_clocks_are_a_note(probed: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(probe: FakeProbe, anchor: int, heard: Tensor) -> None:
        if probe.launches > 21:  # ten for each length; then the clocks warm up
            heard[0] += 1

    monkeypatch.setattr(FakeProbe, "planted", {"pair": late})
    outcome = exchange.run_replica(probed, 0)
    assert "pair" not in {row["protocol"] for row in outcome.tables["exchange_clocks"]}
    assert any(note.startswith("no in-kernel clocks of pair among 8 CTAs: incorrect") for note in outcome.protocol["notes"])


def test_a_time_that_no_exchange_can_take_fails_the_run(probed: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "stopwatch_for", lambda device: FakeStopwatch(time_us=0.5))
    with pytest.raises(FloorViolation, match=r"among \d+ CTAs at 6 steps .*below its floor of 0\.600 us"):
        exchange.run_replica(probed, 0)


def test_a_lost_replica_is_rows_with_its_reason(probed: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [Part(0, Status.TIMEOUT, "did not finish"), _part(probed, 1)]
    monkeypatch.setattr(exchange, "run_replicas", lambda plan, count, timeout_s: parts)
    outcome = exchange.run(probed)
    lost = [row for row in outcome.tables["exchange_cells"] if row["replica"] == 0]
    assert len(lost) == 6 * len(STEPS)
    assert {(row["status"], row["reason"]) for row in lost} == {("timeout", "did not finish")}
    assert (outcome.status, {row["replica"] for row in outcome.tables["exchange"]}) == (Status.OK, {1})


@pytest.mark.parametrize(
    ("table", "column", "value", "status", "message"),
    [
        ("exchange_cells", "status", "incorrect", "ok", r"a sample of pair at 2 steps, replica 0, whose cell is not ok"),
        ("exchange_cells", "ctas", 9, "ok", r"a sample of pair at 2 steps, replica 0, whose cell is not ok"),
        ("exchange", "time_us", -1.0, "ok", r"exchange: time_us -1\.0 is not a positive number"),
        ("exchange", "clock_mhz", -1.0, "ok", r"exchange: clock_mhz -1\.0 is not a clock"),
        ("exchange_clocks", "time_us", 0.0, "ok", r"exchange_clocks: time_us 0\.0 is not a positive number"),
        ("exchange", "round", 0, "timeout", r"status is timeout, but exchange has 120 rows"),
    ],
)
def test_a_record_that_nobody_vouches_for_is_not_written(
    probed: Plan, tmp_path: Path, table: str, column: str, value: Any, status: str, message: str
) -> None:
    found = record.load(execute(probed).folder)
    rows = {name: each.drop_columns(["run_id"]).to_pylist() for name, each in found.tables.items()}
    for row in rows[table][:1] if table != "exchange_cells" else [row for row in rows[table] if row["protocol"] == "pair"]:
        row[column] = value
    meta = {**found.meta, "status": status, "reason": "late"}
    changed = record.Run(meta, {name: record.table(name, each, found.meta["run_id"]) for name, each in rows.items()})
    with pytest.raises(record.RecordError, match=message):
        record.write(changed, tmp_path)


def test_without_a_gpu_the_run_says_so(plan: Plan) -> None:
    asked = replace(plan, config=replace(plan.config, experiment=Exchange(("pair",))))
    finished = execute(asked)
    assert (finished.status, finished.reason) == (
        Status.UNSUPPORTED,
        "experiment=exchange measures how the SMs of a CUDA GPU agree; device=cpu has none; choose device=h200.",
    )


def test_typos_are_told_before_anything_runs(plan: Plan) -> None:
    asked = replace(plan, config=replace(plan.config, experiment=Exchange(("pair", "mailboxs"))))
    with pytest.raises(ConfigError, match=r"experiment\.protocols\[1\]: 'mailboxs' is not one of pair, .*did you mean 'mailboxes'"):
        exchange.run(asked)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("steps", [8], "at least two lengths"),
        ("steps", [8, 33], "up to 32 steps"),
        ("ctas", [1, 8], "from 2 to 256 CTAs"),
        ("ctas", [8, 8], "all different"),
        ("protocols", [], "at least one"),
    ],
)
def test_an_exchange_that_cannot_be_asked_is_refused(key: str, value: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: .*{words}"):
        convert(Exchange, {"protocols": ["pair"], key: value})


def test_the_config_composes(tmp_path: Any) -> None:
    pytest.importorskip("hydra")
    from experiments.compose import compose

    ask = compose(["experiment=exchange", "device=h200"]).experiment
    assert isinstance(ask, Exchange)
    assert (ask.ctas, ask.steps, len(ask.protocols)) == ((8, 66, 132), (8, 16, 24, 32), 10)
