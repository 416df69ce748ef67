"""What each memory tier of each device holds, and what a resident int8 walk of each head puts there (Figure 1)."""

from __future__ import annotations

from typing import cast

from experiments.convert import ConfigError
from experiments.outcome import Outcome, Row
from experiments.plan import Plan
from experiments.schema import Capacity, Footprint
from kernels import placement
from kernels.device import DeviceSpec, load
from kernels.walk import Unsupported

_BACKEND, _VARIANT = "resident_sm90", "resident"
_SCALE_BYTES = 4  # an fp32 scale for every row of W2


def run(plan: Plan) -> Outcome:
    """The table `placement`: a row for every device, head and tier. A head that does not fit has its reason in every row."""
    ask = cast(Capacity, plan.config.experiment)
    try:
        devices = [load(name) for name in ask.devices]
    except KeyError as error:
        raise ConfigError(f"experiment.devices: {error.args[0]}") from error
    rows = [row for device in devices for head in ask.heads for row in _rows(device, head, ask.steps)]
    return Outcome({"placement": rows}, protocol={"steps": ask.steps, "capacities": "configs/device", "used": "kernels.placement.plan"})


def _rows(device: DeviceSpec, head: Footprint, steps: int) -> list[Row]:
    used, reason = _used(device, head, steps)
    named = {"device": device.name, "head": head.name, "backend": _BACKEND, "variant": _VARIANT, "vocab": head.vocab, "rank": head.rank}
    tiers = capacities(device)
    return [
        {**named, "tier": tier, "capacity_bytes": capacity, "used_bytes": used.get(tier, 0), "reason": reason}
        for tier, capacity in tiers.items()
    ]


def capacities(device: DeviceSpec) -> dict[str, int]:
    """Bytes of every tier of the whole device, nearest first."""
    tiers = {
        "registers": device.sms * device.register_bytes_per_sm,
        "shared_memory": device.sms * device.smem_bytes_per_sm,
        "tensor_memory": device.sms * device.tmem_bytes_per_sm,
        "l2": device.l2_bytes,
        "hbm": device.hbm_bytes,
    }
    return {tier: capacity for tier, capacity in tiers.items() if capacity}


def _used(device: DeviceSpec, head: Footprint, steps: int) -> tuple[dict[str, int], str]:
    """Bytes by tier. HBM keeps the int8 W2 with its scales, and W1 in bf16; L2 what is streamed at every step, if anything."""
    try:
        placed = placement.plan(head.vocab, head.rank, device, steps=steps)
    except Unsupported as error:
        return {}, str(error)
    weights = head.vocab * (head.rank + _SCALE_BYTES)
    return {
        "registers": placed.register_bytes,
        "shared_memory": placed.ctas * placed.smem_bytes_per_cta,
        "l2": placed.streamed_bytes,
        "hbm": weights + head.vocab * head.rank * 2,
    }, ""
