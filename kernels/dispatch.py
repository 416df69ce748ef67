"""Which of two walks the next round takes: the certified one, whose time depends on the data, or a serial one, whose time does not.

What a certified round took is known by its counts (`certified_sm80`'s tally), read without waiting for the GPU and so some rounds late. Their
exponential average m says what the next one will take. Below the serial time S the next round is certified. Else it is serial, and after
a wait one round tries the certified walk again. A try as dear as S doubles the wait, up to the longest; one that is cheaper is followed by the next try
as soon as it is told, until m is below S. The wait is the first again once the walk has kept m below S for as many rounds as it was long.

Regret. Let B be the least that a certified round takes, W the most, w the weight of the average, n the number of tries, and let a round be told before
the next but `late` is chosen. Whatever the rounds are, all of them together take at most

    (W - B) / w + (n + 1) (1 + late) (W - S)

longer than serial ones. Proof: a told round takes x = m + (m' - m) / w where m' is the average after it, so the sum of x - S over told rounds is that of
m - S, plus a telescope of at most (W - B) / w. While the certified walk is settled on, m < S. What else is told are tries, and rounds under way when m left
that side, `late` at most each time (they move m only; if back below S, a try is due at once). Only a try leads back, so that happens n times, and once more
unless the walk is settled on at the end, with at most 1 + late rounds never told. Each of all these adds at most W - S.

- All rounds cheaper than S: all are certified, so there is no regret.
- All rounds at S or above it: after the first `needed(B, x)` told ones only tries, whose share tends to 1 / (longest + 1), or to 1 / (late + 1) if that is less.
- From then on all cheaper, x at most: certified again after `longest + late + (1 + late) needed(W, x)` rounds, if the longest wait is no shorter than late.
- From then on all dearer, x at least: only tries after `3 late + 1 + needed(B, x)` rounds.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import StrEnum


class Choice(StrEnum):
    """The walk of a round."""

    CERTIFIED = "certified"
    SERIAL = "serial"


@dataclass(frozen=True)
class CertifiedCost:
    """What a certified round takes, in us, as measured: `base_us` where the table settles every step, `again_us` more for each that it does not settle,
    and `searched_us` more still for each of those that is searched."""

    base_us: float
    again_us: float
    searched_us: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.base_us) and self.base_us > 0 and all(0 <= us < math.inf for us in (self.again_us, self.searched_us))):
            raise ValueError(f"a certified round has a finite base above 0 and costs of at least 0; got {self}.")

    def us(self, again: int, searched: int) -> float:
        """Of a round with `again` steps that the table did not settle, `searched` of them searched."""
        return self.base_us + self.again_us * again + self.searched_us * searched


@dataclass(frozen=True)
class Terms:
    """What a dispatcher knows and how it learns.

    serial_us: of a round of the serial walk, measured
    cost:      of the certified one
    weight:    of the newest round in the average, above 0 and at most 1
    first:     rounds between tries, at first
    longest:   rounds between tries, at most; the price of an adverse stream is one try in so many and one
    """

    serial_us: float
    cost: CertifiedCost
    weight: float = 1 / 8
    first: int = 8
    longest: int = 512

    def __post_init__(self) -> None:
        if not (math.isfinite(self.serial_us) and self.serial_us > 0):
            raise ValueError(f"a serial round takes a finite time above 0; got serial_us={self.serial_us}.")
        if not (0 < self.weight <= 1 and 1 <= self.first <= self.longest):
            raise ValueError(
                f"a weight is above 0 and at most 1, and 1 <= first <= longest; got weight={self.weight}, first={self.first}, longest={self.longest}."
            )

    def needed(self, average_us: float, round_us: float) -> int:
        """How many told rounds of `round_us` each bring the average from `average_us` to the other side of the serial time; 0 if it is there.

        Raises:
            ValueError: they never do.
        """
        start, end = average_us - self.serial_us, round_us - self.serial_us
        if (start < 0) == (end < 0):
            return 0
        if end == 0:
            raise ValueError(f"an average of {average_us} us comes as near as you like to {self.serial_us} us but never there.")
        if self.weight == 1:
            return 1
        # start (1 - weight)^k + end (1 - (1 - weight)^k) has the sign of `end`
        count = max(1, math.ceil(math.log(end / (end - start)) / math.log1p(-self.weight)))
        return count + 1  # of rounding, and where the average meets the serial time exactly


class Dispatcher:
    """Ask `choose` before every round, and `tell` what every certified one found, in their order.

    average_us: what the next certified round will take, so far as is known
    settled:    what it takes as long as no try is due
    wait:       serial rounds before the next try
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.average_us = terms.cost.base_us
        self.settled = Choice.CERTIFIED if self.average_us < terms.serial_us else Choice.SERIAL
        self.wait = terms.first
        self._kept = 0  # rounds told since the certified walk was settled on
        self._waited = 0  # serial rounds since the last certified one
        self._under_way: deque[bool] = deque()  # certified rounds not told yet: which are tries

    def choose(self) -> Choice:
        """The walk of the next round."""
        trying = self.settled == Choice.SERIAL
        if trying and (any(self._under_way) or (self._waited < self.wait and self.average_us >= self.terms.serial_us)):
            self._waited += 1
            return Choice.SERIAL
        self._waited = 0
        self._under_way.append(trying)
        return Choice.CERTIFIED

    def tell(self, again: int, searched: int) -> None:
        """The counts of the oldest certified round that has not been told.

        Raises:
            ValueError: there is none, or they are no counts.
        """
        if not self._under_way:
            raise ValueError("every certified round has been told already; tell each once.")
        if not 0 <= searched <= again:
            raise ValueError(f"of the steps that are weighed again some are searched; got again={again} and searched={searched}.")
        tried, terms = self._under_way.popleft(), self.terms
        round_us = terms.cost.us(again, searched)
        self.average_us += terms.weight * (round_us - self.average_us)
        cheaper = self.average_us < terms.serial_us
        if self.settled == Choice.CERTIFIED:
            self._keep(cheaper)
        elif tried:
            self._judge(cheaper, round_us)

    def _keep(self, cheaper: bool) -> None:
        """After a round of the certified walk, where it was settled on."""
        self._kept += 1
        if not cheaper:
            self.settled = Choice.SERIAL
        elif self._kept >= self.wait:
            self.wait = self.terms.first

    def _judge(self, cheaper: bool, round_us: float) -> None:
        """After a try."""
        if cheaper:
            self.settled, self._kept = Choice.CERTIFIED, 0
        elif round_us < self.terms.serial_us:
            self._waited = self.wait  # the next one is due
        else:
            self.wait = min(2 * self.wait, self.terms.longest)
