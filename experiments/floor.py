"""The least time a walk can take. A sample below it is an error of the measurement, and fails the run."""

from __future__ import annotations

from kernels.device import DeviceSpec
from kernels.walk import Resources


class FloorViolation(RuntimeError):
    """A time that cannot be: work was skipped, or the clock is wrong."""


def memory_floor_us(resources: Resources, steps: int, base_bytes: int, device: DeviceSpec, l2: str, written_bytes: int = 0) -> float:
    """Microseconds that HBM needs at its datasheet peak for the bytes that no cache can serve.

    Cold: entry bytes, the base logits of all requests (`base_bytes`) and the first pass over the streamed weights all come from HBM; a later
    pass can find at most an L2 full of them. Hot: at most an L2 full is there at the start too. Of the corrected logits that the call
    writes (`written_bytes`) at most an L2 full can still wait there at its end. So this is a lower bound, whatever the replacement policy.
    """
    if not device.hbm_gb_s:
        return 0.0
    first = resources.entry_bytes + resources.streamed_bytes + base_bytes
    if l2 == "hot":
        first = max(0, first - device.l2_bytes)
    later = max(0, resources.streamed_bytes - device.l2_bytes) * (steps - 1)
    evicted = max(0, written_bytes - device.l2_bytes)
    return (first + later + evicted) / (device.hbm_gb_s * 1e3)


def assert_above(floor_us: float, time_us: float, what: str) -> None:
    """Raises:
    FloorViolation: `time_us` is below `floor_us`.
    """
    if time_us < floor_us:
        raise FloorViolation(
            f"{what} took {time_us:.3f} us, below its floor of {floor_us:.3f} us (bytes that must move at peak bandwidth, or the launch itself); "
            "work was skipped or the clock is wrong, so the run is refused."
        )
