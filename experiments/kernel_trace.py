"""Kernel times out of a profiler's trace: what ran between one marker and the next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MARKER = "erfinv"  # part of the name of a kernel that no walk launches; one stands before and one after every replay


@dataclass(frozen=True)
class Activity:
    """One kernel, copy or fill on the device, as CUPTI saw it. Times in ns."""

    name: str
    start_ns: int
    duration_ns: int


def kernel_times_us(activities: Iterable[Activity], windows: int) -> list[float]:
    """The summed device time between the first and second marker, the third and fourth, and so on.

    Raises:
        RuntimeError: the trace does not hold `windows` windows with work in each; kernel times would then be wrong.
    """
    sums: list[float] = []
    inside = False
    for activity in sorted(activities, key=lambda item: item.start_ns):
        if MARKER in activity.name:
            inside = not inside
            if inside:
                sums.append(0.0)
        elif inside:
            sums[-1] += activity.duration_ns / 1e3
    if inside or len(sums) != windows or not all(sums):
        raise RuntimeError(
            f"the profiler saw {len(sums)} replays, {sum(1 for item in sums if item)} of them with kernels, instead of {windows}"
        )
    return sums
