from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from experiments.outcome import Incorrect
from experiments.schema import Config
from experiments.step_clocks import step_clocks
from experiments.stopwatch import CpuStopwatch, Reading, Shot
from experiments.workload import Arm, Workload, create
from kernels.reference import walk
from kernels.walk import Draft, Resources, Rounding, WalkInputs


class Clocked:
    """The oracle, stamping 2000 cycles for its first step and 4000 for each later one; one launch in four is disturbed."""

    resources = Resources()

    def __init__(self, workload: Workload, wrong: bool = False, ticks: int = 1) -> None:
        self.workload, self.wrong, self.ticks, self.launches = workload, wrong, ticks, 0

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        self.launches += 1
        out.tokens.copy_(walk(self.workload.head, inputs, Rounding.TWICE).tokens + int(self.wrong))

    def step_stamps(self) -> torch.Tensor:
        cycles = torch.tensor([0, 2000, 6000, 10000, 14000]) + 10**15  # longer than this walk: max_steps + 1
        nanoseconds = torch.tensor([0, 1000, 2900, 5000, 7000]) * self.ticks + 10**18  # coarse within the walk, right at its ends
        return torch.stack([cycles, nanoseconds], dim=1) * (3 if self.launches % 4 == 0 else 1)


class Replaying(CpuStopwatch):
    def time_calls(self, shots: Sequence[Shot]) -> list[Reading]:
        for shot in shots:
            shot.replay()
        return [Reading(50.0, 1234.0) for _ in shots]  # the clock beside the sample is not the walk's


@pytest.fixture
def workload(config: Config) -> Workload:
    return Workload(config, max_steps=4, batch=1)


def test_cycles_become_microseconds_by_the_walks_own_clock(workload: Workload) -> None:
    clocked = Clocked(workload)
    subject = workload.subject(Arm("resident", create("reference", {}), clocked), 3)
    rows = step_clocks(clocked, subject, Replaying(), rounds=5, replica=2)
    assert [(row["step"], row["time_us"]) for row in rows] == [(0, 1.0), (1, 2.0), (2, 2.0)]
    assert {(row["variant"], row["steps"], row["replica"]) for row in rows} == {("resident", 3, 2)}


def test_a_clocked_walk_must_be_right_too(workload: Workload) -> None:
    clocked = Clocked(workload, wrong=True)
    with pytest.raises(Incorrect, match="with in-kernel clocks"):
        step_clocks(clocked, workload.subject(Arm("resident", create("reference", {}), clocked), 3), Replaying(), 5, 0)


def test_cycles_without_a_clock_are_no_time(workload: Workload) -> None:
    clocked = Clocked(workload, ticks=0)
    with pytest.raises(ValueError, match="passed 0 ns in 10000 cycles"):
        step_clocks(clocked, workload.subject(Arm("resident", create("reference", {}), clocked), 3), Replaying(), 5, 0)
