"""The values that an 8-bit format can represent, and where it has them: the format's largest is 1, as the largest weight of a row becomes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Levels:
    """The positive values of a format, [n] float64 in ascending order; the last is 1."""

    positive: NDArray[np.float64]

    def below(self, magnitude: float) -> float:
        """The share of the positive values that lie below `magnitude`."""
        return float((self.positive < magnitude).mean())

    def crossover(self, even: Levels) -> float:
        """Where the steps become wider than those of `even`, whose steps are all alike: the lowest value with a wider step above it; 1 if none is."""
        wider = np.diff(self.positive) > even.positive[0] * (1 + 1e-9)  # equal steps differ by their rounding
        return float(self.positive[wider.argmax()]) if wider.any() else 1.0


def _float_levels(exponent_bits: int, mantissa_bits: int, largest: float) -> Levels:
    """The finite positive values of an 8-bit float with subnormals; `largest` tells which patterns at the top are no numbers."""
    steps, bias = 2**mantissa_bits, 2 ** (exponent_bits - 1) - 1
    subnormal = np.arange(1, steps) / steps * 2.0 ** (1 - bias)
    normal = np.outer(2.0 ** (np.arange(1, 2**exponent_bits) - bias), 1 + np.arange(steps) / steps).ravel()
    values = np.concatenate([subnormal, normal])
    return Levels(values[values <= largest] / largest)


# OCP 8-bit floating point, revision 1.0: e4m3 has no infinity and one NaN pattern a sign, e5m2 is as IEEE formats are.
LEVELS = {"int8": Levels(np.arange(1, 128) / 127), "e4m3": _float_levels(4, 3, 448.0), "e5m2": _float_levels(5, 2, 57_344.0)}
