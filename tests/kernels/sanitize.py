"""Every kind of walk with a kernel of ours at a small size, for compute-sanitizer. Prints a line a walk; a wrong token is an error.

compute-sanitizer --tool racecheck --kernel-name kns=walk_ python -m tests.kernels.sanitize     (also: memcheck, synccheck)
compute-sanitizer --tool memcheck --kernel-name-exclude kns=at:: --kernel-name-exclude kns=nvjet python -m tests.kernels.sanitize triton
`certified` instead of `triton`: the certified walk alone.

synccheck needs --num-cuda-barriers 65536: it counts the barriers of all launches, and stops the kernel when its table is full.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from kernels.agreement import check
from kernels.device import DeviceSpec
from kernels.placement import SMALL_BATCH
from kernels.reference import Approximation
from kernels.registry import create
from kernels.walk import Draft, Limits, NoiseRule, SampledWalk, WalkInputs
from tests.kernels.arm import FAMILIES, H200, STAGES, Arm, inputs_on_gpu
from tests.kernels.arm import head_on_gpu as head_of
from tests.kernels.mixed import mixed

FEW_SMS = replace(H200, sms=4)  # so that a small vocabulary reaches every tier
VOCABS = (1_000, 8_001)  # all resident; every tier, and above 32 requests two stages a warpgroup
ONE_STAGE = (3_501, 4_501)  # of many requests; above 32 the first streams less than every other tile

GREEDY_RIVALS = ("sglang_markov_greedy_step", "vllm_loop_greedy")
GREEDY = (*GREEDY_RIVALS, "fixed_point_sm90")
RIVALS = ("sglang_folded", "vllm_loop_gumbel", "vllm_two_launch", "vllm_inverse_cdf", "candidate_walk")


def walk_twice(arm: Arm, vocab: int) -> None:
    """Launches without a pause, as a drafter makes them: the second meets what the first left behind."""
    head, inputs = head_of(vocab), inputs_on_gpu(vocab, 4, arm.temperatures)
    walk = arm.prepare(head, FEW_SMS)
    for _ in range(2):
        arm.assert_right(walk, head, inputs)
    print(f"{vocab} {arm}: {walk.resources.streamed_bytes} bytes streamed, {walk.resources.ctas} CTAs", flush=True)


def rival_twice(name: str, vocab: int, inputs: WalkInputs, device: DeviceSpec = H200, **options: Any) -> None:
    """A walk of Triton kernels or the certified one, likewise; greedy if that is all the backend can."""
    head, backend, limits = head_of(vocab), create(name, options), Limits(inputs.batch, inputs.steps, name not in GREEDY)
    walk = backend.prepare(head, limits, device)
    held, rounding = (backend.restricted(head), backend.within) if isinstance(backend, Approximation) else (head, backend.rounding)
    for _ in range(2):
        noise, round = (walk.noise, walk.round()) if isinstance(walk, SampledWalk) and limits.sampling else (NoiseRule.LIBRARY, 0)
        draft = Draft.like(inputs, logits=limits.sampling and held is head)
        walk.launch(inputs, draft)
        torch.cuda.synchronize()
        agreement = check(draft.tokens, held, inputs, rounding, backend.nan_rule, noise=noise, round=round)
        assert agreement.ok, agreement.reason
    print(f"{vocab} {name} {options}, batch {inputs.batch}", flush=True)


def rivals() -> None:
    for vocab, batch in ((1_000, 1), (10_007, 17)):
        for name in (*GREEDY_RIVALS, *RIVALS):
            inputs = mixed(vocab, 4, batch)
            rival_twice(name, vocab, replace(inputs, temperature=torch.zeros_like(inputs.temperature)) if name in GREEDY_RIVALS else inputs)


def walks() -> None:
    for vocab in VOCABS:
        for arm in FAMILIES:
            walk_twice(arm, vocab)
    for vocab in ONE_STAGE:
        for arm in FAMILIES:
            if arm.limits.max_batch > SMALL_BATCH:
                walk_twice(arm, vocab)
    for arm in STAGES:
        walk_twice(arm, VOCABS[0])  # nothing may be streamed
    for vocab in (1_000, 2_001):
        inputs = mixed(vocab, 7, 1)
        rival_twice("fixed_point_sm90", vocab, replace(inputs, temperature=torch.zeros_like(inputs.temperature)), FEW_SMS)
    certified()


def certified() -> None:
    for vocab, batch in ((1_000, 1), (3_501, 3), (8_001, 4)):
        for tables in (True, False):
            rival_twice("certified_sm80", vocab, mixed(vocab, 4, batch), FEW_SMS, tables=tables)


if __name__ == "__main__":
    {"triton": rivals, "certified": certified, "": walks}["".join(sys.argv[1:])]()
