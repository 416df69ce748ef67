"""Sums and products of bf16 that are the same on a GPU and in Triton's interpreter.

The interpreter (3.7) cuts fp32 to bf16 instead of rounding it and multiplies bf16 matrices as if they were integers. There the rounding is
done on the bits and matrices are widened first, which changes no product. On a GPU both are what they look like.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def rounded(x):
    """fp32 to the nearest bf16, ties to even."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        return (nearest >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def product(a, b):
    """Matrix product of bf16 a [m, k] and b [k, n], summed in fp32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b)
