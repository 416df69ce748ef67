"""What the live GPU says of itself, through NVML. On a machine without one every answer is empty, never an error."""

from __future__ import annotations

import os
import platform
from functools import cache
from typing import Any

from kernels.device import DeviceSpec

# bits of nvmlClocksEventReasons (NVML API reference, "Clocks Event Reasons")
_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
    0x100: "display_clock",
}
_SLOWS = 0x8 | 0x20 | 0x40 | 0x80  # hardware or heat holds the clock back: samples taken then are flagged


def describe(spec: DeviceSpec) -> dict[str, Any]:
    """The device of a record: the spec's name beside what the driver reports."""
    if not spec.is_cuda:
        return {"spec": spec.name, "name": platform.processor() or platform.machine(), "driver": "", "cuda": ""}
    nvml, gpu = _open()
    if nvml is None:
        return {"spec": spec.name, "name": "", "driver": "", "cuda": ""}
    cuda = nvml.nvmlSystemGetCudaDriverVersion()
    return {
        "spec": spec.name,
        "name": _text(nvml.nvmlDeviceGetName(gpu)),
        "driver": _text(nvml.nvmlSystemGetDriverVersion()),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
    }


def state(spec: DeviceSpec) -> dict[str, Any]:
    """Clocks (MHz), temperature (C), power (W) and throttle reasons, now. Empty on a CPU."""
    nvml, gpu = _open() if spec.is_cuda else (None, None)
    if nvml is None:
        return {}
    return {
        "sm_mhz": _ask(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
        "memory_mhz": _ask(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)),
        "temperature_c": _ask(lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
        "power_w": _ask(lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
        "throttle": [name for bit, name in _REASONS.items() if _reasons() & bit],
    }


def is_held_back() -> bool:
    """Whether hardware or heat holds the clock back right now."""
    return bool(_reasons() & _SLOWS)


def _reasons() -> int:
    nvml, gpu = _open()
    if nvml is None:
        return 0
    return _ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)) or 0


@cache
def _open() -> tuple[Any, Any]:
    """NVML and the handle of the GPU that torch calls cuda:0, or two Nones."""
    try:
        import pynvml

        pynvml.nvmlInit()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
        if first.startswith("GPU-"):
            return pynvml, pynvml.nvmlDeviceGetHandleByUUID(first)
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdigit() else 0)
    except Exception:  # no driver, no package, no permission: facts are then missing, and the measurement goes on
        return None, None


def _ask(question: Any) -> Any:
    try:
        return question()
    except Exception:  # one fact that this GPU or container does not tell
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
