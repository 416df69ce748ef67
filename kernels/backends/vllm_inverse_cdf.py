"""vLLM's walk with two fused kernels behind the bias GEMM; sampled tokens are drawn by inverse CDF instead of Gumbel-max.

Stands for: vLLM pull request 64442 (at b195a3bc7abd), opt-in there as `dspark_fused_markov`. Its text was read, its kernels were not seen.
A step is three launches: the cuBLAS GEMM of the bias; a kernel that adds the base logits (fp32 sum, rounded once to bf16), writes the
draft-logits cache for every row and keeps the maximum and exp-sum of each block of the vocabulary; a kernel with one program a request that
draws one uniform, picks a block by the prefix sum of the masses and a token inside it from the same fp32 weights, and writes the token's
W1 row into the next GEMM's input.
Rows with T <= 0 or NaN take the first of their largest logits.

What is ours where the text is silent: blocks of 1,024 tokens; the uniform is the word of vLLM's hashed noise with the
step in the row's place; a block's argmax is kept for greedy rows instead of its exp-sum; no latent is fetched after the last step.
What differs from the original:
- The original reads positions from its inputs; here a counter of launches stands for the context (`kernels.murmur`), and one tiny kernel a
  walk raises it.
- Two tiny kernels before the loop clamp the anchor and gather its W1 row; the original's loop gathers it too.
- Left out: the lm_head GEMM, draft top-k, inert rows of the request table.
Without sampling the original keeps vLLM's loop, and so must you.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from kernels.admission import admit_head, admit_limits, admit_walk
from kernels.device import DeviceSpec
from kernels.heads.markov import MarkovHead
from kernels.murmur import ROUND_TOKENS
from kernels.philox import MASK
from kernels.registry import register
from kernels.triton.admission import admit_triton
from kernels.walk import Draft, Head, Limits, NanRule, NoiseRule, NoOptions, Resources, Rounding, Unsupported, WalkInputs


@register
class VllmInverseCdf:
    """See the module's text. A NaN logit loses here, since the maxima ignore it and it has no weight."""

    name: ClassVar[str] = "vllm_inverse_cdf"
    archs: ClassVar[tuple[str, ...]] = ("cuda",)
    nan_rule: ClassVar[NanRule] = NanRule.LOSES
    rounding: ClassVar[Rounding] = Rounding.TWICE
    Options: ClassVar[type[NoOptions]] = NoOptions

    def __init__(self, options: NoOptions) -> None:
        pass

    def prepare(self, head: Head, limits: Limits, device: DeviceSpec) -> InverseCdfPrepared:
        markov = admit_head(self.name, head, MarkovHead)
        admit_limits(self.name, limits, sampling=True)
        if not limits.sampling:
            raise Unsupported("vllm_inverse_cdf is for sampled drafts only, as the original; greedy ones are backend=vllm_loop_greedy.")
        if limits.max_steps > ROUND_TOKENS:
            raise Unsupported(f"vllm_inverse_cdf has noise for {ROUND_TOKENS} steps; got max_steps {limits.max_steps}.")
        admit_triton(self.name, markov.device)
        return InverseCdfPrepared(markov, limits)


class InverseCdfPrepared:
    """The walk with its static buffers: bf16 latents [max_batch, rank], bias [max_batch, vocab], cache [max_batch, max_steps, vocab]; the
    blocks' sums; the count of launches."""

    def __init__(self, head: MarkovHead, limits: Limits) -> None:
        from kernels.triton.inverse_cdf import Blocks

        self._head = head
        self._limits = limits
        self._w1 = head.w1.contiguous()
        like = {"dtype": torch.bfloat16, "device": head.device}
        self._latents = torch.zeros(limits.max_batch, head.rank, **like)
        self._bias = torch.zeros(limits.max_batch, head.vocab, **like)
        self._cache = torch.zeros(limits.max_batch, limits.max_steps, head.vocab, **like)
        self._blocks = Blocks.empty(limits.max_batch, head.vocab, head.device)
        self._rounds = torch.zeros(1, dtype=torch.int64, device=head.device)

    @property
    def resources(self) -> Resources:
        return Resources(streamed_bytes=self._head.w2.nbytes)

    @property
    def noise(self) -> NoiseRule:
        return NoiseRule.UNIFORM

    def round(self) -> int:
        """The round of the next launch, see `kernels.walk.SampledWalk`."""
        return int(self._rounds.item()) & MASK

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        """One walk. Corrected logits of all rows go to `out.logits` if there are any, else to the static cache."""
        from kernels.triton.inverse_cdf import finish_step

        admit_walk(VllmInverseCdf.name, inputs, out, self._limits, self._head)
        latents, bias = self._latents[: inputs.batch], self._bias[: inputs.batch]
        cache = self._cache if out.logits is None else out.logits
        torch.index_select(self._w1, 0, inputs.anchor.clamp(0, inputs.vocab - 1), out=latents)
        for step in range(inputs.steps):
            torch.mm(latents, self._head.w2.T, out=bias)
            finish_step(inputs, step, bias, cache, self._blocks, self._rounds, out.tokens, self._w1, latents)
        self._rounds.add_(1)
