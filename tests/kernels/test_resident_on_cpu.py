"""The resident walk of a few requests, its very source, on the CPU: tokens are the oracle's, bit for bit, with registers, shared memory and L2 as its
tiers (int8 and bf16), greedy and drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.agreement import check, stray_logits
from kernels.backends import resident_sm90
from kernels.backends.resident_sm90 import ResidentOptions, ResidentSm90
from kernels.device import load
from kernels.heads.markov import MarkovHead
from kernels.sampling import is_sampled
from kernels.synthetic import synthetic_inputs
from kernels.walk import Draft, Limits, SampledWalk
from tests.kernels.arm import TEMPERATURES
from tests.kernels.emulated import emulate

SPEC = replace(load("h200"), sms=2)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, resident_sm90)


@pytest.mark.parametrize(
    ("vocab", "batch", "sampling", "options"),
    [
        (900, 1, False, {}),
        (900, 1, True, {}),
        (900, 3, True, {}),
        (900, 6, False, {}),
        (900, 1, False, {"weights": "bf16"}),
        (3500, 1, False, {}),
    ],
)
def test_tokens_are_the_oracles(vocab: int, batch: int, sampling: bool, options: dict[str, Any]) -> None:
    head = MarkovHead.synthetic(vocab, 256, 0)
    backend = ResidentSm90(ResidentOptions(**options))
    walk = backend.prepare(head, Limits(batch, 3, sampling), SPEC)
    for seed in range(2):
        inputs = synthetic_inputs(vocab, 3, batch, seed)
        if sampling:
            inputs = replace(inputs, temperature=torch.tensor(TEMPERATURES[:batch]))
        draft, round = Draft.like(inputs, logits=sampling), walk.round() if isinstance(walk, SampledWalk) else 0
        walk.launch(inputs, draft)
        found = check(draft.tokens, head, inputs, backend.rounding, noise=walk.noise if sampling else None, round=round)
        assert found.ok, found.reason
        if sampling:
            drawn = is_sampled(inputs.temperature)
            assert draft.logits is not None
            assert stray_logits(draft.logits, draft.tokens, head, inputs, backend.rounding, rows=drawn) == 0
