"""vLLM's fused walk for Kimi-K3: two launches a step, the bias product on the tensor cores inside the first.

Stands for: vLLM's `models/kimi_k3/nvidia/specialized_decode/drafter/markov.py`, as its API page describes it; the page
quotes the host code, not the kernels. A step is two launches. The first has a program for every 256 tokens and 16 requests: it gathers the requests' W1 rows, streams
W2 in tiles of [64, rank] through the tensor cores (fp32 sums), rounds bias and sum to bf16 as vLLM's loop does, writes the
draft-logits cache and keeps each request's best key in its part. The second takes the first of the largest parts. Four warps and two
stages, as there.

The noise is that of vLLM's loop. Up to NOISE_ROWS tokens a walk it is drawn before the steps on a side stream, forked from and joined to the
launching stream by events; beyond that, and with `precomputed_noise=false`, the steps hash it. The page does not tell the original's bound; ours
is where hashing gets faster.

What differs from the original:
- There the side stream's kernel runs beside the lm_head, which is no part of a walk here, so a walk pays for it in full. What is
  stored is the noise, not the argument of its last logarithm.
- The page says that the request's seed is mixed with the draft step. How is not told, so the key here is seed, position, token.
- Positions come from a counter of launches (`kernels.murmur`) instead of the inputs; one tiny kernel a walk raises it.
- Anchors are clamped into the vocabulary as step 0 reads them.
- Without sampling the original leaves the walk to vLLM's loop. Here the same kernels serve it, with neither noise nor cache.
- Left out: the lm_head GEMM, fp32 logits, fp64 noise, inert rows of the request table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kernels.admission import admit_head, admit_limits, admit_walk
from kernels.device import DeviceSpec
from kernels.heads.markov import MarkovHead
from kernels.murmur import ROUND_TOKENS
from kernels.philox import MASK
from kernels.registry import register
from kernels.triton.admission import admit_triton
from kernels.walk import Draft, Head, Limits, NanRule, NoiseRule, Resources, Rounding, Unsupported, WalkInputs

NOISE_ROWS = 32  # batch * steps. On an H200, 7 of them take 199 us instead of 215, 112 take 282 instead of 221 (V = 151,936, 7 steps)
MAX_RANK = 512


@dataclass(frozen=True)
class TwoLaunchOptions:
    """precomputed_noise: draw the noise of a walk of at most NOISE_ROWS tokens before its steps, as the original does."""

    precomputed_noise: bool = True


@register
class VllmTwoLaunch:
    """See the module's text. A NaN logit loses here, since the maxima ignore it."""

    name: ClassVar[str] = "vllm_two_launch"
    archs: ClassVar[tuple[str, ...]] = ("cuda",)
    nan_rule: ClassVar[NanRule] = NanRule.LOSES
    rounding: ClassVar[Rounding] = Rounding.TWICE
    Options: ClassVar[type[TwoLaunchOptions]] = TwoLaunchOptions

    def __init__(self, options: TwoLaunchOptions) -> None:
        self.options = options

    def prepare(self, head: Head, limits: Limits, device: DeviceSpec) -> TwoLaunchPrepared:
        markov = admit_head(self.name, head, MarkovHead)
        admit_limits(self.name, limits, sampling=True)
        rank = markov.rank
        if rank % 16 or rank & (rank - 1) or rank > MAX_RANK:
            raise Unsupported(
                f"vllm_two_launch needs a rank that is a power of two from 16 to {MAX_RANK}; got {rank}; backend=sglang_folded serves any."
            )
        if limits.sampling and limits.max_steps > ROUND_TOKENS:
            raise Unsupported(f"vllm_two_launch has noise for {ROUND_TOKENS} steps; got max_steps {limits.max_steps}.")
        admit_triton(self.name, markov.device)
        return TwoLaunchPrepared(markov, limits, self.options)


class TwoLaunchPrepared:
    """The walk with its static buffers: the parts' best; with sampling the cache bf16 [max_batch, max_steps, vocab], the count of launches
    and, where it is precomputed, noise fp32 [up to NOISE_ROWS, vocab] and the side stream."""

    def __init__(self, head: MarkovHead, limits: Limits, options: TwoLaunchOptions) -> None:
        from kernels.triton.two_launch import Parts

        self._head = head
        self._limits = limits
        self._w1, self._w2 = head.w1.contiguous(), head.w2.contiguous()
        self._parts = Parts.empty(limits.max_batch, head.vocab, head.device)
        self._rounds = torch.zeros(1, dtype=torch.int64, device=head.device)
        self._cache = self._noise = self._side = None
        if not limits.sampling:
            return
        self._cache = torch.zeros(limits.max_batch, limits.max_steps, head.vocab, dtype=torch.bfloat16, device=head.device)
        if options.precomputed_noise:
            rows = min(NOISE_ROWS, limits.max_batch * limits.max_steps)
            self._noise = torch.zeros(rows, head.vocab, dtype=torch.float32, device=head.device)
            self._side = torch.cuda.Stream(head.device) if head.device.type == "cuda" else None

    @property
    def resources(self) -> Resources:
        return Resources(streamed_bytes=self._head.w2.nbytes)

    @property
    def noise(self) -> NoiseRule:
        return NoiseRule.HASH

    def round(self) -> int:
        """The round of the next launch, see `kernels.walk.SampledWalk`."""
        return int(self._rounds.item()) & MASK

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        """One walk. Prepared with sampling, corrected logits of all rows go to `out.logits` if there are any, else to the static cache;
        without it, to `out.logits` only, and every row is greedy, whatever its temperature says."""
        from kernels.triton.two_launch import Noise, step_in_two

        admit_walk(VllmTwoLaunch.name, inputs, out, self._limits, self._head)
        cache = self._cache if out.logits is None else out.logits
        noise = self._precompute(inputs)
        source = Noise.NONE if not self._limits.sampling else Noise.HASHED if noise is None else Noise.STORED
        for step in range(inputs.steps):
            step_in_two(inputs, step, self._w1, self._w2, self._parts, out.tokens, cache, source, noise, self._rounds)
        if self._limits.sampling:
            self._rounds.add_(1)

    def _precompute(self, inputs: WalkInputs) -> Tensor | None:
        """[batch, steps, vocab] fp32 noise, drawn on the side stream and joined, or None where the steps hash it."""
        from kernels.triton.two_launch import draw_noise

        rows = inputs.batch * inputs.steps
        if self._noise is None or rows > len(self._noise):
            return None
        noise = self._noise[:rows].view(inputs.batch, inputs.steps, inputs.vocab)
        if self._side is None:
            draw_noise(inputs, noise, self._rounds)
            return noise
        launching = torch.cuda.current_stream(inputs.base_logits.device)
        self._side.wait_stream(launching)
        with torch.cuda.stream(self._side):
            draw_noise(inputs, noise, self._rounds)
        launching.wait_stream(self._side)
        return noise
