"""Takes the time of a call. One protocol; the CPU's is here, the GPU's in `cuda_stopwatch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from experiments.kernel_trace import Activity

Replay = Callable[[], None]
L2 = ("cold", "hot")


@dataclass(frozen=True)
class Shot:
    """One replay to time: after other data filled the cache (cold), or right after the same replay (hot)."""

    replay: Replay
    l2: str


@dataclass(frozen=True)
class Reading:
    """What a shot took. clock_mhz is 0 where no clock can be read; steady is false while hardware or heat held the clock back."""

    time_us: float
    clock_mhz: float = 0.0
    steady: bool = True


class Stopwatch(Protocol):
    """How calls are captured and timed on one kind of device."""

    launch_floor_us: float  # no call, however small, is shorter
    cold: str  # how "cold" is made, in words

    def capture(self, launch: Callable[[], None], warmup: int) -> Replay:
        """Warm `launch` up and return what an engine would replay."""
        ...

    def wait(self) -> None:
        """Until the current stream is done, and nothing else."""
        ...

    def drain(self) -> None:
        """Until the whole device is done."""
        ...

    def time_calls(self, shots: Sequence[Shot]) -> list[Reading]:
        """Complete calls, in this order."""
        ...

    def time_kernels(self, shots: Sequence[Shot]) -> list[Reading]:
        """The sum of kernel durations inside each replay; empty where nothing can tell them apart from the call."""
        ...

    def trace(self, shots: Sequence[Shot]) -> list[list[Activity]]:
        """What ran on the device inside each replay; empty where nothing can tell.

        Raises:
            RuntimeError: the profiler did not see all of it.
        """
        ...


class CpuStopwatch:
    """Wall time of a plain call."""

    launch_floor_us = 0.0
    cold = "read 32 MiB of other data before every sample, outside the timed window"

    def __init__(self) -> None:
        self._other = torch.zeros(32 << 18)

    def capture(self, launch: Callable[[], None], warmup: int) -> Replay:
        for _ in range(warmup):
            launch()
        return launch

    def wait(self) -> None: ...

    def drain(self) -> None: ...

    def time_calls(self, shots: Sequence[Shot]) -> list[Reading]:
        return [self._time(shot) for shot in shots]

    def time_kernels(self, shots: Sequence[Shot]) -> list[Reading]:
        return []

    def trace(self, shots: Sequence[Shot]) -> list[list[Activity]]:
        return []

    def _time(self, shot: Shot) -> Reading:
        if shot.l2 == "cold":
            self._other.sum()
        else:
            shot.replay()
        start = time.perf_counter_ns()
        shot.replay()
        return Reading((time.perf_counter_ns() - start) / 1e3)
