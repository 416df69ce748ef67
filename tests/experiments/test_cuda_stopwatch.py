"""On a GPU: times are those of the bytes that move, and work outside the graph is caught."""

from __future__ import annotations

import pytest
import torch

from experiments.measure import measure
from experiments.schema import Config, Timing
from experiments.stopwatch import L2, Shot
from experiments.workload import Arm, Workload, create
from kernels.device import CONFIGS, DeviceSpec, load
from kernels.reference import walk
from kernels.walk import Draft, Resources, Rounding, WalkInputs

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> DeviceSpec:
    live = torch.cuda.get_device_name(0)
    found = [spec for spec in map(load, sorted(path.stem for path in CONFIGS.glob("*.yaml"))) if spec.is_cuda and spec.product in live]
    return found[0] if found else pytest.skip(f"configs/device has no {live}")


def test_a_read_takes_as_long_as_its_bytes_cold_and_less_hot(device: DeviceSpec) -> None:
    from experiments.cuda_stopwatch import CudaStopwatch

    stopwatch = CudaStopwatch(device)
    half_l2 = torch.ones(device.l2_bytes // 8, device="cuda")
    total = torch.zeros((), device="cuda")

    def read() -> None:
        torch.sum(half_l2, 0, out=total)

    replay = stopwatch.capture(read, warmup=2)
    shots = [Shot(replay, l2) for l2 in L2] * 5
    calls, kernels = stopwatch.time_calls(shots)[-2:], stopwatch.time_kernels(shots)[-2:]
    floor_us = half_l2.numel() * 4 / (device.hbm_gb_s * 1e3)
    assert floor_us < calls[0].time_us < 5 * floor_us
    assert calls[1].time_us < calls[0].time_us
    assert all(kernel.time_us < call.time_us for kernel, call in zip(kernels, calls, strict=True))
    assert all(500 < reading.clock_mhz <= 1.05 * device.clock_mhz for reading in calls + kernels)


def test_work_on_a_stream_that_nobody_waits_for_is_not_an_answer(config: Config, device: DeviceSpec) -> None:
    from experiments.cuda_stopwatch import CudaStopwatch

    object.__setattr__(config, "device", device)
    workload = Workload(config, max_steps=2, batch=1)
    elsewhere = torch.cuda.Stream()
    answer = walk(workload.head, workload.sets[0], Rounding.TWICE).tokens

    class Elsewhere:
        resources = Resources()

        def launch(self, inputs: WalkInputs, out: Draft) -> None:
            with torch.cuda.stream(elsewhere):
                out.tokens.copy_(answer)

    subject = workload.subject(Arm("elsewhere", create("reference", {}), Elsewhere()), 2)
    (cell,) = measure([subject], CudaStopwatch(device), Timing(rounds=1, warmup=1, kernel_replays=0), 0).cells
    assert cell["status"] != "ok"
