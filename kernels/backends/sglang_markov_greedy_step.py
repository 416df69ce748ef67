"""SGLang's MarkovGreedyStep: a greedy step in two Triton kernels that write neither bias nor logits, in fp32 throughout.

Stands for: MarkovGreedyStep of SGLang's `kernels/ops/speculative/dspark/dspark_draft_model.py` with
SGLANG_DSPARK_OPT_FUSED_GREEDY_MARKOV=1 (off by default) and greedy-only folding. A step is two launches: scores and their best in tiles of
256 tokens (the W1 row is gathered inside, every request reads W2 again), then the best tile. Tokens are stacked and copied out.

What differs from the original:
- A request whose scores are all NaN makes the original emit token 2^31 - 1, beyond every W1. Here a NaN counts as -inf, and a request with
  nothing above -inf gets token 0: one select a token on values already in registers.
- A rank that is no multiple of 32 is padded by a mask, decided when the kernel is compiled; at rank 256 there is none.
- Added: one tiny kernel a walk that clamps the anchor into the vocabulary.
- Left out: the lm_head GEMM before the walk and the token synchronisation across tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kernels.admission import admit_head, admit_limits, admit_walk
from kernels.device import DeviceSpec
from kernels.heads.markov import MarkovHead
from kernels.registry import register
from kernels.triton.admission import admit_triton
from kernels.walk import Draft, Head, Limits, NanRule, NoOptions, Resources, Rounding, WalkInputs


@register
class SglangMarkovGreedyStep:
    """See the module's text."""

    name: ClassVar[str] = "sglang_markov_greedy_step"
    archs: ClassVar[tuple[str, ...]] = ("cuda",)
    nan_rule: ClassVar[NanRule] = NanRule.LOSES
    rounding: ClassVar[Rounding] = Rounding.NEVER
    Options: ClassVar[type[NoOptions]] = NoOptions

    def __init__(self, options: NoOptions) -> None:
        pass

    def prepare(self, head: Head, limits: Limits, device: DeviceSpec) -> GreedyStepPrepared:
        markov = admit_head(self.name, head, MarkovHead)
        admit_limits(self.name, limits, sampling=False)
        admit_triton(self.name, markov.device)
        return GreedyStepPrepared(MarkovHead(markov.w1.contiguous(), markov.w2.contiguous()), limits)


@dataclass(frozen=True)
class GreedyStepPrepared:
    """The walk bound to one head. Nothing is packed: the original reads the checkpoint's tensors."""

    head: MarkovHead
    limits: Limits

    @property
    def resources(self) -> Resources:
        return Resources(streamed_bytes=self.head.w2.nbytes)

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        """One walk; `out.logits` is left as it is."""
        from kernels.triton.markov_greedy import greedy_step

        admit_walk(SglangMarkovGreedyStep.name, inputs, out, self.limits, self.head)
        previous = inputs.anchor.clamp(0, inputs.vocab - 1)
        tokens: list[Tensor] = []
        for step in range(inputs.steps):
            previous = greedy_step(previous, inputs.base_logits[:, step], self.head.w1, self.head.w2)
            tokens.append(previous)
        out.tokens.copy_(torch.stack(tokens, dim=1))
