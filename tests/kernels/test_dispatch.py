"""The dispatcher: what its text promises of good, bad, switched and arbitrary streams, however late it is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.dispatch import CertifiedCost, Choice, Dispatcher, Terms

STEPS = 7
COST = CertifiedCost(base_us=15.0, again_us=1.5, searched_us=8.0)
Round = tuple[int, int]  # steps that the table does not settle, and those searched

rounds = st.integers(0, STEPS).flatmap(lambda again: st.tuples(st.just(again), st.integers(0, again)))
lates = st.integers(0, 4)
terms = st.builds(
    Terms,
    serial_us=st.floats(15.5, 80.0),
    cost=st.just(COST),
    weight=st.floats(0.05, 1.0),
    first=st.integers(1, 6),
    longest=st.integers(6, 40),
)  # fmt: skip


def _us(round: Round) -> float:
    return COST.us(*round)


def _walk(known: Terms, stream: Sequence[Round], late: int, dispatcher: Dispatcher | None = None) -> tuple[list[Choice], list[Choice]]:
    """The choices of all rounds, and what was settled on before each. A round is told before the next but `late` is chosen."""
    dispatcher = dispatcher or Dispatcher(known)
    choices, settled = [], []
    under_way: deque[tuple[int, Round]] = deque()
    for number, found in enumerate(stream):
        while under_way and under_way[0][0] + late < number:
            dispatcher.tell(*under_way.popleft()[1])
        settled.append(dispatcher.settled)
        choices.append(dispatcher.choose())
        if choices[-1] == Choice.CERTIFIED:
            under_way.append((number, found))
    return choices, settled


def _tries(choices: Sequence[Choice], settled: Sequence[Choice]) -> int:
    return sum(choice == Choice.CERTIFIED and mode == Choice.SERIAL for choice, mode in zip(choices, settled, strict=True))


WORST = _us((STEPS, STEPS))


@settings(max_examples=200)
@given(terms, st.lists(rounds, max_size=300), lates)
@example(Terms(20.0, COST, weight=0.5, first=1, longest=6), [(0, 0), (7, 7)] * 100, 2)
def test_the_regret_of_any_stream_is_bounded(known: Terms, stream: list[Round], late: int) -> None:
    choices, settled = _walk(known, stream, late)
    regret = sum(_us(found) - known.serial_us for choice, found in zip(choices, stream, strict=True) if choice == Choice.CERTIFIED)
    dearest = max(0.0, WORST - known.serial_us)
    assert regret <= (WORST - COST.base_us) / known.weight + (_tries(choices, settled) + 1) * (1 + late) * dearest + 1e-6


@given(terms, st.lists(rounds, max_size=100), lates)
def test_a_good_stream_is_certified_throughout(known: Terms, stream: list[Round], late: int) -> None:
    good = [found for found in stream if _us(found) < known.serial_us]
    assert _walk(known, good, late)[0] == [Choice.CERTIFIED] * len(good)


@given(terms, st.lists(rounds, min_size=1, max_size=20), st.integers(0, 60))
def test_a_bad_stream_is_tried_once_in_the_longest_wait_and_one(known: Terms, stream: list[Round], late: int) -> None:
    bad = [found for found in stream if _us(found) > known.serial_us] or [(STEPS, STEPS)]
    if _us(bad[0]) <= known.serial_us:  # nothing is dearer than this serial walk
        return
    cycles, period = 12, max(known.longest, late) + 1
    before = known.needed(COST.base_us, min(map(_us, bad))) + late + 1 + 8 * (period + 1)  # until it settles, and while the wait doubles
    choices, settled = _walk(known, (bad * (before + cycles * period))[: before + cycles * period], late)
    assert set(settled[before:]) == {Choice.SERIAL}
    assert choices[before:].count(Choice.CERTIFIED) == cycles


@settings(max_examples=200)
@given(terms, st.lists(rounds, max_size=120), rounds, lates)
def test_a_switch_to_good_rounds_is_found_in_time(known: Terms, before: list[Round], good: Round, late: int) -> None:
    if _us(good) >= known.serial_us:
        return
    within = known.longest + late + (1 + late) * known.needed(max(WORST, known.serial_us), _us(good))
    choices, _ = _walk(known, [*before, *[good] * (within + 50)], late)
    assert set(choices[len(before) + within :]) == {Choice.CERTIFIED}


@settings(max_examples=200)
@given(terms, st.lists(rounds, max_size=120), rounds, lates)
def test_a_switch_to_bad_rounds_is_found_in_time(known: Terms, before: list[Round], bad: Round, late: int) -> None:
    if _us(bad) <= known.serial_us:
        return
    within = 3 * late + 1 + known.needed(COST.base_us, _us(bad))
    _, settled = _walk(known, [*before, *[bad] * (within + 50)], late)
    assert set(settled[len(before) + within :]) == {Choice.SERIAL}


def test_tries_come_after_waits_that_double() -> None:
    known = Terms(20.0, COST, weight=1.0, first=2, longest=8)
    choices, _ = _walk(known, [(STEPS, STEPS)] * 40, late=0)
    assert [number for number, choice in enumerate(choices) if choice == Choice.CERTIFIED] == [0, 3, 8, 17, 26, 35]


def test_a_try_is_not_repeated_before_it_is_told() -> None:
    dispatcher = Dispatcher(Terms(20.0, COST, weight=1.0, first=1, longest=4))
    assert dispatcher.choose() == Choice.CERTIFIED
    dispatcher.tell(STEPS, STEPS)
    assert [dispatcher.choose() for _ in range(10)] == [Choice.SERIAL, Choice.CERTIFIED, *[Choice.SERIAL] * 8]
    dispatcher.tell(STEPS, STEPS)
    assert dispatcher.choose() == Choice.CERTIFIED, "the wait of two is over long since"


def test_a_cheap_try_is_followed_at_once_and_the_wait_is_the_first_again_when_it_was_repaid() -> None:
    known = Terms(20.0, COST, weight=0.5, first=1, longest=8)
    dispatcher = Dispatcher(known)
    _walk(known, [(STEPS, STEPS)] * 60, 0, dispatcher)
    assert dispatcher.wait == known.longest
    choices, settled = _walk(known, [(0, 0)] * 40, 0, dispatcher)
    first = choices.index(Choice.CERTIFIED)
    assert set(choices[first:]) == {Choice.CERTIFIED}
    assert settled.index(Choice.CERTIFIED) - first > 1, "one cheap round is not yet believed"
    assert dispatcher.wait == known.first
    # repaid after as many rounds as it was long, and not before
    dispatcher = Dispatcher(known)
    _walk(known, [(STEPS, STEPS)] * 60, 0, dispatcher)
    start = settled.index(Choice.CERTIFIED)
    _walk(known, [(0, 0)] * (start + known.longest), 0, dispatcher)
    assert dispatcher.wait == known.longest
    dispatcher.tell(0, 0)
    assert dispatcher.wait == known.first


def test_rounds_under_way_settle_nothing_but_may_make_a_try_due() -> None:
    dispatcher = Dispatcher(Terms(20.0, COST, weight=0.5, first=4, longest=8))
    for _ in range(4):
        assert dispatcher.choose() == Choice.CERTIFIED
    dispatcher.tell(STEPS, STEPS)
    dispatcher.tell(STEPS, STEPS)
    assert (dispatcher.settled, dispatcher.wait) == (Choice.SERIAL, 4), "what was chosen before is no try, so it doubles no wait"
    assert dispatcher.choose() == Choice.SERIAL
    for _ in range(2):
        dispatcher.average_us = 20.5  # so near that one cheap round leads below
        dispatcher.tell(0, 0)
        assert dispatcher.average_us < 20.0
        assert dispatcher.settled == Choice.SERIAL
    assert dispatcher.choose() == Choice.CERTIFIED, "before the wait is over"
    dispatcher.tell(0, 0)
    assert dispatcher.settled == Choice.CERTIFIED


def test_an_average_that_meets_the_serial_time_is_not_below_it() -> None:
    assert Terms(20.0, COST, weight=0.5).needed(30.0, 10.0) == 2


@given(terms, rounds, rounds)
def test_needed_rounds_are_enough_and_hardly_more(known: Terms, start: Round, found: Round) -> None:
    average, x = _us(start), _us(found)
    if x == known.serial_us:
        return
    count = known.needed(average, x)
    averages = [average]
    for _ in range(count):
        averages.append(averages[-1] + known.weight * (x - averages[-1]))
    sides = [each < known.serial_us for each in averages]
    assert sides[-1] == (x < known.serial_us)
    assert count == 0 or sides[max(0, count - 3)] != sides[-1]


def test_a_cost_counts_what_is_searched_on_top() -> None:
    assert COST.us(3, 1) == 15.0 + 3 * 1.5 + 8.0


def test_a_walk_that_is_never_cheaper_is_settled_on_never() -> None:
    assert Dispatcher(Terms(10.0, COST)).settled == Choice.SERIAL


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CertifiedCost(0.0, 1.0, 1.0), "a finite base above 0"),
        (lambda: CertifiedCost(1.0, -1.0, 1.0), "costs of at least 0"),
        (lambda: Terms(float("nan"), COST), "serial_us=nan"),
        (lambda: Terms(20.0, COST, weight=0.0), "weight=0.0"),
        (lambda: Terms(20.0, COST, first=9, longest=8), "first=9, longest=8"),
        (lambda: Terms(20.0, COST).needed(15.0, 20.0), "never there"),
        (lambda: Dispatcher(Terms(20.0, COST)).tell(0, 0), "told already"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # pyright: ignore[reportCallIssue]


def test_counts_that_are_none_are_refused() -> None:
    dispatcher = Dispatcher(Terms(20.0, COST))
    dispatcher.choose()
    with pytest.raises(ValueError, match="got again=1 and searched=2"):
        dispatcher.tell(1, 2)
