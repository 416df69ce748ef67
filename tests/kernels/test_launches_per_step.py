"""A rival pays for the original's launches: as many a step as its docstring says, counted by the profiler."""

from __future__ import annotations

import pytest
import torch

from kernels.device import DeviceSpec
from kernels.heads.markov import MarkovHead
from kernels.registry import create
from kernels.synthetic import synthetic_inputs
from kernels.walk import Draft, Limits

pytest.importorskip("triton", reason="needs Triton; install it with: pip install -e '.[gpu]'")
VOCAB = 151_936


def launches(name: str, steps: int, sampling: bool) -> int:
    """Kernels, copies and fills of one warm walk of one request."""
    from torch.profiler import ProfilerActivity, profile

    head, inputs = MarkovHead.synthetic(VOCAB, 256, 0, "cuda"), synthetic_inputs(VOCAB, steps, 1, 1, "cuda")
    walk = create(name).prepare(head, Limits(1, steps, sampling), DeviceSpec("live", "sm_90a"))
    draft = Draft.like(inputs)
    walk.launch(inputs, draft)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        walk.launch(inputs, draft)
        torch.cuda.synchronize()
    results = trace.profiler.kineto_results if trace.profiler else None
    assert results is not None
    return sum(1 for event in results.events() if str(event.device_type()).endswith("CUDA"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "sampling", "expected"),
    [("sglang_markov_greedy_step", False, 2), ("vllm_loop_greedy", False, 6), ("vllm_loop_gumbel", True, 7)],
)
def test_a_step_launches_what_the_original_launches(name: str, sampling: bool, expected: int) -> None:
    assert launches(name, 7, sampling) - launches(name, 6, sampling) == expected
