"""Whether a change is small enough not to matter: two one-sided tests, read off the interval.

An interval that covers 0 says that no difference was seen, and a wide one says so of anything. Equivalence must be shown instead: both "the
change is -margin or less" and "it is +margin or more" are rejected at level ALPHA exactly if the interval at 1 - 2 ALPHA lies within the
margin (TOST: Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15, 1987).
"""

from __future__ import annotations

import math
from enum import StrEnum
from statistics import NormalDist

from analysis.clusters import NARROW, RatioChange

ALPHA = (1 - NARROW) / 2


class Equivalence(StrEnum):
    """What may be said of a change. A change can differ from 0 and still lie within the margin: that is `equivalent`."""

    EQUIVALENT = "equivalent"
    DIFFERENT = "different"
    UNDECIDED = "undecided"


def equivalence(change: RatioChange, margin: float) -> Equivalence:
    """The verdict on a change in %.

    `equivalent`: its 90 % interval lies within +-`margin` %. `different`: not so, and its 95 % interval leaves out 0. `undecided`: the rest, so
    also one cluster, which has no interval.

    Raises:
        ValueError: a margin that is not above 0.
    """
    _check(margin)
    if -margin < change.narrow.low and change.narrow.high < margin:
        return Equivalence.EQUIVALENT
    return Equivalence.DIFFERENT if change.wide.low > 0 or change.wide.high < 0 else Equivalence.UNDECIDED


def clusters_needed(change: RatioChange, margin: float) -> float:
    """With how many clusters the change would be equivalent: n (z se / (margin - |change|))^2, a whole number, z for ALPHA on one side.

    It takes the change as it was seen and a standard error that falls with the square root of n; then the end of the 90 % interval lies on the
    margin, so that with this many the odds are about even. Infinite where the change reaches the margin (more clusters can only show
    that it is different) and where one cluster tells no standard error.

    Raises:
        ValueError: a margin that is not above 0.
    """
    _check(margin)
    room = margin - abs(change.value)
    if room <= 0 or math.isnan(change.standard_error):
        return math.inf
    z = NormalDist().inv_cdf(1 - ALPHA)
    return max(1, math.ceil(change.clusters * (z * change.standard_error / room) ** 2))


def _check(margin: float) -> None:
    if not margin > 0:
        raise ValueError(f"an equivalence margin is above 0; got {margin:g}")
