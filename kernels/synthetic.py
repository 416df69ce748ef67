"""The paper's synthetic inputs: base logits ~ N(0, 2), random anchors."""

from __future__ import annotations

import torch

from kernels.walk import WalkInputs


def synthetic_inputs(
    vocab: int,
    steps: int,
    batch: int = 1,
    seed: int = 0,
    device: torch.device | str = "cpu",
    base_std: float = 2.0,
    temperature: float = 0.0,
) -> WalkInputs:
    """Inputs drawn on the CPU, so that every machine sees the same.

    Logits are drawn row by row: at batch 1 a shorter walk of the same seed reads the first rows of a longer one.
    """
    generator = torch.Generator().manual_seed(seed)
    anchor = torch.randint(vocab, (batch,), generator=generator)
    base = torch.empty(batch, steps, vocab, dtype=torch.bfloat16)
    for row in base.view(batch * steps, vocab):
        row.copy_(torch.randn(vocab, generator=generator) * base_std)
    return WalkInputs(
        base_logits=base.to(device),
        anchor=anchor.to(device),
        temperature=torch.full((batch,), temperature, dtype=torch.float32, device=device),
        seed=torch.arange(batch, device=device),
    )
