"""Drawing a token from softmax(logits / T): the same tokens as the kernels, bit for bit, on CPU and GPU.

GUMBEL: the row with the largest logit / T + Gumbel; exact up to fp32 rounding. GROUPS: 64 rows are four groups of 16 (`group_row`); the
group with the largest log-sum-exp + Gumbel wins, and inverse CDF picks the row inside. So a group needs two words and no logarithm a row.
A row's weight costs one fma, one addition and one power of two, whose exponent is rounded to units of 2^-12 (the kernels are paid by the
instruction): as a share of its group it is exact up to 1.8e-4, a twentieth of what rounding a logit between 1 and 2 to bf16 does to it at
T = 1. A weight below 2^-126 of the largest is 0. HASH and UNIFORM are rivals' rules, the same as theirs up to rounding: `kernels.agreement`
allows what lies within `murmur.score_slack` and `CDF_SLACK`.

Corner cases. T <= 0 or NaN is greedy, any other T counts within [1e-5, 1e4]. NaN and -inf logits are never drawn; among several +inf
GUMBEL takes the first, GROUPS draws one of each group that has any and takes the first of these. In a group whose largest logit / T is
about 7.3e5 away from 0 or more (`is_far`), GROUPS gives all weight to the rows that equal it: two bf16 logits that differ do so by 2^12
exponents there. A row in which every score is -inf gives token 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels import murmur
from kernels.noise import (
    BLOCK_ROWS,
    GROUP_ROWS,
    GROUPS_PER_WORDS,
    ROWS_PER_WORDS,
    Stream,
    exp2_units,
    exponential,
    f32,
    fma,
    fma_down,
    gumbel,
    log_positive,
    noise_words,
    uniform,
)
from kernels.walk import NoiseRule

_COLDEST, _HOTTEST = f32(1e-5), 1e4
_LOG2_E = f32(1.44269504)  # exponents of 2 for one of e
_WEIGHT_SHIFT = 3072.0  # a sum with it is rounded to units of 2^-12
_FAR = 2.0**20  # exponents of 2
CDF_SLACK = (
    2.0**-15
)  # of the whole: fp32 weights to 2^-21 or, 20 exponents below the top, 2^-18 of themselves; sums of a few hundred blocks
_CHUNK_ELEMENTS = 1 << 18  # bounds the scratch: 2 MiB of fp64 a temporary, which a CPU's caches hold
_GPU_CHUNKS = 64  # times that on a GPU, where a chunk costs a thousand launches, whatever its size


@dataclass(frozen=True)
class Draws:
    """Which noise a batch of requests meets: everything but the logits. Requests keep their slots when only some of them are drawn.

    slot: [batch] int64 place in the launched batch; temperature: [batch] fp32; inverse: [batch] fp32 1 / T; seed: [batch] int64
    """

    slot: Tensor
    temperature: Tensor
    inverse: Tensor
    seed: Tensor
    step: int
    round: int

    @classmethod
    def of(cls, temperature: Tensor, seed: Tensor, step: int, round: int) -> Draws:
        """The noise of a whole batch, [batch] fp32 temperatures and [batch] int64 seeds."""
        slot = torch.arange(len(seed), device=seed.device)
        return cls(slot, temperature, inverse_temperature(temperature), seed, step, round)

    def rows(self, at: Tensor) -> Draws:
        return Draws(self.slot[at], self.temperature[at], self.inverse[at], self.seed[at], self.step, self.round)

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
    if not len(hot):  # noise for no row takes as many operations as noise for one
        return tokens
    elements = _CHUNK_ELEMENTS * (_GPU_CHUNKS if logits.is_cuda else 1)
    for rows in hot.split(max(1, elements // logits.shape[1])):
        tokens[rows] = _RULES[rule](logits[rows], draws.rows(rows))
    return tokens


def gumbel_scores(logits: Tensor, draws: Draws, noise: Tensor | None = None) -> Tensor:
    """[batch, vocab] fp32 logit / T + Gumbel, monotone in the logit; NaN logits score -inf. noise: `gumbel_noise`, where that is at hand."""
    noise = gumbel_noise(logits.shape[1], draws) if noise is None else noise
    return without_nan(fma(logits, draws.inverse[:, None], noise))


def gumbel_noise(vocab: int, draws: Draws) -> Tensor:
    """[batch, vocab] fp32, one Gumbel a row."""
    return gumbel(draws.words(-(-vocab // ROWS_PER_WORDS), Stream.DRAFT_ROWS).flatten(1)[:, :vocab])


def hashed_scores(logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """[batch, vocab] fp32 logit / T + noise of `kernels.murmur`, monotone in the logit, and how far it may be off; NaN logits score -inf."""
    noise = murmur.row_noise(draws.seed, murmur.position_of(draws.round, draws.step), logits.shape[1])
    scores = without_nan(logits / draws.temperature[:, None] + noise)
    return scores, murmur.score_slack(scores, noise)


def request_uniform(draws: Draws) -> Tensor:
    """[batch] fp32 in (0, 1]: the one word of UNIFORM, told from others of its position by the step."""
    words = murmur.hashed_words(
        draws.seed, murmur.position_of(draws.round, draws.step), torch.tensor([draws.step], device=draws.seed.device)
    )
    return murmur.uniform(words)[:, 0]


def row_weights(logits: Tensor, top: Tensor, draws: Draws) -> Tensor:
    """[batch, vocab] fp64 exp((logit - top) / T), top: [batch]; NaN and -inf have none, +inf has 1, beside which nothing counts."""
    apart = (without_nan(logits).double() - top.double()[:, None]) / draws.temperature.double()[:, None]
    return torch.where(
        (logits == top[:, None]) & (top > -torch.inf)[:, None], 1.0, apart.nan_to_num(nan=-torch.inf, neginf=-torch.inf).exp()
    )


def without_nan(logits: Tensor) -> Tensor:
    """NaN becomes -inf."""
    return logits.masked_fill(logits.isnan(), -torch.inf)


def _draw_by_rows(logits: Tensor, draws: Draws) -> Tensor:
    return gumbel_scores(logits, draws).argmax(dim=1)


def _draw_by_hash(logits: Tensor, draws: Draws) -> Tensor:
    return hashed_scores(logits, draws)[0].argmax(dim=1)


def _draw_by_uniform(logits: Tensor, draws: Draws) -> Tensor:
    running = row_weights(logits, without_nan(logits).amax(dim=1), draws).cumsum(dim=1)
    beyond = running > request_uniform(draws).double()[:, None] * running[:, -1:]
    return torch.where(beyond.any(dim=1), beyond.long().argmax(dim=1), running.argmax(dim=1))


def _draw_by_groups(logits: Tensor, draws: Draws) -> Tensor:
    members = grouped(functional.pad(logits, (0, -logits.shape[1] % BLOCK_ROWS), value=-torch.inf))
    top = without_nan(members).amax(dim=2)
    scale = draws.inverse[:, None] * _LOG2_E
    shift = group_shift(top, scale)
    running = running_sums(rare_weight(members, top[..., None], scale[..., None], shift[..., None]))
    streams = (Stream.DRAFT_GROUPS, Stream.DRAFT_PLACES)
    words, places = (draws.words(top.shape[1] // GROUPS_PER_WORDS, stream).flatten(1) for stream in streams)
    score = group_score(top, running[..., -1], draws.inverse[:, None], words)
    best = score.amax(dim=1, keepdim=True)
    # Of groups with the same score, +inf above all, the one with the lowest drawn row wins.
    at, group = (score == best).nonzero(as_tuple=True)
    threshold = uniform(places[at, group]) * running[at, group, -1]
    place = (running[at, group] > threshold[:, None]).long().argmax(dim=1)
    tokens = torch.full((len(logits),), logits.shape[1], device=logits.device)
    tokens.scatter_reduce_(0, at, group_row(group, place), "amin")
    return tokens.masked_fill(best[:, 0] == -torch.inf, 0)


def group_shift(top: Tensor, scale: Tensor) -> Tensor:
    """GROUPS: what the rows of a group add to their scaled logits, rounded down: no exponent is above 0. top: its largest logit that is not NaN; scale: log2(e) / T."""
    return fma_down(torch.where(top > -torch.inf, -top, 0.0), scale, _WEIGHT_SHIFT)


def row_weight(logit: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """GROUPS: the weight of a row, 2^((logit - top) scale), unless its group is far. NaN for a NaN."""
    return exp2_units(fma(logit, scale, shift) - _WEIGHT_SHIFT)


def is_far(shift: Tensor) -> Tensor:
    """GROUPS: whether `top` is so far from 0, in exponents, that the shift has lost the logits' last digits, or is infinite."""
    return ~(shift.abs() < _FAR)


def rare_weight(logit: Tensor, top: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """GROUPS: the weight of a row in any group. NaN has none; where the group is far, rows that equal `top` have weight 1, others none."""
    near = row_weight(logit, scale, shift).masked_fill(logit.isnan(), 0.0)
    return torch.where(is_far(shift), (logit == top).float(), near)


def group_score(top: Tensor, total: Tensor, inverse: Tensor, word: Tensor) -> Tensor:
    """GROUPS: top / T + log(total) + Gumbel of a group whose weights sum up to `total`; -inf where top is."""
    race = exponential(word) * (torch.ones_like(total) / total)
    return fma(top, inverse, -log_positive(race)).masked_fill(top == -torch.inf, -torch.inf)


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


_RULES: dict[NoiseRule, Callable[[Tensor, Draws], Tensor]] = {
    NoiseRule.GUMBEL: _draw_by_rows,
    NoiseRule.GROUPS: _draw_by_groups,
    NoiseRule.HASH: _draw_by_hash,
    NoiseRule.UNIFORM: _draw_by_uniform,
}
