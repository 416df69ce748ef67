"""The greedy loop's own part: its argmax is torch's, whatever the row; a walk wide enough for it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.agreement import check
from kernels.device import load
from kernels.heads.markov import MarkovHead
from kernels.registry import create
from kernels.synthetic import synthetic_inputs
from kernels.walk import Draft, Limits, NanRule, Rounding

pytest.importorskip("triton", reason="needs Triton; install it with: pip install -e '.[gpu]'")
from kernels.triton import greedy_argmax as room
from kernels.triton.greedy_argmax import greedy_argmax

CPU = load("cpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VALUES = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, 3e38, -3e38]


@settings(max_examples=40)
@given(
    vocab=st.sampled_from([4096, 4097, 8191, 8192, 9000]),
    fill=st.sampled_from([-torch.inf, 0.0, torch.nan]),
    place=st.dictionaries(st.integers(0, 8999), st.sampled_from(VALUES), max_size=5),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_the_argmax_is_torchs(vocab: int, fill: float, place: dict[int, float], dtype: torch.dtype) -> None:
    logits = torch.full((2, vocab), fill, dtype=dtype)
    logits[0, 4096 % vocab] = 2.0  # another row, to see that rows do not mix
    for index, value in place.items():
        logits[1, index % vocab] = value
    logits = logits.to(DEVICE)
    assert torch.equal(greedy_argmax(logits), logits.argmax(dim=1))


def test_ties_go_to_the_lowest_token_of_any_part() -> None:
    logits = torch.zeros(3, 12_288, dtype=torch.bfloat16, device=DEVICE)
    logits[0, [4095, 4096, 12_287]] = 1.0
    logits[1, [12_287, 8192]] = torch.nan
    logits[1, 5] = torch.inf
    assert greedy_argmax(logits).tolist() == [4095, 8192, 0]


def test_padding_beyond_the_vocabulary_is_not_read() -> None:
    storage = torch.full((2, 5000), 1e4, dtype=torch.bfloat16, device=DEVICE)
    storage[:, :4100] = -1.0
    assert greedy_argmax(storage[:, :4100]).tolist() == [0, 0]


def test_torch_serves_what_the_kernels_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(room, "_best_in_part")
    wide = torch.randn(2, 9000, generator=torch.Generator().manual_seed(0))
    for logits in (wide[:, :4095], wide[:, ::2], wide.double(), wide.half()):
        assert torch.equal(greedy_argmax(logits), logits.argmax(dim=1))
    with pytest.raises(NameError):
        greedy_argmax(wide)


def test_a_walk_of_several_parts() -> None:
    head, inputs = MarkovHead.synthetic(9001, 32, 0, DEVICE, w2_std=0.3), synthetic_inputs(9001, 5, 3, 1, DEVICE)
    draft = Draft.like(inputs, logits=True)
    create("vllm_loop_greedy").prepare(head, Limits(3, 5), CPU).launch(inputs, draft)
    agreement = check(draft.tokens, head, inputs, Rounding.TWICE, NanRule.WINS)
    assert agreement.ok, agreement.reason
    assert draft.logits is not None
    assert draft.logits.isnan().all(), "the greedy loop keeps no logits"
