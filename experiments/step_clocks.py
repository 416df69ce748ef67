"""The walk's own account of its steps: cycles stamped inside the kernel, turned into time by the clock that the same stamps show.

No host timer and no event touches this estimate, so it can confirm the slope that the samples give. The SM clock beside a sample is
read on an idle chip; the walk's own nanoseconds say at what clock its cycles really passed.
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
        ValueError: the wall clock inside the walk stood still, so cycles cannot become time.
    """
    steps = subject.cell["steps"]
    subject.load(0)
    replay = stopwatch.capture(subject.launch, warmup=1)
    try:
        subject.examiner.examine(0, ask(subject, replay, 0, stopwatch))
    except Incorrect as error:
        raise Incorrect(f"with in-kernel clocks: {error}") from error
    rows = [_one_replay(walk, replay, stopwatch, steps) for _ in range(rounds)]
    named = {"backend": subject.cell["backend"], "variant": subject.cell["variant"], "steps": steps, "replica": replica}
    return [{**named, "step": step, "time_us": median(row[step] for row in rows)} for step in range(steps)]


def _one_replay(walk: ClockedWalk, replay: Callable[[], None], stopwatch: Stopwatch, steps: int) -> Sequence[float]:
    stopwatch.time_calls([Shot(replay, "cold")])
    cycles, nanoseconds = walk.step_stamps()[: steps + 1].cpu().diff(dim=0).unbind(dim=1)
    walk_ns, walk_cycles = int(nanoseconds.sum()), int(cycles.sum())
    if walk_ns <= 0:
        raise ValueError(f"in-kernel clocks need a wall clock, and it passed {walk_ns} ns in {walk_cycles} cycles")
    return [count * walk_ns / walk_cycles / 1e3 for count in cycles.tolist()]
