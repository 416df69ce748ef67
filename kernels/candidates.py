"""What a walk over candidates is exact for: a head whose step sees the largest base logits and the largest biases, and -inf elsewhere.

Candidates of a step are the `base` largest base logits and the `bias` largest biases W2 u that follow the previous token. Which of equal
base logits are among them is the top-k's affair, and which of almost equal biases that of the order of fp32 sums. So a step knows who is
surely a candidate and who may be one; `kernels.agreement` holds a token against the former and allows the latter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kernels.reference import ReferenceHead
from kernels.walk import Rounding


@dataclass(frozen=True)
class CandidateHead:
    """`head`, restricted to its candidates. base, bias: how many by base logit and by bias; as many as the vocabulary mean all."""

    head: ReferenceHead
    base: int
    bias: int
    kind: ClassVar[str] = "candidates"

    @property
    def vocab(self) -> int:
        return self.head.vocab

    @property
    def rank(self) -> int:
        return self.head.rank

    @property
    def device(self) -> torch.device:
        return self.head.device

    def step_logits(self, previous: Tensor, base: Tensor, rounding: Rounding) -> Tensor:
        """[batch, vocab] fp32: the head's logits of one right choice of candidates, -inf elsewhere."""
        bias = self.head.step_logits(previous, torch.zeros_like(base), Rounding.NEVER)
        members = _top(base, self.base) | _top(bias, self.bias)
        return self.head.step_logits(previous, base, rounding).masked_fill(~members, -torch.inf)

    def step_interval(self, previous: Tensor, base: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
        """The lowest logits are -inf but for sure candidates, the highest but for possible ones."""
        by_base = _members(base, base, self.base)
        by_bias = _members(*self.head.step_interval(previous, torch.zeros_like(base), Rounding.NEVER), self.bias)
        lowest, highest = self.head.step_interval(previous, base, rounding)
        sure, possible = (of_base | of_bias for of_base, of_bias in zip(by_base, by_bias, strict=True))
        return lowest.masked_fill(~sure, -torch.inf), highest.masked_fill(~possible, -torch.inf)


def _top(values: Tensor, count: int) -> Tensor:
    """[batch, vocab] bool: `count` of the largest values of each row; a NaN is larger than any, as torch.topk has it."""
    index = values.topk(min(count, values.shape[1]), dim=1).indices
    return torch.zeros_like(values, dtype=torch.bool).scatter_(1, index, True)


def _members(lowest: Tensor, highest: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[batch, vocab] bool: who is surely, and who may be, among the `count` largest of values known to lie between `lowest` and `highest`.

    Surely: with itself no more than `count` can reach it. May be: fewer than `count` lie above it in any case.
    """
    if count >= lowest.shape[1]:
        everyone = torch.ones_like(lowest, dtype=torch.bool)
        return everyone, everyone
    lowest, highest = (end.masked_fill(end.isnan(), torch.inf) for end in (lowest, highest))
    rival, bar = highest.topk(count + 1, dim=1).values[:, -1:], lowest.topk(count, dim=1).values[:, -1:]
    return lowest > rival, highest >= bar
