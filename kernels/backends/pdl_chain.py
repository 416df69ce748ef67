"""The rival of fusion: the walk as two small kernels a step, chained by programmatic dependent launch (PDL).

Stands for: what a serving engine can reach without a persistent kernel (CUDA programming guide, "Programmatic Dependent Launch and
Synchronization"); no engine has this walk. A step is `score` (all SMs: the GEMV of their rows, the best row of each CTA) and `select` (one
CTA: the best of them, which is the token). Each starts while the one before still runs and fetches what does not depend on the token: as
much of W2 as shared memory holds. In a CUDA graph the launches become programmatic edges. Arithmetic and tokens are those of
`streaming_sm90`, bit for bit; the option chained=false launches the same kernels without PDL.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kernels.admission import admit_walk
from kernels.build import Kernel, build
from kernels.device import DeviceSpec
from kernels.driver import Function, LaunchShape
from kernels.heads.markov import MarkovHead
from kernels.packing import latent_records, padded_scales, streaming_weights
from kernels.params import Params
from kernels.persistent import Weights, admit, cpp, entry_source, load
from kernels.placement import LATENT_BYTES, SMALL_BATCH, TILE_ROWS, UNIT_BYTES
from kernels.quantize import two_planes
from kernels.registry import register
from kernels.walk import Draft, Head, Limits, NanRule, Resources, Rounding, Unsupported, WalkInputs

_HEADER = "walk_chain.cuh"
_ENTRIES = 256  # kEntries of walk_chain.cuh
_KEPT_PERCENT = {"int8": 60, "bf16": 40}  # the best of streaming_sm90
_LAST_ROW = 0xFFFF  # kLastRow of kernels/cuda/common/key.cuh
_SYSTEM_SMEM_BYTES = 1024  # of every CTA (CUDA programming guide, compute capability 9.x)


class StepParams(ctypes.Structure):
    """What both kernels of a step are given, see walk_chain.cuh."""

    _fields_ = (("walk", Params), ("step", ctypes.c_int32), ("padding", ctypes.c_int32))


assert ctypes.sizeof(StepParams) == 168, "walk_chain.cuh mirrors this struct"


@dataclass(frozen=True)
class PdlChainOptions:
    """How the chain is laid out.

    weights:      "int8" (rule INT8) or "bf16" (rule TWICE)
    chained:      by PDL; False launches the same kernels one after the other, so that what PDL buys can be measured
    warps:        of a CTA
    stages:       4 KB units of W2 a warp holds, so what a CTA can fetch before the token is known; None takes as many as fit
    kept_percent: of W2 that L2 is asked to keep from step to step; None takes the best of streaming_sm90
    early:        `score` lets `select` start at once, else when it has asked for its last weights
    """

    weights: str = "int8"
    chained: bool = True
    warps: int = 12
    stages: int | None = None
    kept_percent: int | None = None
    early: bool = True
    allow_spills: bool = False

    def __post_init__(self) -> None:
        if self.weights not in _KEPT_PERCENT:
            raise ValueError(f"pdl_chain has weights int8 or bf16; got {self.weights!r}.")
        for name, lowest, highest in (("warps", SMALL_BATCH, 32), ("stages", 1, 64), ("kept_percent", 0, 100)):
            value = getattr(self, name)
            if value is not None and not lowest <= value <= highest:
                raise ValueError(f"pdl_chain has {name} from {lowest} to {highest}; got {value}.")


@dataclass(frozen=True)
class ChainLayout:
    """A `score` kernel on one device.

    requests: 1, 2 or 4
    tiles:    of 16 rows, of a CTA
    stages:   units of a warp in shared memory at once
    """

    weights: str
    requests: int
    ctas: int
    warps: int
    tiles: int
    stages: int

    @property
    def rows_per_cta(self) -> int:
        return self.tiles * TILE_ROWS

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA: struct Smem of walk_chain.cuh."""
        ring = self.warps * self.stages
        scales = 4 * self.rows_per_cta if self.weights == "int8" else 16
        request = LATENT_BYTES[self.weights] + 2 * self.rows_per_cta + 4 * 32
        return -(-(ring * (UNIT_BYTES + 8) + scales + self.requests * request) // 128) * 128


@register
class PdlChain:
    """Greedy, batch 1 to 4, rank 256. See the module's text."""

    name: ClassVar[str] = "pdl_chain"
    archs: ClassVar[tuple[str, ...]] = ("sm_90a",)
    nan_rule: ClassVar[NanRule] = NanRule.LOSES
    Options: ClassVar[type[PdlChainOptions]] = PdlChainOptions

    def __init__(self, options: PdlChainOptions) -> None:
        self.options = options

    @property
    def rounding(self) -> Rounding:
        return Rounding.INT8 if self.options.weights == "int8" else Rounding.TWICE

    def place(self, vocab: int, batch: int, device: DeviceSpec) -> ChainLayout:
        """Tiles evenly over the SMs, and as many stages as are asked for or fit, up to all units of a warp.

        Raises:
            Unsupported: not one stage fits, or fewer than are asked for, or a CTA has more rows than a key can name.
        """
        options = self.options
        whole = -(-vocab // TILE_ROWS)
        tiles = -(-whole // device.sms)
        units = -(-tiles // options.warps) * (1 if options.weights == "int8" else 2)
        requests = next(n for n in (1, 2, 4) if batch <= n)
        # Beside `score` a CTA of `select` must find room, or it would start only when one has ended.
        most = min(device.smem_bytes_per_cta, device.smem_bytes_per_sm - 2 * _SYSTEM_SMEM_BYTES)
        stages = range(units, 0, -1) if options.stages is None else (min(options.stages, units),)
        layouts = [ChainLayout(options.weights, requests, -(-whole // tiles), options.warps, tiles, each) for each in stages]
        for layout in layouts:
            if layout.smem_bytes <= most and layout.rows_per_cta < _LAST_ROW:
                return layout
        least = layouts[-1]
        raise Unsupported(
            f"{least.rows_per_cta} rows a CTA and {least.stages} stages of {least.warps} warps need {least.smem_bytes} bytes of shared memory "
            f"at batch {batch}; {device.name} has {most} beside select, and keys name {_LAST_ROW - 1} rows; backend=sglang_greedy serves it."
        )

    def compile(self, layout: ChainLayout, device: DeviceSpec) -> tuple[Kernel, Kernel]:
        """`score` and `select`; needs no GPU."""
        options = self.options
        kept = _KEPT_PERCENT[options.weights] if options.kept_percent is None else options.kept_percent
        fields = cpp(
            bf16=layout.weights == "bf16",
            batch=layout.requests,
            warps=layout.warps,
            tiles=layout.tiles,
            stages=layout.stages,
            kept_percent=kept,
            early=options.early,
        )
        parts = (
            ("walk_chain_score", 32 * layout.warps, f"wts::ChainShape{{{fields}}}"),
            ("walk_chain_select", 32 * layout.requests, str(device.sms)),
        )
        score, select = (
            build(entry_source(_HEADER, entry, threads, shape, params="StepParams"), entry, device.arch, allow_spills=options.allow_spills)
            for entry, threads, shape in parts
        )
        return score, select

    def prepare(self, head: Head, limits: Limits, device: DeviceSpec) -> PdlChainWalk:
        markov = admit(self.name, head, limits, device, max_batch=SMALL_BATCH, sampling=False)
        layout = self.place(markov.vocab, limits.max_batch, device)
        score, select = self.compile(layout, device)
        weights = _weights(markov, layout)

        def loaded(kernel: Kernel, ctas: int, threads: int, smem_bytes: int, chained: bool) -> Function:
            return load(kernel, LaunchShape(ctas, threads, smem_bytes, programmatic=chained, most_shared=True))

        scored = (layout.ctas, 32 * layout.warps, layout.smem_bytes)
        return PdlChainWalk(
            head=markov,
            limits=limits,
            weights=weights,
            first=loaded(score, *scored, chained=False),
            score=loaded(score, *scored, chained=self.options.chained),
            select=loaded(select, 1, 32 * layout.requests, 0, chained=self.options.chained),
            resources=Resources(
                registers=score.registers,
                spill_bytes=max(score.spill_bytes, select.spill_bytes),
                smem_bytes=layout.smem_bytes + score.static_smem_bytes,
                ctas=layout.ctas,
                streamed_bytes=markov.vocab * (markov.rank + 4 if layout.weights == "int8" else 2 * markov.rank),
                cubin_sha256=score.cubin_sha256,
                source_sha256=score.source_sha256,
            ),
            entries=torch.zeros(layout.requests, _ENTRIES, dtype=torch.int64, device=markov.device),
        )


@dataclass(frozen=True)
class PdlChainWalk:
    """Two launches a step. Owns the CTAs' entries, so walks must follow one another on a stream.

    first: `score` of the first step, never chained: what the stream did before may be anything, so it must have ended
    """

    head: MarkovHead
    limits: Limits
    weights: Weights
    first: Function
    score: Function
    select: Function
    resources: Resources
    entries: Tensor

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        """Enqueue the walk of the requests in `inputs`; `out.logits` is left as it is."""
        admit_walk(PdlChain.name, inputs, out, self.limits, self.head)
        weights, scale = self.weights, self.weights.row_scale
        walk = Params(
            weights=weights.packed.data_ptr(),
            row_scale=0 if scale is None else scale.data_ptr(),
            latents=weights.latents.data_ptr(),
            base=inputs.base_logits.data_ptr(),
            anchor=inputs.anchor.data_ptr(),
            tokens=out.tokens.data_ptr(),
            mail=self.entries.data_ptr(),
            base_request_stride=inputs.base_logits.stride(0),
            base_step_stride=inputs.base_logits.stride(1),
            tokens_request_stride=out.tokens.stride(0),
            vocab=self.head.vocab,
            latent_vocab=self.head.vocab,  # W1 may have more rows; anchors are clamped into the vocabulary
            steps=inputs.steps,
            batch=inputs.batch,
        )
        for step in range(inputs.steps):
            params = StepParams(walk=walk, step=step)
            (self.score if step else self.first).launch(params)
            self.select.launch(params)


def _weights(head: MarkovHead, layout: ChainLayout) -> Weights:
    count = layout.ctas * layout.rows_per_cta
    if layout.weights == "bf16":
        return Weights(streaming_weights(head.w2, count), head.w1.contiguous(), None)
    return Weights(streaming_weights(head.int8.q, count), latent_records(two_planes(head.w1)), padded_scales(head.int8.scale, count))
