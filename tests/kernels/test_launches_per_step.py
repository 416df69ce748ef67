"""A rival pays for the original's launches, no more and no fewer: as many a step as its docstring says, counted by the profiler."""

from __future__ import annotations

import pytest

from kernels.device import load
from kernels.heads.markov import MarkovHead
from kernels.registry import create
from kernels.synthetic import synthetic_inputs
from kernels.walk import Limits
from tests.kernels.kernel_names import kernel_names

pytest.importorskip("triton", reason="needs Triton; install it with: pip install -e '.[gpu]'")
VOCAB = 151_936
A_STEP = {
    "sglang_folded": 7,
    "sglang_greedy": 4,
    "sglang_markov_greedy_step": 2,
    "vllm_addmm": 3,
    "vllm_loop_greedy": 6,
    "vllm_loop_gumbel": 7,
    "vllm_two_launch": 2,
    "vllm_inverse_cdf": 3,
    "vllm_int8_walk": 0,
    "candidate_walk": 0,
    "pdl_chain": 2,
    "resident_sm90": 0,
}
SAMPLING = {"vllm_loop_gumbel", "vllm_inverse_cdf"}


def launches(name: str, steps: int) -> int:
    """Kernels and copies of one walk of one request."""
    head, inputs = MarkovHead.synthetic(VOCAB, 256, 0, "cuda"), synthetic_inputs(VOCAB, steps, 1, 1, "cuda")
    return len(kernel_names(create(name).prepare(head, Limits(1, steps, name in SAMPLING), load("h200")), inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("name", A_STEP)
def test_a_step_launches_what_the_original_launches(name: str) -> None:
    assert launches(name, 7) - launches(name, 6) == A_STEP[name]
