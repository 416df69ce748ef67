"""vLLM's draft loop, probabilistic: bias GEMM, tensor add, and a seeded Gumbel draw that also caches the logits.

Stands for: `_sample_sequential` of vLLM's `v1/worker/gpu/spec_decode/dspark/speculator.py` with draft_sample_method=probabilistic, and
`gumbel_sample` of `v1/worker/gpu/sample/gumbel.py` in its newer revision, whose noise is MurmurHash3 of (seed, position, token). A step is
seven launches: W1 row gather, bf16 linear, bf16 add with the strided slice of the base logits, the block kernel, an argmax over blocks and a
gather, a copy into the draft tokens.
The corrected logits of all rows, greedy ones too, go to the cache before the temperature: `out.logits` if there is one, else a static
buffer. Nothing is copied after the loop.

What differs from the original:
- The original reads each request's position from its inputs. Here a counter on the device stands for the context (`kernels.murmur`), so
  that replays differ; one tiny kernel a walk advances it.
- Its table from batch row to request slot, and inert rows, are left out: row i is request i.
- A NaN or negative temperature is greedy here, as 0 is; the original divides by whatever is not 0.
- A NaN score counts as -inf, and a row with nothing above -inf gets token 0: one select a token on values already in registers. The
  original's maxima ignore a NaN beside a number; of a row of NaN the specification says nothing.
- Left out: the lm_head GEMM before the walk, the LogitsProcessor's checks, the map from a reduced draft vocabulary. Added: one tiny kernel a
  walk that clamps the anchor into the vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn import functional

from kernels.admission import admit_head, admit_limits, admit_walk
from kernels.device import DeviceSpec
from kernels.heads.markov import MarkovHead
from kernels.murmur import ROUND_TOKENS
from kernels.philox import MASK
from kernels.registry import register
from kernels.triton.admission import admit_triton
from kernels.walk import Draft, Head, Limits, NanRule, NoiseRule, NoOptions, Resources, Rounding, Unsupported, WalkInputs


@register
class VllmLoopGumbel:
    """See the module's text."""

    name: ClassVar[str] = "vllm_loop_gumbel"
    archs: ClassVar[tuple[str, ...]] = ("cuda",)
    nan_rule: ClassVar[NanRule] = NanRule.LOSES
    rounding: ClassVar[Rounding] = Rounding.TWICE
    Options: ClassVar[type[NoOptions]] = NoOptions

    def __init__(self, options: NoOptions) -> None:
        pass

    def prepare(self, head: Head, limits: Limits, device: DeviceSpec) -> LoopGumbelPrepared:
        markov = admit_head(self.name, head, MarkovHead)
        admit_limits(self.name, limits, sampling=True)
        if not limits.sampling:
            raise Unsupported(f"{self.name} is vLLM's loop for sampling; its greedy one is backend=vllm_loop_greedy.")
        if limits.max_steps > ROUND_TOKENS:
            raise Unsupported(f"{self.name} has {ROUND_TOKENS} positions a walk; got max_steps {limits.max_steps}.")
        admit_triton(self.name, markov.device)
        return LoopGumbelPrepared(markov, limits)


class LoopGumbelPrepared:
    """The walk with its logit cache, bf16 [max_batch, max_steps, vocab], and its round counter on the device, [1] int64."""

    noise: ClassVar[NoiseRule] = NoiseRule.HASH

    def __init__(self, head: MarkovHead, limits: Limits) -> None:
        self._head = head
        self._limits = limits
        self._cache = torch.zeros(limits.max_batch, limits.max_steps, head.vocab, dtype=torch.bfloat16, device=head.device)
        self._rounds = torch.zeros(1, dtype=torch.int64, device=head.device)

    @property
    def resources(self) -> Resources:
        return Resources(streamed_bytes=self._head.w2.nbytes)

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        """One walk. Corrected logits of all rows go to `out.logits` if there are any, else to the static cache."""
        from kernels.triton.gumbel_sample import gumbel_sample

        admit_walk(VllmLoopGumbel.name, inputs, out, self._limits, self._head)
        cache = self._cache if out.logits is None else out.logits
        if cache.stride(2) != 1 or cache.dtype != torch.bfloat16:
            raise ValueError(
                f"{VllmLoopGumbel.name} writes logits in bf16, contiguous along vocab; got {cache.dtype}, strides {cache.stride()}."
            )
        temperature, seed = inputs.temperature.contiguous(), inputs.seed.contiguous()
        previous = inputs.anchor.clamp(0, inputs.vocab - 1)
        for step in range(inputs.steps):
            latent = functional.embedding(previous, self._head.w1)
            logits = inputs.base_logits[:, step] + functional.linear(latent, self._head.w2)
            previous = gumbel_sample(logits, cache[:, step], temperature, seed, self._rounds, step)
            out.tokens[:, step] = previous
        self._rounds.add_(1)

    def round(self) -> int:
        """The round of the next launch, see `kernels.walk.SampledWalk`."""
        return int(self._rounds.item()) & MASK
