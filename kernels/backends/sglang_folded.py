"""SGLang's default DSpark walk with folded sampling, with all its costs: the headline baseline.

Stands for: SGLang's `speculative/dspark_components/dspark_draft_sampler.py` (as of 04d916b) with SGLANG_DSPARK_FOLDED_SAMPLING=AUTO.
A step is seven launches: W1 row gather, bf16 linear, bf16 add with the strided slice of
the base logits, an Exp(1) fill of fp32 [batch, vocab] (greedy rows too, default CUDA generator), the mask's conversion to int32,
the two-kernel sampler. After the loop: tokens stacked, corrected logits concatenated and copied to a static buffer, tokens copied out.

What differs from the original, and by how much:
- The original stages temperatures and greedy mask before each replay, outside the graph. Prepared without sampling, both are static
  here (T = 1, all greedy: the original's values with no sampling info) and cost nothing. Prepared with sampling, `launch` derives
  them from the inputs in four tiny kernels a walk, where the original pays a few eager ones.
- The anchor is clamped into the vocabulary by one tiny kernel a walk; the original reads it from its input ids.
- The sampler's corner cases are defined (see `kernels.triton.exponential_race`): a few selects on values already in registers.
- Left out: the lm_head GEMM before the walk, the confidence head, tensor parallelism.
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
from kernels.triton.admission import admit_triton
from kernels.walk import Draft, Head, Limits, NanRule, NoOptions, Resources, Rounding, WalkInputs

MIN_TEMPERATURE = 1e-5


@register
class SglangFolded:
    """See the module's text. A NaN logit loses here, since the sampler's maxima ignore it."""

    name: ClassVar[str] = "sglang_folded"
    archs: ClassVar[tuple[str, ...]] = ("cuda",)
    nan_rule: ClassVar[NanRule] = NanRule.LOSES
    rounding: ClassVar[Rounding] = Rounding.TWICE
    Options: ClassVar[type[NoOptions]] = NoOptions

    def __init__(self, options: NoOptions) -> None:
        pass

    def prepare(self, head: Head, limits: Limits, device: DeviceSpec) -> FoldedPrepared:
        markov = admit_head(self.name, head, MarkovHead)
        admit_limits(self.name, limits, sampling=True)
        admit_triton(self.name, markov.device)
        return FoldedPrepared(markov, limits)


class FoldedPrepared:
    """The walk with its static buffers: noise fp32 [max_batch, vocab], corrected bf16 [max_batch * max_steps, vocab], T, greedy mask."""

    def __init__(self, head: MarkovHead, limits: Limits) -> None:
        self._head = head
        self._limits = limits
        device = head.device
        self._noise = torch.ones(limits.max_batch, head.vocab, dtype=torch.float32, device=device)
        self._corrected = torch.zeros(limits.max_batch * limits.max_steps, head.vocab, dtype=torch.bfloat16, device=device)
        self._temperature = torch.ones(limits.max_batch, dtype=torch.float32, device=device)
        self._greedy = torch.ones(limits.max_batch, dtype=torch.bool, device=device)

    @property
    def resources(self) -> Resources:
        return Resources(streamed_bytes=self._head.w2.nbytes)

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        """One walk. Corrected logits go to `out.logits` if there are any, else to the static buffer: one copy either way.

        Without `Limits.sampling` every row is greedy, whatever its temperature says.
        """
        admit_walk(SglangFolded.name, inputs, out, self._limits, self._head)
        if self._limits.sampling:
            self._stage(inputs.temperature)
        previous = inputs.anchor.clamp(0, inputs.vocab - 1)
        tokens: list[Tensor] = []
        corrected: list[Tensor] = []
        for step in range(inputs.steps):
            latent = functional.embedding(previous, self._head.w1)
            logits = inputs.base_logits[:, step] + functional.linear(latent, self._head.w2)
            previous = self._sample(logits)
            tokens.append(previous)
            corrected.append(logits)
        kept = torch.cat([logits[:, None] for logits in corrected], dim=1)
        static = self._corrected[: inputs.batch * inputs.steps].view(kept.shape)
        (static if out.logits is None else out.logits).copy_(kept)
        out.tokens.copy_(torch.stack(tokens, dim=1))

    def _stage(self, temperature: Tensor) -> None:
        """T <= 0 and NaN mean greedy at T = 1 (the engine maps them so); other T are at least 1e-5."""
        batch = temperature.shape[0]
        greedy = torch.logical_not(temperature > 0, out=self._greedy[:batch])
        torch.clamp(temperature, min=MIN_TEMPERATURE, out=self._temperature[:batch]).masked_fill_(greedy, 1.0)

    def _sample(self, logits: Tensor) -> Tensor:
        from kernels.triton.exponential_race import race

        batch = logits.shape[0]
        noise = self._noise[:batch].exponential_()
        return race(logits, self._temperature[:batch], self._greedy[:batch].to(torch.int32), noise)
