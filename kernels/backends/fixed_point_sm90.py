"""The resident walk of one request, four positions a pass: an exact fixed point over guesses (kernels/cuda/walk_window.cuh).

An int8 MMA has eight columns and a serial step of one request uses two; the other six score the next three positions under guesses. On peaked
logits guesses come true and a walk takes a third of the passes; on flat ones it takes as many as steps. Tokens are the serial walk's, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kernels.admission import admit_walk
from kernels.backends.resident_sm90 import ResidentOptions, ResidentSm90, resident_head
from kernels.build import Kernel, SpillError, build
from kernels.device import DeviceSpec
from kernels.driver import Function, LaunchShape
from kernels.heads.markov import MarkovHead
from kernels.params import Params
from kernels.persistent import Weights, admit, cpp, entry_source, exchange_words, load
from kernels.placement import Placement
from kernels.registry import register
from kernels.walk import Draft, Head, Limits, NanRule, NoOptions, Resources, Rounding, Unsupported, WalkInputs

_COLUMNS, _MAX_STEPS = 4, 16


@register
class FixedPointSm90:
    """Greedy, one request, up to 16 steps, int8 weights all on chip, rank 256. See the module's text."""

    name: ClassVar[str] = "fixed_point_sm90"
    archs: ClassVar[tuple[str, ...]] = ("sm_90a",)
    nan_rule: ClassVar[NanRule] = NanRule.LOSES
    rounding: ClassVar[Rounding] = Rounding.INT8
    Options: ClassVar[type[NoOptions]] = NoOptions

    def __init__(self, options: NoOptions) -> None:
        self._resident = ResidentSm90(ResidentOptions())

    def place(self, vocab: int, rank: int, steps: int, device: DeviceSpec, rf_tiles: int | None = None) -> Placement:
        """That of four requests.

        Raises:
            Unsupported: not all of W2, or not all base logits, find room.
        """
        slots = -(-steps // _COLUMNS)
        placement = self._resident.place(vocab, rank, Limits(_COLUMNS, slots), device, rf_tiles)
        if not isinstance(placement, Placement) or placement.streamed_tiles or placement.base_slots < slots:
            raise Unsupported(
                f"{self.name} keeps W2 and the base logits of all steps on chip; {vocab:,} rows and {steps} steps on {device.name} find no room; "
                "backend=resident_sm90 streams what does not fit."
            )
        return placement

    def fit(self, vocab: int, rank: int, steps: int, device: DeviceSpec) -> tuple[Placement, Kernel]:
        """With the most register tiles that do not spill; needs no GPU."""
        placement = self.place(vocab, rank, steps, device)
        while placement.register_tiles > 1:
            try:
                return placement, self.compile(placement, device)
            except SpillError:
                placement = self.place(vocab, rank, steps, device, placement.register_tiles - 1)
        return placement, self.compile(placement, device)

    def compile(self, placement: Placement, device: DeviceSpec) -> Kernel:
        """The kernel of a placement; needs no GPU."""
        fields = cpp(
            bf16=False,
            tiles_rf=placement.register_tiles,
            tiles_smem=placement.smem_tiles,
            tiles_streamed=0,
            stages=placement.stages,
            batch=_COLUMNS,
            sampling=False,
            max_ctas=device.sms,
            clocks=False,
            window=True,
        )
        source = entry_source("walk_window.cuh", "walk_window", placement.threads, f"wts::ResidentShape{{{fields}}}", "pair")
        return build(source, "walk_window", device.arch)

    def prepare(self, head: Head, limits: Limits, device: DeviceSpec) -> FixedPointWalk:
        markov = admit(self.name, head, limits, device, max_batch=1, sampling=False)
        if limits.max_steps > _MAX_STEPS:
            raise Unsupported(f"{self.name} walks up to {_MAX_STEPS} steps; got {limits.max_steps}; backend=resident_sm90 walks more.")
        placement, kernel = self.fit(markov.vocab, markov.rank, limits.max_steps, device)
        shape = LaunchShape(placement.ctas, placement.threads, placement.smem_bytes_per_cta, cooperative=True)
        resources = Resources(
            registers=kernel.registers,
            spill_bytes=kernel.spill_bytes,
            smem_bytes=shape.dynamic_smem_bytes + kernel.static_smem_bytes,
            ctas=placement.ctas,
            resident_bytes=placement.register_bytes + placement.smem_weight_bytes,
            entry_bytes=markov.vocab * (markov.rank + 4),
            cubin_sha256=kernel.cubin_sha256,
            source_sha256=kernel.source_sha256,
        )
        return FixedPointWalk(markov, limits, resident_head(markov, placement), load(kernel, shape), resources)


@dataclass(frozen=True)
class FixedPointWalk:
    """One launch a walk. Owns the exchange's words, so launches must follow one another on a stream.

    passes: [1] int64, of all launches
    """

    head: MarkovHead
    limits: Limits
    weights: Weights
    function: Function
    resources: Resources
    passes: Tensor = field(init=False)
    _mail: Tensor = field(init=False)
    _round: Tensor = field(init=False)

    def __post_init__(self) -> None:
        device = self.head.device
        object.__setattr__(self, "passes", torch.zeros(1, dtype=torch.int64, device=device))
        object.__setattr__(self, "_mail", torch.zeros(exchange_words(_COLUMNS), dtype=torch.int64, device=device))
        object.__setattr__(self, "_round", torch.zeros(1, dtype=torch.int32, device=device))

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        """Enqueue the walk of the request in `inputs`: its positions are the requests and steps of the engine."""
        admit_walk(FixedPointSm90.name, inputs, out, self.limits, self.head)
        assert self.weights.row_scale is not None
        stride = inputs.base_logits.stride(1)
        self.function.launch(
            Params(
                weights=self.weights.packed.data_ptr(),
                row_scale=self.weights.row_scale.data_ptr(),
                latents=self.weights.latents.data_ptr(),
                base=inputs.base_logits.data_ptr(),
                anchor=inputs.anchor.data_ptr(),
                tokens=out.tokens.data_ptr(),
                mail=self._mail.data_ptr(),
                round=self._round.data_ptr(),
                clocks=self.passes.data_ptr(),
                base_request_stride=stride,
                base_step_stride=_COLUMNS * stride,
                vocab=self.head.vocab,
                latent_vocab=self.head.vocab,
                steps=inputs.steps,
                batch=_COLUMNS,
                base_slots=-(-inputs.steps // _COLUMNS),
            )
        )
