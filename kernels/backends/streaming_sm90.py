"""Fusion without residency: one persistent launch for all steps, W2 read from L2 or HBM again at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from kernels.build import Kernel, build
from kernels.device import DeviceSpec
from kernels.driver import LaunchShape
from kernels.packing import latent_records, streaming_weights
from kernels.persistent import PersistentWalk, Weights, admit, admit_exchange, cpp, entry_source, load
from kernels.placement import LATENT_BYTES, LOOP_BYTES, TILE_ROWS, latent_slots
from kernels.quantize import two_planes
from kernels.registry import register
from kernels.walk import Head, Limits, NanRule, Resources, Rounding, Unsupported


@dataclass(frozen=True)
class _Tuned:
    """The best of what was tried on an H200 at V = 151,936 (CONTRIBUTING.md, "Measured facts").

    kept_percent: of W2, what L2 is asked to keep from step to step (evict_last); the rest passes (evict_first)
    """

    warps: int
    kept_percent: int


_TUNED = {"int8": _Tuned(warps=8, kept_percent=60), "bf16": _Tuned(warps=12, kept_percent=40)}


@dataclass(frozen=True)
class StreamingOptions:
    """How the streaming walk is laid out and watched; exchange, clocks and spin_limit as in `ResidentOptions`.

    weights:      "int8" (rule INT8) or "bf16" (rule TWICE)
    warps:        of a CTA; None takes the measured best
    depth:        4 KB loads in flight a warp
    kept_percent: of W2 that L2 is asked to keep from step to step; None takes the measured best
    """

    weights: str = "int8"
    warps: int | None = None
    depth: int = 3
    kept_percent: int | None = None
    exchange: str = "pair"
    clocks: bool = False
    allow_spills: bool = False
    spin_limit: int = 0

    def __post_init__(self) -> None:
        if self.weights not in _TUNED:
            raise ValueError(f"streaming_sm90 has weights int8 or bf16; got {self.weights!r}.")
        for name, lowest, highest in (("warps", 1, 32), ("depth", 1, 4), ("kept_percent", 0, 100), ("spin_limit", 0, 2**31 - 1)):
            value = getattr(self, name)
            if value is not None and not lowest <= value <= highest:
                raise ValueError(f"streaming_sm90 has {name} from {lowest} to {highest}; got {value}.")
        admit_exchange(self.exchange)


@register
class StreamingSm90:
    """Greedy, batch 1, rank 256, any vocabulary whose base logits fit shared memory."""

    name: ClassVar[str] = "streaming_sm90"
    archs: ClassVar[tuple[str, ...]] = ("sm_90a",)
    nan_rule: ClassVar[NanRule] = NanRule.LOSES
    Options: ClassVar[type[StreamingOptions]] = StreamingOptions

    def __init__(self, options: StreamingOptions) -> None:
        self.options = options

    @property
    def warps(self) -> int:
        return self.options.warps or _TUNED[self.options.weights].warps

    @property
    def int8(self) -> bool:
        return self.options.weights == "int8"

    @property
    def rounding(self) -> Rounding:
        return Rounding.INT8 if self.int8 else Rounding.TWICE

    def tiles(self, vocab: int, device: DeviceSpec) -> int:
        """16-row tiles a warp scores at every step, rounded up so that the ring of `depth` units divides a step."""
        tiles = -(-vocab // (device.sms * self.warps * TILE_ROWS))
        return -(-tiles // self.options.depth) * self.options.depth

    def smem_bytes(self, rows_per_cta: int, steps: int) -> int:
        """Dynamic shared memory of walk_streaming.cuh: latents, row scales, loop state, base logits of every step."""
        return latent_slots(1) * LATENT_BYTES["int8"] + 4 * rows_per_cta + LOOP_BYTES + 2 * rows_per_cta * steps

    def compile(self, tiles: int, device: DeviceSpec) -> Kernel:
        """The kernel for `tiles` a warp; needs no GPU."""
        options = self.options
        kept = _TUNED[options.weights].kept_percent if options.kept_percent is None else options.kept_percent
        fields = cpp(
            bf16=not self.int8,
            warps=self.warps,
            tiles=tiles,
            depth=options.depth,
            kept_percent=kept,
            max_ctas=device.sms,
            clocks=options.clocks,
        )
        source = entry_source(
            "walk_streaming.cuh",
            "walk_streaming",
            32 * self.warps,
            f"wts::StreamingShape{{{fields}}}",
            options.exchange,
            options.spin_limit,
        )
        return build(source, "walk_streaming", device.arch, allow_spills=options.allow_spills or options.spin_limit > 0)

    def prepare(self, head: Head, limits: Limits, device: DeviceSpec) -> PersistentWalk:
        markov = admit(self.name, head, limits, device, max_batch=1, sampling=False)
        tiles = self.tiles(markov.vocab, device)
        rows_per_cta = self.warps * tiles * TILE_ROWS
        ctas = -(-markov.vocab // rows_per_cta)
        smem_bytes = self.smem_bytes(rows_per_cta, limits.max_steps)
        if smem_bytes > device.smem_bytes_per_cta:
            raise Unsupported(
                f"{limits.max_steps} steps of base logits of {rows_per_cta} rows need {smem_bytes} bytes of shared memory a CTA; "
                f"{device.name} has {device.smem_bytes_per_cta}; backend=sglang_greedy serves it."
            )
        kernel = self.compile(tiles, device)
        function = load(kernel, LaunchShape(ctas, 32 * self.warps, smem_bytes, cooperative=True))
        rows = markov.int8.q if self.int8 else markov.w2
        scale = functional.pad(markov.int8.scale, (0, ctas * rows_per_cta - markov.vocab)) if self.int8 else None
        latents = latent_records(two_planes(markov.w1)) if self.int8 else markov.w1.contiguous()
        return PersistentWalk(
            name=self.name,
            head=markov,
            limits=limits,
            weights=Weights(streaming_weights(rows, ctas * rows_per_cta), latents, scale),
            function=function,
            resources=Resources(
                registers=kernel.registers,
                spill_bytes=kernel.spill_bytes,
                smem_bytes=smem_bytes + kernel.static_smem_bytes,
                ctas=ctas,
                streamed_bytes=rows.numel() * rows.element_size(),
                entry_bytes=0 if scale is None else 4 * markov.vocab,
                cubin_sha256=kernel.cubin_sha256,
                source_sha256=kernel.source_sha256,
            ),
            clocks=torch.zeros(limits.max_steps + 1, 2, dtype=torch.int64, device=markov.device) if self.options.clocks else None,
            base_slots=limits.max_steps,
        )
