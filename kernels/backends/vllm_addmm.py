"""vLLM's walk with the bias folded into the GEMM: logits = base + u W2^T as one addmm with beta = 1.

Stands for: vLLM pull request 50737 (open). Samples lie step-major, so that the step's base logits
[batch, vocab] are contiguous and the GEMM updates them in place; then torch argmax (NaN wins). cuBLAS accumulates in fp32 and
adds the base before the one rounding.

The original owns its base logits and destroys them. A walk here must leave its inputs as they were, so the base
logits are first copied, all steps at once, into a step-major buffer: one kernel a walk (4 * steps * batch * vocab bytes, about 1 us at
batch 1, steps 16 on an H200) that the original does not pay. torch's out-of-place addmm would copy in every step instead.
Left out: the lm_head GEMM, the LogitsProcessor's checks, and vLLM's own greedy_argmax kernels. Added: the anchor's clamp, one tiny kernel.
"""

from __future__ import annotations

from functools import cache
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
    Options: ClassVar[type[NoOptions]] = NoOptions

    def __init__(self, options: NoOptions) -> None:
        pass

    @property
    def rounding(self) -> Rounding:
        return rounding_of_addmm("cuda" if torch.cuda.is_available() else "cpu")

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


@cache
def rounding_of_addmm(device: str) -> Rounding:
    """Whether torch's bf16 addmm rounds once or twice on this device, by a sum that tells: 256 + (1 + 2^-8) is 258 if it is rounded once, and
    256 if the product is rounded to 1 before.

    Raises:
        RuntimeError: it is neither.
    """
    base = torch.full((16, 8192), 256.0, dtype=torch.bfloat16, device=device)  # the size of a small walk's step
    latent, w2 = torch.zeros(16, 256, dtype=torch.bfloat16, device=device), torch.zeros(8192, 256, dtype=torch.bfloat16, device=device)
    latent[:, 0], latent[:, 1], w2[:, :2] = 1.0, 2.0**-8, 1.0
    answers = {258.0: Rounding.ONCE, 256.0: Rounding.TWICE}
    found = base.addmm_(latent, w2.T).unique().tolist()
    if len(found) != 1 or found[0] not in answers:
        raise RuntimeError(f"torch's bf16 addmm on {device} makes {found} of 256 + (1 + 2^-8); expected 258 everywhere, or 256.")
    return answers[found[0]]
