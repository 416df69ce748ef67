"""Sums and products of bf16 that are the same on a GPU and in Triton's interpreter.

The interpreter (3.7) cuts fp32 to bf16 instead of rounding it and multiplies bf16 matrices as if they were integers. There the rounding is
done on the bits and matrices are widened first, which changes no product. On a GPU both are what they look like.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit, knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@jit
def rounded(x):
    """fp32 to the nearest bf16, ties to even."""
    nearest = x.to(tl.bfloat16)
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        nearest = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return nearest


@jit
def product(a, b):
    """Matrix product of bf16 a [m, k] and b [k, n], summed in fp32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b)
