"""Drawing a token from softmax(logits / T): the same tokens as the kernels, bit for bit, on CPU and GPU.

GUMBEL: the row with the largest logit / T + Gumbel; exact up to fp32 rounding. GROUPS: 64 rows are four groups of 16 (`group_row`); the
group with the largest log-sum-exp + Gumbel wins, and inverse CDF picks the row inside. So a group needs two words and no logarithm a row.
Its weights are exact up to 7e-6 of each (`exp2_weight`): the kernels are paid by the instruction.

Corner cases. T <= 0 or NaN is greedy, any other T counts within [1e-5, 1e4]. NaN and -inf logits are never drawn; among several +inf
GUMBEL takes the first, GROUPS draws one of each group that has any and takes the first of these. A row in which every score is -inf
gives token 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.noise import (
    BLOCK_ROWS,
    GROUP_ROWS,
    GROUPS_PER_WORDS,
    ROWS_PER_WORDS,
    WEIGHT_SPAN,
    Stream,
    exp2_weight,
    exponential,
    f32,
    fma,
    fma_sat,
    gumbel,
    log_positive,
    noise_words,
    uniform,
)
from kernels.walk import NoiseRule

_LARGEST = torch.finfo(torch.float32).max
_COLDEST, _HOTTEST = f32(1e-5), 1e4
_WEIGHT_UNITS = f32(f32(1.44269504) / WEIGHT_SPAN)  # of exponents, for a difference of logits / T
_CHUNK_ELEMENTS = 1 << 18  # bounds the scratch: 2 MiB of fp64 a temporary, which a CPU's caches hold
_GPU_CHUNKS = 64  # times that on a GPU, where a chunk costs a thousand launches, whatever its size


@dataclass(frozen=True)
class Draws:
    """Which noise a batch of requests meets: everything but the logits. Requests keep their slots when only some of them are drawn.

    slot: [batch] int64 place in the launched batch; inverse: [batch] fp32 1 / T; seed: [batch] int64
    """

    slot: Tensor
    inverse: Tensor
    seed: Tensor
    step: int
    round: int

    @classmethod
    def of(cls, temperature: Tensor, seed: Tensor, step: int, round: int) -> Draws:
        """The noise of a whole batch, [batch] fp32 temperatures and [batch] int64 seeds."""
        return cls(torch.arange(len(seed), device=seed.device), inverse_temperature(temperature), seed, step, round)

    def rows(self, at: Tensor) -> Draws:
        return Draws(self.slot[at], self.inverse[at], self.seed[at], self.step, self.round)

    def words(self, count: int, stream: Stream) -> Tensor:
        """[batch, count, 4]"""
        return noise_words(count, self.step, self.slot, self.round, stream, self.seed)


def is_sampled(temperature: Tensor) -> Tensor:
    """[batch] bool: T > 0. All other rows, NaN included, are greedy."""
    return temperature > 0


def inverse_temperature(temperature: Tensor) -> Tensor:
    """[batch] fp32 1 / clamp(T, 1e-5, 1e4), rounded once; 1 for greedy rows."""
    divisor = torch.where(is_sampled(temperature), temperature.clamp(_COLDEST, _HOTTEST), 1.0)
    return torch.ones_like(divisor) / divisor


def draw(logits: Tensor, temperature: Tensor, seed: Tensor, step: int, round: int, rule: NoiseRule) -> Tensor:
    """[batch] int64 tokens of one step; greedy rows get the lowest index of their maximum.

    logits: [batch, vocab] fp32, as a walk rounds them; temperature: [batch] fp32; seed: [batch] int64; a request's slot is its place here.

    Raises:
        ValueError: the rule has no host twin, or the step does not fit a counter.
    """
    if rule not in _RULES:
        raise ValueError(f"noise rule {rule.value!r} cannot be repeated on the host; those that can: {', '.join(_RULES)}.")
    tokens = without_nan(logits).argmax(dim=1)
    draws = Draws.of(temperature, seed, step, round)
    hot = is_sampled(temperature).nonzero()[:, 0]
    elements = _CHUNK_ELEMENTS * (_GPU_CHUNKS if logits.is_cuda else 1)
    for rows in hot.split(max(1, elements // logits.shape[1])):
        tokens[rows] = _RULES[rule](logits[rows], draws.rows(rows))
    return tokens


def gumbel_scores(logits: Tensor, draws: Draws) -> Tensor:
    """[batch, vocab] fp32 logit / T + Gumbel, monotone in the logit; NaN logits score -inf."""
    vocab = logits.shape[1]
    words = draws.words(-(-vocab // ROWS_PER_WORDS), Stream.DRAFT_ROWS).flatten(1)[:, :vocab]
    return without_nan(fma(logits, draws.inverse[:, None], gumbel(words)))


def without_nan(logits: Tensor) -> Tensor:
    """NaN becomes -inf."""
    return logits.masked_fill(logits.isnan(), -torch.inf)


def _draw_by_rows(logits: Tensor, draws: Draws) -> Tensor:
    return gumbel_scores(logits, draws).argmax(dim=1)


def _draw_by_groups(logits: Tensor, draws: Draws) -> Tensor:
    members = grouped(functional.pad(logits, (0, -logits.shape[1] % BLOCK_ROWS), value=-torch.inf))
    groups = members.shape[1]
    top = without_nan(members).amax(dim=2).clamp(max=_LARGEST)
    scale = draws.inverse * _WEIGHT_UNITS
    running = running_sums(exp2_weight(fma_sat(members - top[..., None], scale[:, None, None], 1.0)))
    words = draws.words(groups // GROUPS_PER_WORDS, Stream.DRAFT_GROUPS).unflatten(2, (GROUPS_PER_WORDS, 2)).flatten(1, 2)
    race = exponential(words[..., 0]) * (torch.ones_like(top) / running[..., -1])
    score = fma(top, draws.inverse[:, None], -log_positive(race))  # -inf where top is
    best = score.amax(dim=1, keepdim=True)
    # Of groups with the same score, +inf above all, the one with the lowest drawn row wins.
    at, group = (score == best).nonzero(as_tuple=True)
    threshold = uniform(words[at, group, 1]) * running[at, group, -1]
    place = (running[at, group] > threshold[:, None]).long().argmax(dim=1)
    tokens = torch.full((len(logits),), logits.shape[1], device=logits.device)
    tokens.scatter_reduce_(0, at, group_row(group, place), "amin")
    return tokens.masked_fill(best[:, 0] == -torch.inf, 0)


def grouped(rows: Tensor) -> Tensor:
    """[batch, n * 64] -> [batch, n * 4, 16]: the groups of rule GROUPS, the rows of each in rising order."""
    return rows.unflatten(1, (-1, 2, 4, GROUP_ROWS // 2)).transpose(2, 3).flatten(3, 4).flatten(1, 2)


def group_row(group: Tensor, place: Tensor) -> Tensor:
    """The row at a place of a group: group g of a block holds rows 8 g to 8 g + 7 and 32 rows further 8 more."""
    half = GROUP_ROWS // 2
    return group // 4 * BLOCK_ROWS + place // half * (BLOCK_ROWS // 2) + group % 4 * half + place % half


def running_sums(weights: Tensor) -> Tensor:
    """Along the last axis, one fp32 addition after the other (cumsum would add in fp64)."""
    sums = [weights[..., 0]]
    for column in weights.unbind(-1)[1:]:
        sums.append(sums[-1] + column)
    return torch.stack(sums, dim=-1)


_RULES: dict[NoiseRule, Callable[[Tensor, Draws], Tensor]] = {NoiseRule.GUMBEL: _draw_by_rows, NoiseRule.GROUPS: _draw_by_groups}
