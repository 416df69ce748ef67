"""MarkovGreedyStep's own parts: fp32 scores that a rounding would tie or turn round, NaN rows, tiles, ranks, a missing Triton."""

from __future__ import annotations

import sys

import pytest
import torch

from kernels.agreement import check
from kernels.device import load
from kernels.heads.markov import MarkovHead
from kernels.registry import create
from kernels.synthetic import synthetic_inputs
from kernels.walk import Draft, Limits, NanRule, Rounding, Unsupported

pytest.importorskip("triton", reason="needs Triton; install it with: pip install -e '.[gpu]'")
from kernels.triton.markov_greedy import greedy_step

NAME, CPU, BF16 = "sglang_markov_greedy_step", load("cpu"), torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy talks about the NaN that the interpreter makes


def best(base: torch.Tensor, w2: torch.Tensor, previous: int = 0) -> list[int]:
    """A step for [batch, vocab] base logits with u = (0, 1, 0, 0, ...) for token 1, ones for all others."""
    w1 = torch.ones(len(w2), w2.shape[1], dtype=BF16)
    w1[1:2] = 0
    w1[1, 1] = 1
    before = torch.full((len(base),), previous, device=DEVICE)
    return greedy_step(before, base.to(BF16).to(DEVICE), w1.to(DEVICE), w2.to(BF16).to(DEVICE)).tolist()


def test_scores_are_never_rounded() -> None:
    """1 + 2^-12 and 1 are the same bf16; the larger one must win though its token is higher, and in another tile."""
    w2 = torch.zeros(600, 32)
    w2[599, 0] = 2.0**-12
    w2[5, 3] = 2.0**-13
    assert best(torch.ones(1, 600), w2) == [599]


def test_the_latent_is_the_row_of_the_previous_token() -> None:
    w2 = torch.zeros(300, 64)
    w2[7, 1], w2[9, 40] = 1.0, 2.0
    assert best(torch.zeros(2, 300), w2, previous=0) == [9, 9]
    assert best(torch.zeros(2, 300), w2, previous=1) == [7, 7]


@pytest.mark.parametrize("rank", [4, 32, 40, 64, 256])
def test_every_part_of_the_rank_counts(rank: int) -> None:
    head, inputs = MarkovHead.synthetic(530, rank, rank, DEVICE, w2_std=0.3), synthetic_inputs(530, 2, 2, rank, DEVICE)
    draft = Draft.like(inputs)
    create(NAME).prepare(head, Limits(2, 2), CPU).launch(inputs, draft)
    agreement = check(draft.tokens, head, inputs, Rounding.NEVER, NanRule.LOSES)
    assert agreement.ok, agreement.reason
    assert agreement.near_ties == 0


@pytest.mark.parametrize(
    ("place", "token"),
    [
        ({}, 0),
        ({3: torch.nan, 300: torch.nan}, 0),
        ({3: torch.nan, 300: -3e38, 520: -3e38}, 300),
        ({255: 1.0, 256: 1.0, 520: 1.0}, 255),
        ({256: torch.inf, 529: torch.inf}, 256),
        ({528: 2.0, 529: 3.0}, 529),
    ],
)
def test_ties_and_nan_across_tiles(place: dict[int, float], token: int) -> None:
    base = torch.full((2, 530), -torch.inf)
    base[0, 4] = 1.0  # another request, to see that they do not mix
    for index, value in place.items():
        base[1, index] = value
    assert best(base, torch.zeros(530, 32)) == [4, token]


def test_a_nan_in_the_weights_loses_too() -> None:
    w2 = torch.zeros(300, 32)
    w2[7] = torch.nan
    assert best(torch.zeros(1, 300), w2) == [0]
    assert best(torch.zeros(1, 300), torch.full((300, 32), torch.nan)) == [0], "in range where all is NaN"


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["importlib.util"], "find_spec", lambda name: None)
    for name, sampling in ((NAME, False), ("vllm_loop_greedy", False), ("vllm_loop_gumbel", True)):
        with pytest.raises(Unsupported, match=f"{name} needs Triton, which is not installed; run: pip install"):
            create(name).prepare(MarkovHead.synthetic(8, 4, device=DEVICE), Limits(sampling=sampling), CPU)
