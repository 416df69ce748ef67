"""The SM clock beside a sample, measured on the GPU itself by a kernel that spins for a few microseconds."""

from __future__ import annotations

import ctypes

import torch

from kernels.build import build
from kernels.driver import Function, LaunchShape

_SOURCE = """#include "probes/clock_probe.cuh"
struct ClockParams {
  wts::int64_t* out;
  wts::int64_t spin_ns;
};
extern "C" __global__ void clock_probe(const __grid_constant__ ClockParams p) { wts::clock_probe(p.out, p.spin_ns); }
"""


class _ClockParams(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("spin_ns", ctypes.c_int64))


class ClockProbe:
    """`slots` readings of the SM clock, each taken where it is enqueued on the stream.

    A reading spins about `spin_us` microseconds: with a timer of 32 ns (H200) that is a resolution of 0.1 % at 50 us. The spin also lets the host
    run ahead, so that what follows starts without waiting for a launch.
    """

    def __init__(self, slots: int, spin_us: float = 50.0) -> None:
        major, minor = torch.cuda.get_device_capability()
        kernel = build(_SOURCE, "clock_probe", f"sm_{major}{minor}")
        self._function = Function(kernel, LaunchShape(ctas=1, threads=1))
        self._readings = torch.zeros(slots, 2, dtype=torch.int64, device="cuda")
        self._spin_ns = int(spin_us * 1e3)

    def enqueue(self, slot: int) -> None:
        """Take reading `slot` on the current stream."""
        self._function.launch(_ClockParams(out=self._readings[slot].data_ptr(), spin_ns=self._spin_ns))

    def read_mhz(self) -> list[float]:
        """MHz of every slot; call after the stream has been waited for."""
        cycles, nanoseconds = self._readings.cpu().unbind(dim=1)
        return (cycles / nanoseconds * 1e3).tolist()
