"""Kernel times out of a profiler's trace: what ran between one marker and the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MARKER = "erfinv"  # part of the name of a kernel that no walk launches; one stands before and one after every replay


@dataclass(frozen=True)
class Activity:
    """One kernel, copy or fill on the device, as CUPTI saw it. Times in ns."""

    name: str
    start_ns: int
    duration_ns: int


def windows(activities: Iterable[Activity], count: int) -> list[list[Activity]]:
    """What ran between the first and second marker, the third and fourth, and so on, in the order of its start.

    Raises:
        RuntimeError: the trace does not hold `count` windows with work in each; kernel times would then be wrong.
    """
    found: list[list[Activity]] = []
    inside = False
    for activity in sorted(activities, key=lambda item: item.start_ns):
        if MARKER in activity.name:
            inside = not inside
            if inside:
                found.append([])
        elif inside:
            found[-1].append(activity)
    if inside or len(found) != count or not all(found):
        raise RuntimeError(
            f"the profiler saw {len(found)} replays, {sum(1 for item in found if item)} of them with kernels, instead of {count}"
        )
    return found


def busy_us(window: Sequence[Activity]) -> float:
    """The summed device time of a window."""
    return sum(activity.duration_ns for activity in window) / 1e3


def idle_us(window: Sequence[Activity]) -> float:
    """The time between the first start and the last end of a window in which nothing ran. Kernels may overlap."""
    idle_ns, end_ns = 0, window[0].start_ns
    for activity in window:
        idle_ns += max(0, activity.start_ns - end_ns)
        end_ns = max(end_ns, activity.start_ns + activity.duration_ns)
    return idle_ns / 1e3
