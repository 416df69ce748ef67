"""Every kind of persistent walk at a small size, for compute-sanitizer. Prints a line a walk; a wrong token is an error.

compute-sanitizer --tool racecheck --kernel-name kns=walk_ python -m tests.kernels.sanitize     (also: memcheck, synccheck)
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.placement import SMALL_BATCH
from tests.kernels.arm import FAMILIES, H200, STAGES, Arm, inputs_on_gpu
from tests.kernels.arm import head_on_gpu as head_of

FEW_SMS = replace(H200, sms=4)  # so that a small vocabulary reaches every tier
VOCABS = (1_000, 8_001)  # all resident; every tier, and above 32 requests two stages a warpgroup
ONE_STAGE = (3_501, 4_501)  # of many requests; above 32 the first streams less than every other tile


def walk_twice(arm: Arm, vocab: int) -> None:
    """Launches without a pause, as a drafter makes them: the second meets what the first left behind."""
    head, inputs = head_of(vocab), inputs_on_gpu(vocab, 4, arm.temperatures)
    walk = arm.prepare(head, FEW_SMS)
    for _ in range(2):
        arm.assert_right(walk, head, inputs)
    print(f"{vocab} {arm}: {walk.resources.streamed_bytes} bytes streamed, {walk.resources.ctas} CTAs", flush=True)


def main() -> None:
    for vocab in VOCABS:
        for arm in FAMILIES:
            walk_twice(arm, vocab)
    for vocab in ONE_STAGE:
        for arm in FAMILIES:
            if arm.limits.max_batch > SMALL_BATCH:
                walk_twice(arm, vocab)
    for arm in STAGES:
        walk_twice(arm, VOCABS[0])  # nothing may be streamed
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
