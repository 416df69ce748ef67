"""The vanilla Markov head: u = W1[previous], logits = base + W2 u. Weights and exact reference step.

Source: DeepSpec's `deepspec/modeling/dspark/markov_head.py`; DSpark checkpoints name the tensors `markov_head.markov_w{1,2}.weight`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from kernels.quantize import Int8Rows, int8_bias, quantize_rows, two_planes
from kernels.rounding import corrected
from kernels.walk import Rounding

W1_NAME = "markov_head.markov_w1.weight"
W2_NAME = "markov_head.markov_w2.weight"
_CHUNK_ROWS = 16384  # bounds the scratch: 32 MiB of fp64 a matrix at rank 256


@dataclass(frozen=True, eq=False)
class MarkovHead:
    """Weights of the vanilla Markov head.

    w1: [target vocab, rank] bf16, the latent of the previous token; at least as many rows as w2, since a drafted token is the next index
    w2: [vocab, rank] bf16, one row a drafted token
    """

    w1: Tensor
    w2: Tensor
    kind: ClassVar[str] = "markov"

    def __post_init__(self) -> None:
        for name, weight in (("w1", self.w1), ("w2", self.w2)):
            if weight.ndim != 2 or weight.dtype != torch.bfloat16 or 0 in weight.shape:
                raise ValueError(f"{name} must be a non-empty [rows, rank] bf16 matrix; got shape {list(weight.shape)} {weight.dtype}.")
        if self.w1.shape[1] != self.w2.shape[1] or self.w1.device != self.w2.device:
            raise ValueError(
                f"w1 and w2 must share rank and device; got ranks {self.w1.shape[1]} and {self.w2.shape[1]}, "
                f"devices {self.w1.device} and {self.w2.device}."
            )
        if self.w1.shape[0] < self.w2.shape[0]:
            raise ValueError(
                f"w1 has {self.w1.shape[0]} rows but w2 can draft {self.w2.shape[0]} tokens; every drafted token needs a row of w1."
            )

    @property
    def vocab(self) -> int:
        return self.w2.shape[0]

    @property
    def rank(self) -> int:
        return self.w2.shape[1]

    @property
    def device(self) -> torch.device:
        return self.w2.device

    @cached_property
    def int8(self) -> Int8Rows:
        """W2 in int8 rows, made once."""
        return quantize_rows(self.w2)

    @cached_property
    def sha256(self) -> str:
        """Of W1 and W2, to tell heads apart."""
        total = hashlib.sha256()
        for weight in (self.w1, self.w2):
            total.update(weight.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return total.hexdigest()

    def to(self, device: torch.device | str) -> MarkovHead:
        return MarkovHead(self.w1.to(device), self.w2.to(device))

    @classmethod
    def synthetic(
        cls, vocab: int, rank: int, seed: int = 0, device: torch.device | str = "cpu", w1_std: float = 1.0, w2_std: float = 0.05
    ) -> MarkovHead:
        """W1 ~ N(0, w1_std), W2 ~ N(0, w2_std), drawn on the CPU so that every machine sees the same weights."""
        generator = torch.Generator().manual_seed(seed)
        w1, w2 = (torch.randn(vocab, rank, generator=generator).mul_(std).bfloat16() for std in (w1_std, w2_std))
        return cls(w1, w2).to(device)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> MarkovHead:
        """The head of a checkpoint (other tensors of the drafter are ignored).

        Raises:
            ValueError: a tensor of the head is missing, or the head has tensors that the vanilla Markov head has not.
        """
        names = {name for name in tensors if name.startswith("markov_head.")}
        missing, unknown = {W1_NAME, W2_NAME} - names, names - {W1_NAME, W2_NAME}
        if missing:
            raise ValueError(
                f"the checkpoint lacks {', '.join(sorted(missing))}; its serial head has: {', '.join(sorted(names)) or 'nothing'}."
            )
        if unknown:
            raise ValueError(
                f"not a vanilla Markov head: the checkpoint also has {', '.join(sorted(unknown))}, and only kind 'markov' is known."
            )
        return cls(tensors[W1_NAME], tensors[W2_NAME])

    def step_logits(self, previous: Tensor, base: Tensor, rounding: Rounding) -> Tensor:
        """Corrected logits [batch, vocab] fp32, holding exactly the rounded values.

        previous: [batch] int64 in [0, target vocab); base: [batch, vocab] bf16, fp16 or fp32. Under INT8 the bias is the
        integer rule of `kernels.quantize`; else it is the fp32 nearest to the true sum W2 u (summed in fp64), which
        every fp32 summation order approximates.
        """
        latent = functional.embedding(previous, self.w1)
        bias = int8_bias(self.int8, two_planes(latent)) if rounding is Rounding.INT8 else _products(latent, self.w2).float()
        return corrected(base, bias, rounding)

    def step_logits_fp64(self, previous: Tensor, base: Tensor, *, int8: bool = False) -> Tensor:
        """A second opinion [batch, vocab] fp64: no rounding at all; with `int8` the weights and the latent are the dequantized ones."""
        latent = functional.embedding(previous, self.w1)
        if int8:
            return base.double() + _products(two_planes(latent).dequantized(), self.int8.dequantized())
        return base.double() + _products(latent, self.w2)

    def step_interval(self, previous: Tensor, base: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
        """The lowest and highest logits [batch, vocab] fp32 that fp32 summation in any order can give under `rounding`.

        Derivation in `kernels.agreement`. INT8 has one answer, so both ends are the oracle's logits.
        """
        if rounding is Rounding.INT8:
            logits = self.step_logits(previous, base, rounding)
            return logits, logits
        latent = functional.embedding(previous, self.w1)
        bias, size = _products(latent, self.w2), _products(latent.abs(), self.w2.abs())
        if rounding is not Rounding.TWICE:  # the base may be the first addend of the sum
            size = size + base.double().abs()
        slack = torch.where(size.isfinite(), size * ((self.rank + 2) * 2.0**-23), 0.0)
        return corrected(base, (bias - slack).float(), rounding), corrected(base, (bias + slack).float(), rounding)


def _products(latent: Tensor, w2: Tensor) -> Tensor:
    """[batch, rank] x [vocab, rank] -> [batch, vocab] fp64, a chunk of rows at a time."""
    latent = latent.double()
    return torch.cat([latent @ rows.double().T for rows in w2.split(_CHUNK_ROWS)], dim=1)
