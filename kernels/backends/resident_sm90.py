"""The paper's walk on Hopper: one persistent launch, int8 W2 in registers and shared memory for all steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels.build import Kernel, build
from kernels.device import DeviceSpec
from kernels.driver import LaunchShape
from kernels.packing import latent_records, resident_weights
from kernels.persistent import PersistentWalk, Weights, admit, admit_exchange, cpp, entry_source, load
from kernels.placement import MAX_REGISTER_TILES, WARPS, Placement, plan
from kernels.quantize import two_planes
from kernels.registry import register
from kernels.walk import Head, Limits, NanRule, Resources, Rounding

_THREADS = 32 * WARPS


@dataclass(frozen=True)
class ResidentOptions:
    """How the resident walk is laid out and watched.

    rf_tiles:   16-row tiles a warp keeps in registers; the others go to shared memory
    exchange:   "pair" (fastest; leans on sm_90 hardware) or "mailboxes" (promised by the PTX memory model; may need rf_tiles=5)
    clocks:     stamp cycles and nanoseconds at every step
    spin_limit: polls after which a waiting CTA traps; 0 waits for ever
    """

    rf_tiles: int = MAX_REGISTER_TILES
    exchange: str = "pair"
    clocks: bool = False
    allow_spills: bool = False
    spin_limit: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rf_tiles <= 9 or self.spin_limit < 0:
            raise ValueError(f"resident_sm90 has rf_tiles from 0 to 9 and spin_limit >= 0; got {self.rf_tiles} and {self.spin_limit}.")
        admit_exchange(self.exchange)


@register
class ResidentSm90:
    """Greedy, batch 1, rank 256, vocabularies whose int8 W2 fits the chip. What does not fit is Unsupported, with the numbers."""

    name: ClassVar[str] = "resident_sm90"
    archs: ClassVar[tuple[str, ...]] = ("sm_90a",)
    nan_rule: ClassVar[NanRule] = NanRule.LOSES
    rounding: ClassVar[Rounding] = Rounding.INT8
    Options: ClassVar[type[ResidentOptions]] = ResidentOptions

    def __init__(self, options: ResidentOptions) -> None:
        self.options = options

    def compile(self, placement: Placement, device: DeviceSpec) -> Kernel:
        """The kernel of a placement; needs no GPU."""
        fields = cpp(tiles_rf=placement.register_tiles, tiles_smem=placement.smem_tiles, max_ctas=device.sms, clocks=self.options.clocks)
        source = entry_source(
            "walk_resident.cuh",
            "walk_resident",
            _THREADS,
            f"wts::ResidentShape{{{fields}}}",
            self.options.exchange,
            self.options.spin_limit,
        )
        return build(source, "walk_resident", device.arch, allow_spills=self.options.allow_spills or self.options.spin_limit > 0)

    def prepare(self, head: Head, limits: Limits, device: DeviceSpec) -> PersistentWalk:
        markov = admit(self.name, head, limits, device)
        placement = plan(markov.vocab, markov.rank, device, steps=limits.max_steps, rf_tiles=self.options.rf_tiles)
        kernel = self.compile(placement, device)
        shape = LaunchShape(placement.ctas, _THREADS, placement.smem_bytes_per_cta, cooperative=True)
        function = load(kernel, shape)
        packed, scale = resident_weights(markov.int8, placement)
        resident_bytes = markov.vocab * (markov.rank + scale.element_size())
        return PersistentWalk(
            name=self.name,
            head=markov,
            limits=limits,
            weights=Weights(packed, latent_records(two_planes(markov.w1)), scale),
            function=function,
            resources=Resources(
                registers=kernel.registers,
                spill_bytes=kernel.spill_bytes,
                smem_bytes=shape.dynamic_smem_bytes + kernel.static_smem_bytes,
                ctas=placement.ctas,
                resident_bytes=resident_bytes,
                entry_bytes=resident_bytes,
                cubin_sha256=kernel.cubin_sha256,
                source_sha256=kernel.source_sha256,
            ),
            clocks=torch.zeros(limits.max_steps + 1, 2, dtype=torch.int64, device=markov.device) if self.options.clocks else None,
        )
