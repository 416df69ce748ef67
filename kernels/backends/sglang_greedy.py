"""SGLang's greedy-only folded walk: what the default falls back to when folded sampling is off or does not fit.

Stands for: the greedy branch of SGLang's `speculative/dspark_components/dspark_draft_sampler.py`. A step is: W1 row gather, bf16 linear, bf16 add with the strided slice of the
base logits, torch argmax (lowest index on ties, NaN wins). Tokens are stacked and copied out; no corrected logits are kept.
Left out: the lm_head GEMM before the walk and the token synchronisation across tensor-parallel ranks. Added: one tiny kernel a walk
that clamps the anchor into the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from kernels.admission import admit_head, admit_limits, admit_walk
from kernels.device import DeviceSpec
from kernels.heads.markov import MarkovHead
from kernels.registry import register
from kernels.walk import Draft, Head, Limits, NanRule, NoOptions, Resources, Rounding, WalkInputs


@register
class SglangGreedy:
    """See the module's text."""

    name: ClassVar[str] = "sglang_greedy"
    archs: ClassVar[tuple[str, ...]] = ("cuda",)
    nan_rule: ClassVar[NanRule] = NanRule.WINS
    rounding: ClassVar[Rounding] = Rounding.TWICE
    Options: ClassVar[type[NoOptions]] = NoOptions

    def __init__(self, options: NoOptions) -> None:
        pass

    def prepare(self, head: Head, limits: Limits, device: DeviceSpec) -> GreedyPrepared:
        admit_limits(self.name, limits, sampling=False)
        return GreedyPrepared(admit_head(self.name, head, MarkovHead), limits)


@dataclass(frozen=True)
class GreedyPrepared:
    """The walk bound to one head. Nothing is packed: the original reads the checkpoint's tensors."""

    head: MarkovHead
    limits: Limits

    @property
    def resources(self) -> Resources:
        return Resources(streamed_bytes=self.head.w2.nbytes)

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        """One walk; `out.logits` is left as it is."""
        admit_walk(SglangGreedy.name, inputs, out, self.limits, self.head)
        previous = inputs.anchor.clamp(0, inputs.vocab - 1)
        tokens: list[Tensor] = []
        for step in range(inputs.steps):
            latent = functional.embedding(previous, self.head.w1)
            logits = inputs.base_logits[:, step] + functional.linear(latent, self.head.w2)
            previous = logits.argmax(dim=1)
            tokens.append(previous)
        out.tokens.copy_(torch.stack(tokens, dim=1))
