"""Interleaved timing, correctness first.

1. Every subject is captured and asked two different input sets; its examiner must find the drafts right, or it is not timed. Of an
   approximate walk the tokens that the exact one would not choose are counted here.
2. Rounds: all subjects x {cold, hot} in seeded random order. Each round loads one of the two sets and poisons every draft before it,
   and its examiner glances at every draft after it: an answer that is stale, late, unwritten or wrong in one round fails the subject.
3. Every subject is asked and examined once more, and its kernels alone are timed.
4. A time below the floor fails the run. Samples whose clock strays are flagged, never dropped.

`measure_sets` is for walks whose time depends on their inputs: many sets, each checked first and then timed once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from experiments.floor import assert_above
from experiments.outcome import Incorrect, Row, Status, of_error
from experiments.schema import Timing
from experiments.stopwatch import L2, Reading, Replay, Shot, Stopwatch
from experiments.subject import Subject
from kernels.walk import Draft, Rounding

SETS = (0, 1)


@dataclass
class _Arm:
    """A subject on its way through the measurement."""

    subject: Subject
    replay: Replay | None = None
    status: Status = Status.OK
    reason: str = ""
    tokens: int = 0
    near_ties: int = 0
    astray: int = 0
    samples: list[Row] = field(default_factory=list)
    growth: dict[int, tuple[int, int]] = field(default_factory=dict)  # of the tally, by input set

    def fail(self, error: Exception) -> None:
        self.status, self.reason = of_error(error)
        self.samples.clear()


@dataclass(frozen=True)
class Measured:
    """Rows of the tables `samples` (clocks not yet compared, see :func:`flag_clocks`), `cells` and `approximations`; notes say what could not
    be measured."""

    samples: list[Row]
    cells: list[Row]
    notes: list[str]
    approximations: list[Row] = field(default_factory=list)


def measure(subjects: Sequence[Subject], stopwatch: Stopwatch, timing: Timing, seed: int | str, replica: int = 0) -> Measured:
    """Check, time and check again. `seed` and `replica` decide the order.

    Raises:
        FloorViolation: a sample is faster than its bytes can move.
    """
    arms = [_Arm(subject) for subject in subjects]
    for arm in progress(arms, f"replica {replica}: check"):
        _guarded(arm, lambda arm: _admit(arm, stopwatch, timing.warmup))
    order = random.Random(f"{seed}/{replica}")
    for round_index in progress(range(timing.rounds), f"replica {replica}: rounds"):
        if live := _live(arms):
            _round(live, stopwatch, order, round_index, SETS[round_index % len(SETS)])
    for arm in _live(arms):
        _guarded(arm, lambda arm: arm.subject.examiner.examine(SETS[0], ask(arm.subject, _replay(arm), SETS[0], stopwatch)))
    notes = _kernels(_live(arms), stopwatch, order, timing.kernel_replays)
    samples = [{**row, "replica": replica} for arm in arms for row in arm.samples]
    return _measured(arms, samples, replica, stopwatch.launch_floor_us, notes)


def measure_sets(subjects: Sequence[Subject], stopwatch: Stopwatch, sets: int, warmup: int, seed: int | str) -> Measured:
    """Ask every subject input sets 0 to `sets` - 1. Each set is checked thoroughly in a launch of its own, which also tells how the tally grows, then timed
    once, cold and hot, in an order that `seed` decides, and glanced at. A subject that fails at one set has no samples of any.

    `samples` are rows of the table `certified_rounds`.

    Raises:
        FloorViolation: a sample is faster than its bytes can move.
    """
    arms = [_Arm(subject) for subject in subjects]
    for arm in progress(arms, "capture"):
        _guarded(arm, lambda arm: _capture(arm, stopwatch, warmup))
    order = random.Random(seed)
    for which in progress(range(sets), "input sets"):
        _check_all(arms, which, stopwatch)
        if live := _live(arms):
            _round(live, stopwatch, order, which, which)
    samples = [_of_set(row, arm.growth[row["round"]]) for arm in arms for row in arm.samples]
    return _measured(arms, samples, 0, stopwatch.launch_floor_us, [])


def ask(subject: Subject, replay: Replay, which: int, stopwatch: Stopwatch) -> Draft:
    """A copy of what one replay writes for input set `which` into a poisoned draft.

    Raises:
        Incorrect: the draft still changes after the stream is done.
    """
    subject.load(which)
    subject.poison()
    replay()
    stopwatch.wait()
    logits = subject.draft.logits
    early = Draft(subject.tokens.clone(), None if logits is None else logits.clone())
    stopwatch.drain()
    if not _same(early, subject.draft):
        raise Incorrect("the draft changed after its stream was done: the walk writes late, from work that the stream does not wait for")
    return early


def flag_clocks(samples: Sequence[Row], tolerance: float) -> None:
    """Set `valid` to false where the SM clock is further than `tolerance` from the median of all samples."""
    clocks = [row["clock_mhz"] for row in samples if row["clock_mhz"] > 0]
    if not clocks:
        return
    usual = median(clocks)
    for row in samples:
        row["valid"] = row["valid"] and abs(row["clock_mhz"] / usual - 1) <= tolerance


def _admit(arm: _Arm, stopwatch: Stopwatch, warmup: int) -> None:
    _capture(arm, stopwatch, warmup)
    for which in SETS:
        _check(arm, which, stopwatch)


def _capture(arm: _Arm, stopwatch: Stopwatch, warmup: int) -> None:
    arm.subject.load(SETS[0])
    arm.replay = stopwatch.capture(arm.subject.launch, warmup)


def _check(arm: _Arm, which: int, stopwatch: Stopwatch) -> None:
    agreement = arm.subject.examiner.examine(which, ask(arm.subject, _replay(arm), which, stopwatch))
    arm.tokens += agreement.tokens
    arm.near_ties += agreement.near_ties
    arm.astray += agreement.astray


def _check_all(arms: Sequence[_Arm], which: int, stopwatch: Stopwatch) -> None:
    """One launch of every arm, and what its tally says of it."""

    def check(arm: _Arm) -> None:
        before = _tally(arm.subject)
        _check(arm, which, stopwatch)
        again, searched = (after - so_far for after, so_far in zip(_tally(arm.subject), before, strict=True))
        arm.growth[which] = (-1, -1) if arm.subject.tally is None else (again, searched)

    for arm in _live(arms):
        _guarded(arm, check)


def _tally(subject: Subject) -> tuple[int, int]:
    """Of all requests. Synchronises."""
    if subject.tally is None:
        return 0, 0
    again, searched = subject.tally.sum(dim=0).tolist()
    return again, searched


def _round(arms: Sequence[_Arm], stopwatch: Stopwatch, order: random.Random, round_index: int, which: int) -> None:
    for arm in arms:
        arm.subject.load(which)
        arm.subject.poison()
    shots = _shuffled(arms, order)
    readings = stopwatch.time_calls([shot for _, shot in shots])
    _keep(shots, readings, "call", round_index, stopwatch.launch_floor_us)
    for arm in arms:
        _guarded(arm, lambda arm: arm.subject.examiner.glance(which, arm.subject.draft))


def _kernels(arms: Sequence[_Arm], stopwatch: Stopwatch, order: random.Random, replays: int) -> list[str]:
    for round_index in progress(range(replays if arms else 0), "kernels alone"):
        shots = _shuffled(arms, order)
        try:
            readings = stopwatch.time_kernels([shot for _, shot in shots])
        except RuntimeError as error:  # no CUPTI here; calls are measured all the same
            return [f"no kernel times: {error}"]
        _keep(shots, readings, "kernel", round_index, 0.0)
    return []


def _same(one: Draft, other: Draft) -> bool:
    """Bit for bit, so that a logit that is still poison equals itself."""
    logits = [draft.logits.view(torch.int16) for draft in (one, other) if draft.logits is not None]
    return torch.equal(one.tokens, other.tokens) and (not logits or torch.equal(*logits))


def _keep(shots: Sequence[tuple[_Arm, Shot]], readings: Sequence[Reading], scope: str, round_index: int, launch_floor_us: float) -> None:
    if not readings:
        return
    for place, ((arm, shot), reading) in enumerate(zip(shots, readings, strict=True)):
        floor_us = max(arm.subject.floor_us[shot.l2], launch_floor_us)
        assert_above(floor_us, reading.time_us, f"{arm.subject} ({shot.l2} L2, {scope}, round {round_index})")
        arm.samples.append(_sample(arm, shot, reading, scope, round_index, place))


def _sample(arm: _Arm, shot: Shot, reading: Reading, scope: str, round_index: int, place: int) -> Row:
    return {
        **arm.subject.cell,
        "l2": shot.l2,
        "scope": scope,
        "round": round_index,
        "order": place,
        "time_us": reading.time_us,
        "clock_mhz": reading.clock_mhz,
        "valid": reading.steady,
    }


def _of_set(row: Row, growth: tuple[int, int]) -> Row:
    """A sample as a row of the table `certified_rounds`."""
    kept = {column: value for column, value in row.items() if column not in ("scope", "round")}
    return {**kept, "set": row["round"], "again": growth[0], "searched": growth[1]}


def _measured(arms: Sequence[_Arm], samples: list[Row], replica: int, launch_floor_us: float, notes: list[str]) -> Measured:
    approximate = [arm for arm in _live(arms) if arm.subject.rounding == Rounding.APPROXIMATE]
    return Measured(
        samples,
        [_cell(arm, replica, launch_floor_us) for arm in arms],
        notes,
        [{**arm.subject.cell, "replica": replica, "tokens": arm.tokens, "astray": arm.astray} for arm in approximate],
    )


def _cell(arm: _Arm, replica: int, launch_floor_us: float) -> Row:
    return cell_row(
        arm.subject.cell,
        replica,
        arm.status,
        arm.reason,
        rounding=arm.subject.rounding,
        tokens=arm.tokens,
        near_ties=arm.near_ties,
        floor_us=max(arm.subject.floor_us["cold"], launch_floor_us),
    )


def cell_row(
    cell: Any, replica: int, status: Status, reason: str, rounding: str = "", tokens: int = 0, near_ties: int = 0, floor_us: float = 0.0
) -> Row:
    """A row of the table `cells`; what was not reached is zero or empty."""
    found = {"rounding": rounding, "tokens": tokens, "near_ties": near_ties, "floor_us": floor_us}
    return {**cell, "replica": replica, "status": str(status), "reason": reason, **found}


def _guarded(arm: _Arm, step: Any) -> None:
    try:
        step(arm)
    except Exception as error:  # one arm that fails is a row with its reason; the others go on
        arm.fail(error)


def _live(arms: Sequence[_Arm]) -> list[_Arm]:
    return [arm for arm in arms if arm.status is Status.OK]


def _replay(arm: _Arm) -> Replay:
    assert arm.replay is not None  # a live arm was captured
    return arm.replay


def _shuffled(arms: Sequence[_Arm], order: random.Random) -> list[tuple[_Arm, Shot]]:
    shots = [(arm, Shot(_replay(arm), l2)) for arm in arms for l2 in L2]
    order.shuffle(shots)
    return shots


def progress(items: Any, what: str) -> Any:
    """`items` with a bar and an estimate of the time left, on a terminal."""
    from tqdm import tqdm

    return tqdm(items, desc=what, disable=None, leave=False)
