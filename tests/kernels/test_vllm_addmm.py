"""How often addmm rounds is what the backend says, by every logit and not only by the tokens that win."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.backends.vllm_addmm import rounding_of_addmm
from kernels.heads.markov import MarkovHead
from kernels.registry import create
from kernels.synthetic import synthetic_inputs
from kernels.walk import Rounding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_its_logits_are_those_of_its_rule_and_not_of_the_other() -> None:
    head, inputs = MarkovHead.synthetic(4_096, 256, 0, DEVICE), synthetic_inputs(4_096, 1, 16, 1, DEVICE)
    base, latent = inputs.base_logits[:, 0].contiguous(), functional.embedding(inputs.anchor, head.w1)
    logits = torch.addmm(base, latent, head.w2.T).float()
    stray = {}
    for rule in (Rounding.ONCE, Rounding.TWICE):
        lowest, highest = head.step_interval(inputs.anchor, base, rule)
        stray[rule] = float(((logits < lowest) | (logits > highest)).float().mean())
    own = rounding_of_addmm(DEVICE)
    (other,) = stray.keys() - {own}
    assert create("vllm_addmm").rounding is own
    assert stray[own] == 0
    assert stray[other] > 0.05
