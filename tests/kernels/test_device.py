"""Device specs: facts that hold together, an unknown name, and a live GPU that is another one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.device import CONFIGS, DeviceSpec, check_live, load
from kernels.walk import Unsupported

NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch):
    """Pretend that torch sees this GPU."""

    def pretend(name: str, major: int, minor: int, sms: int) -> None:
        properties = SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=sms)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    return pretend


@pytest.mark.parametrize("name", NAMES)
def test_a_spec_holds_together(name: str) -> None:
    spec = load(name)
    assert spec.name == name
    assert spec.is_cuda == (spec.arch != "cpu")
    if spec.is_cuda:
        assert spec.product.lower() == name
        assert spec.register_bytes_per_sm == 65_536 * 4
        assert spec.smem_bytes_per_cta == spec.smem_bytes_per_sm - 1024, "the driver keeps 1 KiB a CTA"
        assert spec.smem_bytes_per_cta < spec.l2_bytes < spec.hbm_bytes
        assert spec.hbm_gb_s > 1000
        assert spec.source


def test_facts_of_the_h200() -> None:
    spec = load("h200")
    assert (spec.arch, spec.sms) == ("sm_90a", 132)
    assert spec.on_chip_bytes == 132 * (256 + 228) * 1024 == 65_421_312
    assert load("b200").on_chip_bytes == 148 * (256 + 228 + 256) * 1024, "tensor memory counts"
    assert load("cpu").on_chip_bytes == 0


def test_an_unknown_device_is_answered_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match=f"no device is called 'h300'; configs/device has: {', '.join(NAMES)}."):
        load("h300")


def test_the_cpu_is_always_there() -> None:
    assert check_live(load("cpu")) == "cpu"


@pytest.mark.parametrize("name", ["h100", "h200", "b200"])
def test_no_gpu_is_a_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match=f"device={name} needs a CUDA GPU and this machine has none; use device=cpu, or send the plan"):
        check_live(load(name))


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("h200", ("NVIDIA H200", 9, 0, 132)),
        ("h100", ("NVIDIA H100 80GB HBM3", 9, 0, 132)),
        ("b200", ("NVIDIA B200", 10, 0, 148)),
    ],
)
def test_the_gpu_that_was_asked_for(name: str, gpu: tuple[str, int, int, int], live) -> None:
    live(*gpu)
    assert check_live(load(name)) == "cuda"


@pytest.mark.parametrize(
    ("spec", "gpu"),
    [
        (load("h200"), ("NVIDIA H100 80GB HBM3", 9, 0, 132)),
        (load("h100"), ("NVIDIA H100 PCIe", 9, 0, 114)),
        (load("h200"), ("NVIDIA B200", 10, 0, 148)),
        (load("b200"), ("NVIDIA B300 B200", 10, 3, 148)),
        (DeviceSpec("any", "sm_100a", sms=132), ("NVIDIA H200", 9, 0, 132)),
    ],
)
def test_another_gpu_is_refused_with_both(spec: DeviceSpec, gpu: tuple[str, int, int, int], live) -> None:
    live(*gpu)
    name, major, minor, sms = gpu
    with pytest.raises(Unsupported) as refused:
        check_live(spec)
    asked = f"device={spec.name} is {spec.product} ({spec.arch}, {spec.sms} SMs)"
    assert str(refused.value).startswith(f"{asked} but this GPU is {name} (sm_{major}{minor}, {sms} SMs)")
