"""The oracle as a backend: every rule by option, limits and options as errors."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from kernels.agreement import check, stray_logits
from kernels.device import load
from kernels.heads.markov import MarkovHead
from kernels.registry import create
from kernels.synthetic import synthetic_inputs
from kernels.walk import Draft, Limits, NoiseRule, Rounding, SampledWalk, Unsupported, WalkInputs

CPU = load("cpu")


@pytest.mark.parametrize("rounding", ["twice", "once", "never", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_the_oracle(rounding: str, dtype: torch.dtype) -> None:
    head, inputs = MarkovHead.synthetic(101, 16, 0), synthetic_inputs(101, 5, 2, 1)
    inputs = type(inputs)(inputs.base_logits.to(dtype), inputs.anchor, inputs.temperature, inputs.seed)
    backend = create("reference", {"rounding": rounding})
    draft = Draft.like(inputs, logits=True)
    backend.prepare(head, Limits(2, 5), CPU).launch(inputs, draft)
    assert backend.rounding is Rounding(rounding)
    assert check(draft.tokens, head, inputs, backend.rounding, backend.nan_rule, exact=True).ok
    assert draft.logits is not None
    if rounding != "never":  # unrounded logits do not fit a bf16 draft
        assert stray_logits(draft.logits, draft.tokens, head, inputs, backend.rounding) == 0


def test_it_draws_by_rule_gumbel_and_counts_its_launches() -> None:
    head, plain = MarkovHead.synthetic(101, 16, 0), synthetic_inputs(101, 5, 3, 1)
    inputs = WalkInputs(plain.base_logits, plain.anchor, torch.tensor([0.0, 0.7, 2.0]), plain.seed)
    prepared, greedy = (create("reference").prepare(head, Limits(3, 5, sampling), CPU) for sampling in (True, False))
    assert isinstance(prepared, SampledWalk)
    drawn = []
    for round in (0, 1):
        assert prepared.round() == round
        draft = Draft.like(inputs, logits=True)
        prepared.launch(inputs, draft)
        assert check(draft.tokens, head, inputs, Rounding.TWICE, exact=True, noise=NoiseRule.GUMBEL, round=round).ok
        assert draft.logits is not None
        assert stray_logits(draft.logits, draft.tokens, head, inputs, Rounding.TWICE) == 0
        drawn.append(draft.tokens)
    assert torch.equal(drawn[0][0], drawn[1][0]), "the greedy row"
    assert not torch.equal(drawn[0][1:], drawn[1][1:])
    draft = Draft.like(inputs)
    greedy.launch(inputs, draft)
    assert check(draft.tokens, head, plain, Rounding.TWICE, exact=True).ok


def test_what_it_refuses() -> None:
    head, inputs = MarkovHead.synthetic(10, 4), synthetic_inputs(10, 3, 2)
    with pytest.raises(ValueError, match="no rounding 'thrice'; it has: twice, once, never, int8"):
        create("reference", {"rounding": "thrice"})
    with pytest.raises(ValueError, match="no rounding 'approximate'"):
        create("reference", {"rounding": "approximate"})
    for limits in (Limits(1, 3), Limits(2, 2)):
        with pytest.raises(ValueError, match="batch 2 and steps 3"):
            create("reference").prepare(head, limits, CPU).launch(inputs, Draft.like(inputs))


def test_a_head_without_an_exact_step_is_unsupported() -> None:
    class Stub:
        kind: ClassVar[str] = "stub"
        vocab, rank, device = 4, 2, torch.device("cpu")

    with pytest.raises(Unsupported, match="'stub' head has no exact step"):
        create("reference").prepare(Stub(), Limits(), CPU)
