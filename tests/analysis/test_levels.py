"""The levels of the formats, from their bit patterns; where a step is wider than int8's."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.levels import LEVELS


def _values(exponent_bits: int, mantissa_bits: int, patterns: int) -> list[float]:
    """Positive values of the first patterns after 0, bit by bit."""
    bias, found = 2 ** (exponent_bits - 1) - 1, []
    for pattern in range(1, patterns):
        exponent, mantissa = divmod(pattern, 2**mantissa_bits)
        leading = 1 if exponent else 0
        found.append((leading + mantissa / 2**mantissa_bits) * 2.0 ** (max(exponent, 1) - bias))
    return found


@pytest.mark.parametrize(
    ("name", "values", "top"),
    [
        ("int8", list(range(1, 128)), 127),
        ("e4m3", _values(4, 3, 0x7F), 448),  # 0x7F is the NaN
        ("e5m2", _values(5, 2, 0x7C), 57_344),  # 0x7C is infinity
    ],
)
def test_levels_are_all_positive_finite_values_over_the_largest(name: str, values: list[float], top: float) -> None:
    assert values[-1] == top
    assert LEVELS[name].positive == pytest.approx(np.array(values) / top, rel=1e-15)


def test_the_floats_are_torchs() -> None:
    torch = pytest.importorskip("torch")
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        values = torch.arange(1, 128, dtype=torch.uint8).view(dtype).double().numpy()
        assert LEVELS[name].positive == pytest.approx(values[np.isfinite(values)] / torch.finfo(dtype).max, rel=1e-15)


def test_the_paper_puts_three_quarters_of_e4m3_below_the_crossing() -> None:
    even = LEVELS["int8"]
    at = LEVELS["e4m3"].crossover(even)
    assert at == 32 / 448  # there a step becomes 4 / 448, more than 1 / 127
    assert LEVELS["e4m3"].below(at) == pytest.approx(0.75, abs=0.005)  # "75% of its levels", Figure 6's caption
    assert LEVELS["e5m2"].crossover(even) == 2048 / 57_344
    assert LEVELS["e5m2"].below(2048 / 57_344) == 103 / 123
    assert even.crossover(even) == 1.0
    assert (even.below(1 / 127), even.below(0.5), even.below(2.0)) == (0.0, 63 / 127, 1.0)
