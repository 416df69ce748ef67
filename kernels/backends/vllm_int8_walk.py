"""The design of vLLM's int8 Markov walk, rebuilt in our kernel template: W2 in shared memory and L2, none of it in registers.

Stands for: vLLM pull request 62958 (`dspark_markov_quantization="int8"`, as of 5af18a7). Its text was read, its kernel was not: one
cooperative launch a walk, W2 as int8 rows with one fp32 scale each, part of it in shared memory for all steps and the rest streamed from
L2, and an argmax of all CTAs that goes through one atomic {key, count} pair a step, up to 64 requests. That is walk_batched.cuh, which keeps no
W2 in registers. So this arm is that kernel for every batch, also where `resident_sm90` has another: up to eight greedy or four sampled
requests. Above, **the two arms are the same kernel, bit for bit**, and differ by noise of the measurement only.

Why not walk_resident.cuh with no register tiles for few requests: that is faster than the original is. On an H200 it takes 39 us greedy and 42 at
T = 1 (V = 151,936, 7 steps, one request); the original's 60.5 and 80.9 on an H100 times the 0.84 to 0.87 that many requests take here of
their published times are 51 and 70, and walk_batched.cuh for up to 16 requests takes 50.6 and 69.7.

What differs from the original, and by how much:
- It says that most of W2 stays in shared memory, at V = 151,936. Here 15.6 of 38.9 MB stay (129,280: 16.6 of 33.1; 248,320: 16.0 of
  63.6) on 132 SMs with up to 16 greedy requests. Row scales, latents and the rings of streamed tiles need the rest. How the original divides its shared memory is not known.
- Noise: Philox keyed by the request's seed and a round counter, where the original has the draft position; a token is drawn by groups
  (`NoiseRule.GROUPS`).
- The next token's latent is fetched before its exchange is over, and other such details of our template that the text does not tell.
- Left out: fp16 and fp32 heads. The limits are the original's: up to 16 steps, 64 requests and 2,048 rows a SM (270,336 on 132).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from kernels.backends.resident_sm90 import ResidentOptions, ResidentSm90
from kernels.build import Kernel
from kernels.device import DeviceSpec
from kernels.persistent import PersistentWalk, admit
from kernels.placement import GREEDY_BATCH, MAX_BATCH, BatchedPlacement, Placement
from kernels.registry import register
from kernels.walk import Head, Limits, NanRule, NoOptions, Rounding, Unsupported

MAX_STEPS = 16
ROWS_PER_SM = 2048


@register
class VllmInt8Walk:
    """See the module's text. Greedy and sampled, batch 1 to 64, rank 256."""

    name: ClassVar[str] = "vllm_int8_walk"
    archs: ClassVar[tuple[str, ...]] = ResidentSm90.archs
    nan_rule: ClassVar[NanRule] = ResidentSm90.nan_rule
    rounding: ClassVar[Rounding] = Rounding.INT8
    Options: ClassVar[type[NoOptions]] = NoOptions

    def __init__(self, options: NoOptions) -> None:
        self._template = ResidentSm90(ResidentOptions())

    def fit(self, vocab: int, rank: int, limits: Limits, device: DeviceSpec) -> tuple[Placement | BatchedPlacement, Kernel]:
        """The placement and its kernel; needs no GPU.

        Raises:
            Unsupported: beyond the original's limits.
        """
        _admit_size(vocab, limits, device)
        return self._template.fit(vocab, rank, _batched(limits), device)

    def prepare(self, head: Head, limits: Limits, device: DeviceSpec) -> PersistentWalk:
        markov = admit(self.name, head, limits, device, max_batch=MAX_BATCH, sampling=True)
        _admit_size(markov.vocab, limits, device)
        return replace(self._template.prepare(markov, _batched(limits), device), name=self.name, limits=limits)


def _batched(limits: Limits) -> Limits:
    """The limits from which on the template is walk_batched.cuh: it has room for 16 requests then."""
    return replace(limits, max_batch=max(limits.max_batch, GREEDY_BATCH + 1))


def _admit_size(vocab: int, limits: Limits, device: DeviceSpec) -> None:
    """Unsupported where the original refuses, though the template may serve it."""
    if limits.max_steps > MAX_STEPS:
        raise Unsupported(
            f"{VllmInt8Walk.name} walks up to {MAX_STEPS} steps; got max_steps {limits.max_steps}; backend=resident_sm90 walks more."
        )
    if vocab > ROWS_PER_SM * device.sms:
        raise Unsupported(
            f"{VllmInt8Walk.name} serves up to {ROWS_PER_SM} rows a SM, {ROWS_PER_SM * device.sms} on {device.name}; got vocab {vocab}; "
            "backend=resident_sm90 may serve it."
        )
