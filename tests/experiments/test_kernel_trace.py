from __future__ import annotations

import random

import pytest

from experiments.kernel_trace import Activity, busy_us, idle_us, windows

MARK = "void at::native::vectorized_elementwise_kernel<4, at::native::erfinv_kernel_cuda(...)>"


def _trace(*names: str) -> list[Activity]:
    """Kernels one after the other; a name's digits are its duration in ns."""
    return [Activity(name, place * 10_000, int("".join(filter(str.isdigit, name)) or 9)) for place, name in enumerate(names)]


def test_only_what_stands_between_markers_counts() -> None:
    trace = _trace("flush 70000", "spin 50000", MARK, "gemv 3000", "copy 500", MARK, "flush 70000", MARK, "walk 30000", MARK)
    random.Random(0).shuffle(trace)  # a profiler promises no order
    found = windows(trace, 2)
    assert [[activity.name for activity in window] for window in found] == [["gemv 3000", "copy 500"], ["walk 30000"]]
    assert [busy_us(window) for window in found] == [3.5, 30.0]
    assert [idle_us(window) for window in found] == [7.0, 0.0], "two kernels start 10 us apart"


@pytest.mark.parametrize(
    "names",
    [
        (MARK, "gemv 3000", MARK),
        (MARK, "gemv 3000", MARK, MARK, MARK),
        (MARK, "gemv 3000", MARK, MARK, "gemv 3000"),
        (),
    ],
    ids=["a window is missing", "an empty window", "an open window", "no CUPTI"],
)
def test_a_trace_that_lost_something_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(RuntimeError, match="instead of 2"):
        windows(_trace(*names), 2)


def test_kernels_that_overlap_leave_no_idle_time_between_them() -> None:
    window = [Activity("long", 0, 5000), Activity("short", 1000, 1000), Activity("late", 6000, 1000)]
    assert idle_us(window) == 1.0
