"""Requests of every kind in one batch."""

from __future__ import annotations

import math

import torch

from kernels.synthetic import synthetic_inputs
from kernels.walk import WalkInputs

TEMPERATURES = [0.0, 0.3, 1.0, 2.0, math.nan, -1.0, 0.7, 1.3]


def mixed(vocab: int, steps: int, batch: int, seed: int = 1) -> WalkInputs:
    """Temperatures of all kinds, seeds that use both halves of their 64 bits; on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = synthetic_inputs(vocab, steps, batch, seed, device)
    temperature = torch.tensor((TEMPERATURES * batch)[:batch], device=device)
    seeds = torch.tensor([(-1) ** row * (row * 0x9E3779B97F4A7 + seed) for row in range(batch)], device=device)
    return WalkInputs(plain.base_logits, plain.anchor, temperature, seeds)
