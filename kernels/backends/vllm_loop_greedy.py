"""vLLM's default draft loop, greedy: bias GEMM, tensor add, and vLLM's own argmax in two kernels.

Stands for: `_sample_sequential` of vLLM's `v1/worker/gpu/spec_decode/dspark/speculator.py` with draft_sample_method=greedy (its default)
and the newer `v1/worker/gpu/sample/greedy_argmax.py`. A step is six launches: W1 row gather, bf16 linear, bf16 add with the strided slice
of the base logits, two for the argmax (one below 4096 tokens, where vLLM takes torch's), a copy into the draft tokens. No corrected logits are kept.

Left out: the lm_head GEMM before the walk, the LogitsProcessor's checks, the map from a reduced draft vocabulary. Added: one tiny kernel a
walk that clamps the anchor into the vocabulary; the original reads it from its input ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.nn import functional

from kernels.admission import admit_head, admit_limits, admit_walk
from kernels.device import DeviceSpec
from kernels.heads.markov import MarkovHead
from kernels.registry import register
from kernels.triton.admission import admit_triton
from kernels.walk import Draft, Head, Limits, NanRule, NoOptions, Resources, Rounding, WalkInputs


@register
class VllmLoopGreedy:
    """See the module's text."""

    name: ClassVar[str] = "vllm_loop_greedy"
    archs: ClassVar[tuple[str, ...]] = ("cuda",)
    nan_rule: ClassVar[NanRule] = NanRule.WINS
    rounding: ClassVar[Rounding] = Rounding.TWICE
    Options: ClassVar[type[NoOptions]] = NoOptions

    def __init__(self, options: NoOptions) -> None:
        pass

    def prepare(self, head: Head, limits: Limits, device: DeviceSpec) -> LoopGreedyPrepared:
        markov = admit_head(self.name, head, MarkovHead)
        admit_limits(self.name, limits, sampling=False)
        admit_triton(self.name, markov.device)
        return LoopGreedyPrepared(markov, limits)


@dataclass(frozen=True)
class LoopGreedyPrepared:
    """The walk bound to one head. Nothing is packed: the original reads the checkpoint's tensors."""

    head: MarkovHead
    limits: Limits

    @property
    def resources(self) -> Resources:
        return Resources(streamed_bytes=self.head.w2.nbytes)

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        """One walk; `out.logits` is left as it is."""
        from kernels.triton.greedy_argmax import greedy_argmax

        admit_walk(VllmLoopGreedy.name, inputs, out, self.limits, self.head)
        previous = inputs.anchor.clamp(0, inputs.vocab - 1)
        for step in range(inputs.steps):
            latent = functional.embedding(previous, self.head.w1)
            logits = inputs.base_logits[:, step] + functional.linear(latent, self.head.w2)
            previous = greedy_argmax(logits)
            out.tokens[:, step] = previous
