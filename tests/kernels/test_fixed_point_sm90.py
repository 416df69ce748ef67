"""The fixed point is the serial walk, whether guesses come true or not; and where they do it takes fewer passes. On the CPU, small, and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.agreement import check
from kernels.backends import fixed_point_sm90
from kernels.backends.fixed_point_sm90 import FixedPointSm90
from kernels.device import load
from kernels.heads.markov import MarkovHead
from kernels.synthetic import synthetic_inputs
from kernels.walk import Draft, Limits, NoOptions, Rounding, Unsupported, WalkInputs
from tests.kernels.arm import H200
from tests.kernels.emulated import emulate

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SPEC = H200 if ON_GPU else replace(load("h200"), sms=2)
VOCAB = 151_936


@pytest.fixture(autouse=True)
def _somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        emulate(monkeypatch, fixed_point_sm90)


def _peaked(vocab: int, steps: int, seed: int) -> WalkInputs:
    inputs = synthetic_inputs(vocab, steps, 1, seed, DEVICE)
    at = torch.randint(vocab, (1, steps, 1), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    inputs.base_logits.scatter_(2, at, 60.0)
    return inputs


@pytest.mark.parametrize("steps", [1, 3, 4, 7, 16])
@pytest.mark.parametrize("vocab", [900, pytest.param(VOCAB, marks=pytest.mark.gpu)])
def test_tokens_are_the_serial_walks(vocab: int, steps: int) -> None:
    head = MarkovHead.synthetic(vocab, 256, 0, DEVICE)
    walk = FixedPointSm90(NoOptions()).prepare(head, Limits(1, steps), SPEC)
    for seed in range(2):
        for inputs, fewest in ((_peaked(vocab, steps, seed), True), (synthetic_inputs(vocab, steps, 1, seed, DEVICE), False)):
            before, draft = int(walk.passes), Draft.like(inputs)
            walk.launch(inputs, draft)
            found = check(draft.tokens, head, inputs, Rounding.INT8)
            assert found.ok, found.reason
            passes = int(walk.passes) - before
            assert passes == -(-steps // 4) if fewest else -(-steps // 4) <= passes <= steps


def test_fewer_steps_than_prepared_and_a_wild_anchor() -> None:
    head = MarkovHead.synthetic(900, 256, 0, DEVICE)
    walk, plain = FixedPointSm90(NoOptions()).prepare(head, Limits(1, 7), SPEC), synthetic_inputs(900, 5, 1, 3, DEVICE)
    for anchor in (-3, 10**12, 899):
        inputs = replace(plain, anchor=torch.tensor([anchor], device=DEVICE))
        draft = Draft.like(inputs)
        walk.launch(inputs, draft)
        found = check(draft.tokens, head, inputs, Rounding.INT8)
        assert found.ok, found.reason


def test_refusals() -> None:
    backend, head = FixedPointSm90(NoOptions()), MarkovHead.synthetic(900, 256)
    for limits, message in (
        (Limits(2, 4), "one request"),
        (Limits(1, 17), "up to 16 steps"),
        (Limits(1, 4, sampling=True), "greedy only"),
    ):
        with pytest.raises(Unsupported, match=message):
            backend.prepare(head, limits, SPEC)
    with pytest.raises(Unsupported, match="find no room"):
        backend.place(400_000, 256, 16, H200)
