from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.floor import FloorViolation, assert_above, memory_floor_us
from kernels.device import load
from kernels.walk import Resources

H200 = load("h200")
SIZES = st.integers(0, 200_000_000)


def test_a_resident_walk_must_read_its_weights_once() -> None:
    resident = Resources(entry_bytes=38_895_616)
    assert memory_floor_us(resident, 16, 0, H200, "cold") == pytest.approx(38_895_616 / 4800e3)  # 8.1 us
    assert memory_floor_us(resident, 1, 0, H200, "cold") == memory_floor_us(resident, 16, 0, H200, "cold")
    assert memory_floor_us(resident, 16, 0, H200, "hot") == 0.0  # 38.9 MB fit into 62.9 MB of L2


def test_a_stream_larger_than_l2_comes_from_hbm_at_every_step() -> None:
    bf16 = Resources(streamed_bytes=77_791_232)
    spill = 77_791_232 - H200.l2_bytes
    assert memory_floor_us(bf16, 7, 0, H200, "cold") == pytest.approx((77_791_232 + 6 * spill) / 4800e3)
    assert memory_floor_us(bf16, 7, 0, H200, "hot") == pytest.approx(7 * spill / 4800e3)
    int8 = Resources(streamed_bytes=38_895_616)
    assert memory_floor_us(int8, 16, 0, H200, "cold") == pytest.approx(38_895_616 / 4800e3)  # later steps may hit L2


def test_written_logits_count_where_l2_cannot_hold_them_back() -> None:
    walk = Resources(entry_bytes=1_000_000)
    written = 64 * 16 * 151_936 * 2  # 311 MB
    assert memory_floor_us(walk, 16, written, H200, "cold", written) == pytest.approx((1_000_000 + 2 * written - H200.l2_bytes) / 4800e3)
    assert memory_floor_us(walk, 16, 0, H200, "cold", H200.l2_bytes) == memory_floor_us(walk, 16, 0, H200, "cold")


@given(entry=SIZES, streamed=SIZES, base=SIZES, written=SIZES, steps=st.integers(1, 16))
def test_hot_is_never_above_cold_and_more_never_costs_less(entry: int, streamed: int, base: int, written: int, steps: int) -> None:
    walk = Resources(entry_bytes=entry, streamed_bytes=streamed)
    cold = memory_floor_us(walk, steps, base, H200, "cold", written)
    assert 0 <= memory_floor_us(walk, steps, base, H200, "hot", written) <= cold
    assert cold <= memory_floor_us(walk, steps + 1, base, H200, "cold", written)
    assert cold <= memory_floor_us(walk, steps, base + 1000, H200, "cold", written + 1000)


def test_a_device_without_a_rate_has_no_floor() -> None:
    assert memory_floor_us(Resources(entry_bytes=10**9), 4, 10**9, load("cpu"), "cold") == 0.0


def test_the_error_holds_the_numbers() -> None:
    assert_above(2.0, 2.0, "walk")
    with pytest.raises(FloorViolation, match=r"walk took 1\.500 us, below its floor of 2\.000 us"):
        assert_above(2.0, 1.5, "walk")
