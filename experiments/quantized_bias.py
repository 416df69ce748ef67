"""The bias W2 u of latents in bf16, and what it becomes under every way to store W2 and u in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.float8 import E4M3, E5M2, quantize_float8
from kernels.heads.markov import MarkovHead
from kernels.quantize import TwoPlanes, int8_bias, quantize_rows, two_planes

FORMATS: tuple[str, ...] = ("int8", "e4m3", "e5m2", "int8_one_plane", "int8_two_planes")
_FLOATS = {"e4m3": E4M3, "e5m2": E5M2}


@dataclass(frozen=True, eq=False)
class Latents:
    """u, [n, rank] each: `exact` and `one_plane` (an int8 row, dequantized) float64, and the two planes of the INT8 rule."""

    exact: Tensor
    one_plane: Tensor
    two_planes: TwoPlanes

    @classmethod
    def of(cls, u: Tensor) -> Latents:
        """The latents u, [n, rank] bf16."""
        return cls(u.double(), quantize_rows(u).dequantized(), two_planes(u))

    def folded(self) -> tuple[Tensor, Tensor]:
        """`exact` and `one_plane` with at most 2 rank rows: products with any weights keep their Frobenius norms, and so do sums of such products.

        [one_plane exact] = Q R, and a norm does not see Q. So thousands of tokens cost as much as a few hundred.
        """
        one_plane, exact = torch.linalg.qr(torch.cat([self.one_plane, self.exact], dim=1)).R.chunk(2, dim=1)
        return exact, one_plane


def exact_bias(rows: Tensor, exact: Tensor) -> Tensor:
    """[n, v] float64: the bias of bf16 rows [v, rank] of W2 and latents [n, rank] float64."""
    return exact @ rows.double().T


def linear_biases(rows: Tensor, exact: Tensor, one_plane: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Every format but the last of FORMATS and its bias [n, v] float64, one after the other, so that only one is in memory.

    rows: [v, rank] bf16, some rows of W2. int8, e4m3, e5m2: W2 so, times `exact`. int8_one_plane: W2 in int8 times `one_plane`.
    """
    int8 = quantize_rows(rows).dequantized().T
    yield "int8", exact @ int8
    for name, dtype in _FLOATS.items():
        yield name, exact @ quantize_float8(rows, dtype).dequantized().T
    yield "int8_one_plane", one_plane @ int8


def two_plane_bias(rows: Tensor, latents: Latents) -> Tensor:
    """[n, v] float64: the INT8 rule of the resident walk, with its fp32 roundings."""
    return int8_bias(quantize_rows(rows), latents.two_planes).double()


def head_through(head: MarkovHead, form: str) -> MarkovHead:
    """The head after a way through `form`, one of FORMATS, and back to bf16, which costs 0.1 % more: W2, and for int8_one_plane W1 too, since a latent is
    a row of it. Two planes lose less of W1 than bf16 has."""
    w2 = quantize_float8(head.w2, _FLOATS[form]) if form in _FLOATS else quantize_rows(head.w2)
    w1 = quantize_rows(head.w1).dequantized().bfloat16() if form == "int8_one_plane" else head.w1
    return MarkovHead(w1, w2.dequantized().bfloat16())


def quantized_biases(rows: Tensor, latents: Latents) -> Iterator[tuple[str, Tensor]]:
    """All of FORMATS, likewise."""
    yield from linear_biases(rows, latents.exact, latents.one_plane)
    yield "int8_two_planes", two_plane_bias(rows, latents)
