"""vLLM's walk with the bias folded into the GEMM: logits = base + u W2^T as one addmm with beta = 1, one rounding.

Stands for: vLLM pull request 50737 (open). Samples lie step-major, so that the step's base logits
[batch, vocab] are contiguous and the GEMM updates them in place; then torch argmax (NaN wins). cuBLAS accumulates in fp32 and
adds the base before the one rounding.

The original owns its base logits and destroys them. A walk here must leave its inputs as they were, so the base
logits are first copied, all steps at once, into a step-major buffer: one kernel a walk (4 * steps * batch * vocab bytes, about 1 us at
batch 1, steps 16 on an H200) that the original does not pay. torch's out-of-place addmm would copy in every step instead.
Left out: the lm_head GEMM, the LogitsProcessor's checks, and vLLM's own greedy_argmax kernels. Added: the anchor's clamp, one tiny kernel.
"""

from __future__ import annotations

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
class VllmAddmm:
    """See the module's text."""

    name: ClassVar[str] = "vllm_addmm"
    archs: ClassVar[tuple[str, ...]] = ("cuda",)
    nan_rule: ClassVar[NanRule] = NanRule.WINS
    rounding: ClassVar[Rounding] = Rounding.ONCE
    Options: ClassVar[type[NoOptions]] = NoOptions

    def __init__(self, options: NoOptions) -> None:
        pass

    def prepare(self, head: Head, limits: Limits, device: DeviceSpec) -> AddmmPrepared:
        admit_limits(self.name, limits, sampling=False)
        return AddmmPrepared(admit_head(self.name, head, MarkovHead), limits)


class AddmmPrepared:
    """The walk with its step-major logits, bf16 [max_steps * max_batch * vocab]."""

    def __init__(self, head: MarkovHead, limits: Limits) -> None:
        self._head = head
        self._limits = limits
        self._logits = torch.zeros(limits.max_steps * limits.max_batch * head.vocab, dtype=torch.bfloat16, device=head.device)

    @property
    def resources(self) -> Resources:
        return Resources(streamed_bytes=self._head.w2.nbytes)

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        """One walk; `out.logits` is left as it is."""
        admit_walk(VllmAddmm.name, inputs, out, self._limits, self._head)
        logits = self._logits[: inputs.base_logits.numel()].view(inputs.steps, inputs.batch, inputs.vocab)
        logits.copy_(inputs.base_logits.transpose(0, 1))
        previous = inputs.anchor.clamp(0, inputs.vocab - 1)
        tokens: list[Tensor] = []
        for step in range(inputs.steps):
            latent = functional.embedding(previous, self._head.w1)
            previous = logits[step].addmm_(latent, self._head.w2.T).argmax(dim=1)
            tokens.append(previous)
        out.tokens.copy_(torch.stack(tokens, dim=1))
