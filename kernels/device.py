"""What a GPU offers a resident walk, read from `configs/device/NAME.yaml` and checked against the live one."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from kernels.unsupported import Unsupported

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "device"


@dataclass(frozen=True)
class DeviceSpec:
    """Capacities and peak rates of one device, all of them facts with a source (see the YAML files).

    arch is "cpu" or the PTX target ("sm_90a"); sizes are per SM or per CTA as named; rates in GB/s (1e9 bytes a second).
    """

    name: str
    arch: str
    product: str = ""  # a part of the name the driver reports, e.g. "H200"
    sms: int = 0
    register_bytes_per_sm: int = 0
    smem_bytes_per_sm: int = 0
    smem_bytes_per_cta: int = 0  # the opt-in maximum
    tmem_bytes_per_sm: int = 0
    l2_bytes: int = 0
    hbm_bytes: int = 0
    hbm_gb_s: float = 0.0  # datasheet peak
    clock_mhz: int = 0  # maximum SM clock
    source: str = ""

    @property
    def is_cuda(self) -> bool:
        return self.arch.startswith("sm_")

    @property
    def on_chip_bytes(self) -> int:
        """Registers, shared memory and tensor memory of all SMs together."""
        return self.sms * (self.register_bytes_per_sm + self.smem_bytes_per_sm + self.tmem_bytes_per_sm)


def load(name: str) -> DeviceSpec:
    """The device called `name` in `configs/device`."""
    path = CONFIGS / f"{name}.yaml"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.yaml")))
        raise KeyError(f"no device is called {name!r}; configs/device has: {known}.")
    data = yaml.safe_load(path.read_text())
    known_fields = {field.name for field in fields(DeviceSpec)}
    return DeviceSpec(**{key: value for key, value in data.items() if key in known_fields})


def check_live(spec: DeviceSpec) -> str:
    """The torch device string on which `spec` can run ("cpu" or "cuda").

    Raises:
        Unsupported: no GPU, or the live GPU is not the one that was asked for.
    """
    import torch

    if not spec.is_cuda:
        return "cpu"
    if not torch.cuda.is_available():
        raise Unsupported(
            f"device={spec.name} needs a CUDA GPU and this machine has none; use device=cpu, or send the plan to a GPU machine (make help)."
        )
    live = torch.cuda.get_device_properties(0)
    arch = f"sm_{live.major}{live.minor}"
    if not spec.arch.startswith(arch) or spec.product not in live.name or live.multi_processor_count != spec.sms:
        raise Unsupported(
            f"device={spec.name} is {spec.product} ({spec.arch}, {spec.sms} SMs) but this GPU is {live.name} ({arch}, {live.multi_processor_count} SMs); "
            f"pass the device that is here, or add it to configs/device."
        )
    return "cuda"
