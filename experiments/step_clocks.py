"""The walk's own account of its steps: SM cycles stamped inside the kernel, turned into time by the measured clock.

No host timer and no event touches this estimate, so it can confirm the slope that the samples give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from experiments.measure import ask
from experiments.outcome import Incorrect, Row
from experiments.stopwatch import Shot, Stopwatch
from experiments.subject import Subject
from kernels.walk import ClockedWalk


def step_clocks(walk: ClockedWalk, subject: Subject, stopwatch: Stopwatch, rounds: int, replica: int) -> list[Row]:
    """Rows of the table `step_clocks`: for every step the median over `rounds` replays with cold L2.

    Raises:
        Incorrect: the clocked walk gives other tokens than the oracle.
        ValueError: the stopwatch reads no SM clock, so cycles cannot become time.
    """
    steps = subject.cell["steps"]
    subject.load(0)
    replay = stopwatch.capture(subject.launch, warmup=1)
    agreement = subject.verify(0, ask(subject, replay, 0, stopwatch))
    if not agreement.ok:
        raise Incorrect(f"with in-kernel clocks: {agreement.reason}")
    rows = [_one_replay(walk, replay, stopwatch, steps) for _ in range(rounds)]
    named = {"backend": subject.cell["backend"], "variant": subject.cell["variant"], "steps": steps, "replica": replica}
    return [{**named, "step": step, "time_us": median(row[step] for row in rows)} for step in range(steps)]


def _one_replay(walk: ClockedWalk, replay: Callable[[], None], stopwatch: Stopwatch, steps: int) -> Sequence[float]:
    (reading,) = stopwatch.time_calls([Shot(replay, "cold")])
    if reading.clock_mhz <= 0:
        raise ValueError("in-kernel clocks need an SM clock, and this stopwatch reads none")
    cycles = walk.step_cycles()[: steps + 1].cpu().diff()
    return [count / reading.clock_mhz for count in cycles.tolist()]
