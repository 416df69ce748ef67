"""CUDA graphs, events and clocks: how a GPU call is timed.

A sample is [cold: read 4x L2 of other data | hot: the same replay, untimed], a 50 us spin that measures the SM clock and lets the
host run ahead (so no launch latency of the host is in the window), an event, the graph replay, an event. Nothing synchronises
between the samples of one round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from experiments import gpu
from experiments.kernel_trace import Activity, busy_us, windows
from experiments.stopwatch import Reading, Replay, Shot
from kernels.clock import ClockProbe
from kernels.device import DeviceSpec

FLUSH = 4  # times L2


class CudaStopwatch:
    """Times graph replays on the current stream of cuda:0."""

    launch_floor_us = 1.5  # an almost empty graph takes 2.9 us on an H200; no replay was ever seen below 2
    cold = f"read {FLUSH}x L2 of other data with a torch reduction before every sample, outside the timed window"

    def __init__(self, device: DeviceSpec) -> None:
        self._other = torch.zeros(FLUSH * device.l2_bytes // 4, device="cuda")
        self._marker = torch.zeros(1, device="cuda")
        self._probes: dict[int, ClockProbe] = {}

    def capture(self, launch: Callable[[], None], warmup: int) -> Replay:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warmup):
                launch()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        return graph.replay

    def wait(self) -> None:
        torch.cuda.current_stream().synchronize()

    def drain(self) -> None:
        torch.cuda.synchronize()

    def flush(self) -> None:
        """Fill L2 with clean lines of other data."""
        self._other.sum()

    def clock_probe(self, slots: int) -> ClockProbe:
        """A probe with room for `slots` readings, made once for each size."""
        if slots not in self._probes:
            self._probes[slots] = ClockProbe(slots)
        return self._probes[slots]

    def time_calls(self, shots: Sequence[Shot]) -> list[Reading]:
        probe = self.clock_probe(len(shots))
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in shots]
        for slot, (shot, (start, stop)) in enumerate(zip(shots, pairs, strict=True)):
            self._set_scene(shot)
            probe.enqueue(slot)
            start.record()
            shot.replay()
            stop.record()
        torch.cuda.synchronize()
        times = [start.elapsed_time(stop) * 1e3 for start, stop in pairs]
        return self._readings(times, probe)

    def time_kernels(self, shots: Sequence[Shot]) -> list[Reading]:
        probe = self.clock_probe(len(shots))
        return self._readings([busy_us(window) for window in self.trace(shots)], probe)

    def trace(self, shots: Sequence[Shot]) -> list[list[Activity]]:
        from torch.profiler import ProfilerActivity, profile

        probe = self.clock_probe(len(shots))
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for slot, shot in enumerate(shots):
                self._set_scene(shot)
                probe.enqueue(slot)
                self._marker.erfinv_()
                shot.replay()
                self._marker.erfinv_()
            torch.cuda.synchronize()
        results = trace.profiler.kineto_results if trace.profiler else None
        on_device = [event for event in results.events() if str(event.device_type()).endswith("CUDA")] if results else []
        return windows([Activity(event.name(), event.start_ns(), event.duration_ns()) for event in on_device], len(shots))

    def _set_scene(self, shot: Shot) -> None:
        if shot.l2 == "cold":
            self.flush()
        else:
            shot.replay()

    def _readings(self, times_us: Sequence[float], probe: ClockProbe) -> list[Reading]:
        steady = not gpu.is_held_back()
        return [Reading(time_us, mhz, steady) for time_us, mhz in zip(times_us, probe.read_mhz(), strict=True)]
