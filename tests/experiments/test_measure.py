"""Honest walks are timed; every planted cheat is caught."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from experiments.floor import FloorViolation
from experiments.measure import Measured, flag_clocks, measure
from experiments.schema import Config, Timing
from experiments.stopwatch import CpuStopwatch, Reading, Shot
from experiments.workload import Arm, Workload, create
from kernels.reference import walk
from kernels.walk import Draft, Resources, Rounding, WalkInputs

TIMING = Timing(rounds=4, warmup=1, kernel_replays=2)


class FakeStopwatch(CpuStopwatch):
    """Runs every replay, and says what it is told about times and clocks. `pending` is work that only `drain` waits for."""

    def __init__(self, time_us: float = 10.0, clock_mhz: float = 1900.0) -> None:
        super().__init__()
        self.time_us, self.clock_mhz = time_us, clock_mhz
        self.pending: list[Callable[[], Any]] = []
        self.rounds: list[list[tuple[Any, str]]] = []

    def drain(self) -> None:
        while self.pending:
            self.pending.pop()()

    def time_calls(self, shots: Sequence[Shot]) -> list[Reading]:
        self.rounds.append([(shot.replay, shot.l2) for shot in shots])
        for shot in shots:
            shot.replay()
        return [Reading(self.time_us, self.clock_mhz) for _ in shots]

    def time_kernels(self, shots: Sequence[Shot]) -> list[Reading]:
        return [Reading(self.time_us / 2, self.clock_mhz) for _ in shots]


@dataclass
class Honest:
    """The oracle, as a prepared walk."""

    workload: Workload
    resources: Resources = field(default_factory=Resources)
    launches: int = 0

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        self.launches += 1
        out.tokens.copy_(self.tokens(inputs))

    def tokens(self, inputs: WalkInputs) -> torch.Tensor:
        return walk(self.workload.head, inputs, Rounding.TWICE).tokens


class Silent(Honest):
    """Writes nothing."""

    def launch(self, inputs: WalkInputs, out: Draft) -> None: ...


class Stale(Honest):
    """Returns the answer to the first question for ever."""

    first: torch.Tensor | None = None

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        self.first = self.tokens(inputs) if self.first is None else self.first
        out.tokens.copy_(self.first)


class Late(Honest):
    """Returns at once and writes from elsewhere a little later."""

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        answer = self.tokens(inputs)
        threading.Timer(0.05, lambda: out.tokens.copy_(answer)).start()


class OffByOne(Honest):
    """Right but for the last step."""

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        super().launch(inputs, out)
        out.tokens[:, -1] = (out.tokens[:, -1] + 1) % inputs.vocab


class LazyUnderTiming(Honest):
    """Does its work while it is being checked, and skips it once it is being timed."""

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        if self.launches < 4:
            super().launch(inputs, out)


class Broken(Honest):
    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        raise ValueError("no such shape")


@pytest.fixture
def workload(config: Config) -> Workload:
    return Workload(config, max_steps=3, batch=1)


def _run(workload: Workload, stopwatch: FakeStopwatch, *walks: Honest, steps: Sequence[int] = (3,), seed: int = 0) -> Measured:
    backend = create("reference", {})
    arms = [Arm(type(prepared).__name__, backend, prepared) for prepared in walks]
    return measure([workload.subject(arm, length) for arm in arms for length in steps], stopwatch, TIMING, seed)


def test_an_honest_walk_is_checked_and_timed_everywhere(workload: Workload) -> None:
    found = _run(workload, FakeStopwatch(), Honest(workload), steps=(1, 3))
    assert [(cell["status"], cell["steps"], cell["tokens"], cell["rounding"]) for cell in found.cells] == [
        ("ok", 1, 2, "twice"),
        ("ok", 3, 6, "twice"),
    ]
    counts = Counter((row["steps"], row["l2"], row["scope"]) for row in found.samples)
    assert counts == {
        (steps, l2, scope): 4 if scope == "call" else 2 for steps in (1, 3) for l2 in ("cold", "hot") for scope in ("call", "kernel")
    }
    assert {row["time_us"] for row in found.samples if row["scope"] == "kernel"} == {5.0}
    assert all(row["valid"] for row in found.samples)


@pytest.mark.parametrize(
    ("cheat", "reason"),
    [
        (Silent, "token -1 is outside"),
        (Stale, "input set 1: request 0 step 0"),
        (Late, "token -1 is outside"),
        (OffByOne, "request 0 step 2"),
        (LazyUnderTiming, "under timing, input set 1, request 0 step 0: token -1; the checked answer is"),
    ],
)
def test_a_planted_cheat_is_caught_and_its_honest_neighbour_is_not(workload: Workload, cheat: type[Honest], reason: str) -> None:
    found = _run(workload, FakeStopwatch(), cheat(workload), Honest(workload))
    by_variant = {cell["variant"]: cell for cell in found.cells}
    assert by_variant[cheat.__name__]["status"] == "incorrect"
    assert reason in by_variant[cheat.__name__]["reason"]
    assert by_variant["Honest"]["status"] == "ok"
    assert {row["variant"] for row in found.samples} == {"Honest"}


def test_a_draft_that_changes_after_its_stream_is_done_is_late_even_if_it_was_right(workload: Workload) -> None:
    stopwatch = FakeStopwatch()

    class RewritesLater(Honest):
        def launch(self, inputs: WalkInputs, out: Draft) -> None:
            super().launch(inputs, out)
            stopwatch.pending.append(lambda: out.tokens.fill_(7))

    (cell,) = _run(workload, stopwatch, RewritesLater(workload)).cells
    assert (cell["status"], cell["reason"].split(":")[0]) == ("incorrect", "the draft changed after its stream was done")


def test_the_last_question_is_asked_of_a_poisoned_draft_too(workload: Workload) -> None:
    class StopsAtTheEnd(Honest):
        def launch(self, inputs: WalkInputs, out: Draft) -> None:
            if self.launches < 5:  # a warm-up, two checks, one round of cold and hot
                super().launch(inputs, out)

    prepared = StopsAtTheEnd(workload)
    subject = workload.subject(Arm("stops", create("reference", {}), prepared), 3)
    (cell,) = measure([subject], FakeStopwatch(), replace(TIMING, rounds=1), 0).cells
    assert prepared.launches == 5
    assert cell["status"] == "incorrect"
    assert "token -1 is outside" in cell["reason"]


def test_a_walk_that_skips_its_work_falls_below_the_floor_and_fails_the_run(config: Config) -> None:
    workload = Workload(config, max_steps=3, batch=1)
    subject = workload.subject(Arm("fast", create("reference", {}), Honest(workload)), 3)
    floored = replace(subject, floor_us={"cold": 8.1, "hot": 0.0})
    assert measure([floored], FakeStopwatch(time_us=20.0), TIMING, 0).samples
    with pytest.raises(
        FloorViolation, match=r"fast at 3 steps, batch 1, T = 0 \(cold L2, call, round 0\) took 8\.000 us, below its floor of 8\.100 us"
    ):
        measure([floored], FakeStopwatch(time_us=8.0), TIMING, 0)


def test_no_call_is_shorter_than_a_launch(workload: Workload) -> None:
    class WithLaunches(FakeStopwatch):
        launch_floor_us = 1.5

    stopwatch = WithLaunches(time_us=1.4)
    with pytest.raises(FloorViolation, match=r"1\.400 us, below its floor of 1\.500 us"):
        _run(workload, stopwatch, Honest(workload))


def test_a_walk_that_raises_is_a_row_with_its_reason(workload: Workload) -> None:
    found = _run(workload, FakeStopwatch(), Broken(workload), Honest(workload))
    assert [(cell["status"], cell["reason"]) for cell in found.cells] == [("runtime_error", "ValueError: no such shape"), ("ok", "")]


def test_every_round_times_every_subject_cold_and_hot_in_an_order_of_its_own(workload: Workload) -> None:
    stopwatch = FakeStopwatch()
    found = _run(workload, stopwatch, Honest(workload), Honest(workload), steps=(1, 2, 3))
    keys = [[(id(replay), l2) for replay, l2 in shots] for shots in stopwatch.rounds]
    assert all(len(set(order)) == len(order) == 12 for order in keys)
    assert len({tuple(order) for order in keys}) == TIMING.rounds
    for round_index in range(TIMING.rounds):
        places = [row["order"] for row in found.samples if row["scope"] == "call" and row["round"] == round_index]
        assert sorted(places) == list(range(12))


def test_the_seed_decides_the_order(workload: Workload) -> None:
    def places(seed: int) -> list[int]:
        return [row["order"] for row in _run(workload, FakeStopwatch(), Honest(workload), steps=(1, 2, 3), seed=seed).samples]

    assert places(1) == places(1) != places(2)


def test_kernel_times_that_cannot_be_had_are_a_note(workload: Workload) -> None:
    class NoCupti(FakeStopwatch):
        def time_kernels(self, shots: Sequence[Shot]) -> list[Reading]:
            raise RuntimeError("CUPTI is not here")

    found = _run(workload, NoCupti(), Honest(workload))
    assert found.notes == ["no kernel times: CUPTI is not here"]
    assert {row["scope"] for row in found.samples} == {"call"}


def test_a_sample_with_a_straying_clock_is_flagged_and_kept() -> None:
    rows = [{"clock_mhz": clock, "valid": True} for clock in (1900, 1900, 1900, 1850, 1840, 1960)]
    rows.append({"clock_mhz": 1900, "valid": False})  # heat held it back
    flag_clocks(rows, 0.03)
    assert [row["valid"] for row in rows] == [True, True, True, True, False, False, False]


def test_without_clocks_nothing_is_flagged() -> None:
    rows = [{"clock_mhz": 0.0, "valid": True}]
    flag_clocks(rows, 0.03)
    assert rows[0]["valid"]


def test_the_cpu_stopwatch_measures_the_call_and_not_the_scene() -> None:
    calls: list[str] = []

    def call() -> None:
        calls.append("x")
        time.sleep(0.02)

    (reading,) = CpuStopwatch().time_calls([Shot(call, "hot")])
    assert len(calls) == 2  # once to warm the cache, once timed
    assert 20_000 <= reading.time_us < 39_000
