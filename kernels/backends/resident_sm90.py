"""The paper's walk on Hopper: one persistent launch, W2 in registers and shared memory for all steps, what does not fit streamed from L2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels.build import Kernel, SpillError, build
from kernels.device import DeviceSpec
from kernels.driver import LaunchShape
from kernels.heads.markov import MarkovHead
from kernels.packing import batched_weights, latent_records, padded_scales, resident_scales, resident_weights
from kernels.persistent import PersistentWalk, Weights, admit, admit_exchange, cpp, entry_source, load
from kernels.placement import MAX_BATCH, SMALL_BATCH, BatchedPlacement, Placement, plan
from kernels.quantize import two_planes
from kernels.registry import register
from kernels.walk import Head, Limits, NanRule, NoiseRule, Resources, Rounding, Unsupported

TWICE = ("none", "score", "reduce", "exchange", "latent")  # enum Stage of kernels/cuda/common/walk_loop.cuh


@dataclass(frozen=True)
class ResidentOptions:
    """How the resident walk is laid out and watched.

    weights:    "int8" (rule INT8) or "bf16" (rule TWICE; up to four requests)
    rf_tiles:   16-row tiles a warp keeps in registers, where walk_resident.cuh serves; None takes the most that do not spill
    exchange:   "pair" (fastest; leans on sm_90 hardware) or "mailboxes" (promised by the PTX memory model; one greedy request)
    clocks:     stamp cycles and nanoseconds at every step (up to four requests)
    spin_limit: polls after which a waiting CTA traps; 0 waits for ever
    twice:      "none", or the part of every step to do twice, which changes its time and nothing else: "score", "reduce", "exchange" or
                "latent", as kernels/cuda/common/walk_loop.cuh divides a step (one greedy request whose int8 weights are all resident)
    """

    weights: str = "int8"
    rf_tiles: int | None = None
    exchange: str = "pair"
    clocks: bool = False
    allow_spills: bool = False
    spin_limit: int = 0
    twice: str = "none"

    def __post_init__(self) -> None:
        if self.weights not in ("int8", "bf16"):
            raise ValueError(f"resident_sm90 has weights int8 or bf16; got {self.weights!r}.")
        if (self.rf_tiles is not None and not 0 <= self.rf_tiles <= 9) or self.spin_limit < 0:
            raise ValueError(f"resident_sm90 has rf_tiles from 0 to 9 and spin_limit >= 0; got {self.rf_tiles} and {self.spin_limit}.")
        admit_exchange(self.exchange)
        if self.twice not in TWICE:
            raise ValueError(f"resident_sm90 has twice {', '.join(TWICE)}; got {self.twice!r}.")
        if self.twice != "none" and (self.weights, self.exchange) != ("int8", "pair"):
            raise ValueError(f"twice={self.twice} goes with weights=int8 and exchange=pair; got {self.weights} and {self.exchange}.")


@register
class ResidentSm90:
    """Greedy and sampled, batch 1 to 64, rank 256, any vocabulary. What cannot be served is Unsupported, with the numbers."""

    name: ClassVar[str] = "resident_sm90"
    archs: ClassVar[tuple[str, ...]] = ("sm_90a",)
    nan_rule: ClassVar[NanRule] = NanRule.LOSES
    Options: ClassVar[type[ResidentOptions]] = ResidentOptions

    def __init__(self, options: ResidentOptions) -> None:
        self.options = options

    @property
    def rounding(self) -> Rounding:
        return Rounding.INT8 if self.options.weights == "int8" else Rounding.TWICE

    def place(self, vocab: int, rank: int, limits: Limits, device: DeviceSpec, rf_tiles: int | None = None) -> Placement | BatchedPlacement:
        """Where W2 lives, under these options; `rf_tiles` where they leave it open."""
        placement = plan(
            vocab,
            rank,
            device,
            steps=limits.max_steps,
            batch=limits.max_batch,
            sampling=limits.sampling,
            weights=self.options.weights,
            rf_tiles=rf_tiles if self.options.rf_tiles is None else self.options.rf_tiles,
        )
        if self.options.exchange == "mailboxes" and (limits.max_batch > 1 or limits.sampling):
            raise Unsupported(
                f"exchange=mailboxes serves one greedy request; got max_batch {limits.max_batch}, sampling {limits.sampling}; take exchange=pair."
            )
        if self.options.clocks and isinstance(placement, BatchedPlacement):
            raise Unsupported(f"clocks=true serves up to {SMALL_BATCH} requests; got max_batch {limits.max_batch}; leave clocks out.")
        if self.options.twice != "none" and (limits.max_batch > 1 or limits.sampling or placement.streamed_tiles):
            raise Unsupported(
                f"twice={self.options.twice} serves one greedy request whose weights are all resident; got max_batch {limits.max_batch}, "
                f"sampling {limits.sampling}, {placement.streamed_tiles} streamed tiles; leave twice out."
            )
        return placement

    def fit(self, vocab: int, rank: int, limits: Limits, device: DeviceSpec) -> tuple[Placement | BatchedPlacement, Kernel]:
        """The placement and its kernel; needs no GPU. Where the options leave `rf_tiles` open it is the most that does not spill: how many
        registers the rest of a kernel wants depends on everything, so only the compiler knows.

        Raises:
            BuildError: it spills, whatever was tried, or does not compile.
        """
        placement = self.place(vocab, rank, limits, device)
        while self.options.rf_tiles is None and isinstance(placement, Placement) and placement.register_tiles > 1:
            try:
                return placement, self.compile(placement, device)
            except SpillError:
                placement = self.place(vocab, rank, limits, device, placement.register_tiles - 1)
        return placement, self.compile(placement, device)

    def compile(self, placement: Placement | BatchedPlacement, device: DeviceSpec) -> Kernel:
        """The kernel of a placement; needs no GPU."""
        options = self.options
        if isinstance(placement, BatchedPlacement):
            fields = cpp(
                tiles=placement.tiles,
                resident=placement.resident_tiles,
                stages=placement.stages,
                halves=placement.halves,
                copies=placement.copies,
                sampling=placement.sampling,
                max_ctas=device.sms,
            )
            entry, shape, exchange = "walk_batched", f"wts::BatchedShape{{{fields}}}", None
        else:
            fields = cpp(
                bf16=placement.weights == "bf16",
                tiles_rf=placement.register_tiles,
                tiles_smem=placement.smem_tiles,
                tiles_streamed=placement.streamed_tiles,
                stages=placement.stages,
                batch=placement.requests,
                sampling=placement.sampling,
                max_ctas=device.sms,
                clocks=options.clocks,
            )
            twice = "" if options.twice == "none" else f", wts::Stage::k{options.twice.capitalize()}"
            entry, shape, exchange = "walk_resident", f"wts::ResidentShape{{{fields}}}{twice}", options.exchange
        source = entry_source(f"{entry}.cuh", entry, placement.threads, shape, exchange, options.spin_limit)
        return build(source, entry, device.arch, allow_spills=options.allow_spills or options.spin_limit > 0)

    def prepare(self, head: Head, limits: Limits, device: DeviceSpec) -> PersistentWalk:
        markov = admit(self.name, head, limits, device, max_batch=MAX_BATCH, sampling=True)
        placement, kernel = self.fit(markov.vocab, markov.rank, limits, device)
        batched = isinstance(placement, BatchedPlacement)
        pairs = 2 if self.options.twice == "exchange" else 1  # of a request and step
        shape = LaunchShape(placement.ctas, placement.threads, placement.smem_bytes_per_cta, cooperative=True)
        function = load(kernel, shape)
        weights = resident_head(markov, placement)
        scale_bytes = 0 if weights.row_scale is None else 4 * markov.vocab
        return PersistentWalk(
            name=self.name,
            head=markov,
            limits=limits,
            weights=weights,
            function=function,
            resources=Resources(
                registers=kernel.registers,
                spill_bytes=kernel.spill_bytes,
                smem_bytes=shape.dynamic_smem_bytes + kernel.static_smem_bytes,
                ctas=placement.ctas,
                resident_bytes=placement.register_bytes + placement.smem_weight_bytes,
                streamed_bytes=placement.streamed_bytes,
                entry_bytes=markov.vocab * markov.rank * (1 if self.options.weights == "int8" else 2)
                - placement.streamed_bytes
                + scale_bytes,
                cubin_sha256=kernel.cubin_sha256,
                source_sha256=kernel.source_sha256,
            ),
            clocks=torch.zeros(limits.max_steps + 1, 2, dtype=torch.int64, device=markov.device) if self.options.clocks else None,
            base_slots=limits.max_steps if isinstance(placement, BatchedPlacement) else placement.base_slots,
            requests=placement.width if isinstance(placement, BatchedPlacement) else pairs * placement.requests,
            noise=NoiseRule.GROUPS if batched else NoiseRule.GUMBEL,
        )


def resident_head(head: MarkovHead, placement: Placement | BatchedPlacement) -> Weights:
    """The head as the kernel of a placement reads it."""
    if isinstance(placement, BatchedPlacement):
        scales = padded_scales(head.int8.scale, placement.ctas * placement.rows_per_cta)
        return Weights(batched_weights(head.int8.q, placement), latent_records(two_planes(head.w1)), scales)
    if placement.weights == "bf16":
        return Weights(resident_weights(head.w2, placement), head.w1.contiguous(), None)
    return Weights(
        resident_weights(head.int8.q, placement), latent_records(two_planes(head.w1)), resident_scales(head.int8.scale, placement)
    )
