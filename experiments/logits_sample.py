"""Base logits without their tail: the largest of each step exactly, and the moments that a seeded tail is drawn from.

A trained drafter's logits at V = 151,936 take 4.9 MB a round of 16 steps; with 4,096 of each step kept it is 0.33 MB. What the walk decides happens
among the largest. The rest is read all the same, so that timing needs values there that could be real: a normal distribution with the mean and
the spread of the step's whole row, cut off below the smallest value that was kept. A token of the tail wins only if its bias lifts it above all that
were kept; `experiments.record_rounds` counts the steps where that changes the token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

ID_BYTES = 3  # up to 16,777,215, little-endian


@dataclass(frozen=True, eq=False)
class LogitsSample:
    """Some rounds' base logits, sampled.

    ids:     [n, steps, top, 3] uint8, the kept tokens
    values:  [n, steps, top] bf16, their logits, the largest first
    moments: [n, steps, 2] fp32, mean and standard deviation of all logits of the step
    """

    ids: Tensor
    values: Tensor
    moments: Tensor


def sampled(base_logits: Tensor, top: int) -> LogitsSample:
    """The `top` largest of base logits [n, steps, vocab] bf16.

    Raises:
        ValueError: the vocabulary has fewer.
    """
    if not 1 <= top <= base_logits.shape[-1]:
        raise ValueError(f"a sample keeps 1 to {base_logits.shape[-1]} logits of a step; got {top}")
    kept = base_logits.topk(top)
    deviation, mean = torch.std_mean(base_logits.float(), dim=-1, correction=0)
    return LogitsSample(packed(kept.indices), kept.values, torch.stack([mean, deviation], dim=-1))


def filled(sample: LogitsSample, vocab: int, first: int = 0) -> Tensor:
    """[n, steps, vocab] bf16. Round `first` + i draws its tail with that number as the seed.

    Raises:
        ValueError: an id outside [0, vocab).
    """
    ids = unpacked(sample.ids)
    if int(ids.max()) >= vocab:
        raise ValueError(f"a kept token is {int(ids.max())}, and there are {vocab}")
    tails = [
        _tail(own, lowest, vocab, first + place)
        for place, (own, lowest) in enumerate(zip(sample.moments, sample.values[..., -1], strict=True))
    ]
    return torch.stack(tails).scatter_(2, ids, sample.values)


def packed(ids: Tensor) -> Tensor:
    """[.., n] int64 -> [.., n, 3] uint8."""
    return ids.int().contiguous().view(torch.uint8).unflatten(-1, (-1, 4))[..., :ID_BYTES].contiguous()


def unpacked(ids: Tensor) -> Tensor:
    """[.., n, 3] uint8 -> [.., n] int64."""
    return functional.pad(ids, (0, 1)).view(torch.int32)[..., 0].long()


def _tail(moments: Tensor, lowest: Tensor, vocab: int, seed: int) -> Tensor:
    """[steps, vocab] bf16 below `lowest` [steps]: by inverting the distribution function, for no draw may be rejected."""
    mean, deviation, bound = (each.double()[:, None] for each in (*moments.unbind(dim=1), lowest))
    deviation = deviation.clamp(min=1e-9)  # equal logits have none
    share = torch.special.ndtr((bound - mean) / deviation)
    coins = torch.rand(len(lowest), vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    drawn = (mean + deviation * torch.special.ndtri(share * (1 - coins))).bfloat16()
    return drawn.clamp(max=torch.nextafter(lowest, torch.tensor(-torch.inf, dtype=lowest.dtype))[:, None])  # bf16 rounds up too
