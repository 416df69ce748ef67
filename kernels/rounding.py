"""What each `Rounding` does to base logits and bias: one place, read by every head's reference step."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.walk import Rounding


def bf16(x: Tensor) -> Tensor:
    """x rounded to the nearest bf16 (ties to even), as fp32."""
    return x.to(torch.bfloat16).float()


def corrected(base: Tensor, bias: Tensor, rounding: Rounding) -> Tensor:
    """Corrected logits of one step under `rounding`, as fp32 that holds exactly the rounded values.

    base: [batch, vocab] bf16, fp16 or fp32; bias: [batch, vocab] fp32. Every operation here is monotone in the bias,
    so an interval of biases maps to the interval of logits between the images of its ends.
    """
    base = base.float()
    match rounding:
        case Rounding.TWICE:
            return bf16(base + bf16(bias))
        case Rounding.ONCE | Rounding.INT8:
            return bf16(base + bias)
        case Rounding.NEVER:
            return base + bias
        case _:
            raise ValueError(f"rounding {rounding!r} has no oracle; the exact ones are twice, once, never and int8.")
