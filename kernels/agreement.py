"""Are these tokens right? Bit equality where sums are exact, near ties where fp32 sums may be taken in another order.

The check is teacher-forced: step k of the oracle follows the *given* token k - 1. So one wrong token is one mismatch,
and "every token is the oracle's argmax" is the same as equality with the free-running oracle (by induction over steps).

The bound. A kernel adds r products w_i u_i, exact in fp32, in an order of its own. Each addition errs by at most
2^-23 of a partial sum (rounded or truncated, as tensor cores do), and partial sums are at most S = sum |w_i| |u_i|, so its bias lies
within e = (r + 2) 2^-23 S of the true sum; the 2 covers the oracle's own fp32 rounding. For ONCE and NEVER the base L
may be the first addend and the result is one more addition: S grows by |L|. bf16 rounding and addition are monotone, so the kernel's logit lies
between the images of (bias - e) and (bias + e): for TWICE rho(L + rho(b -+ e)), for ONCE rho(L + b -+ e), for NEVER
L + b -+ e. Nothing wider is allowed: an ulp of bf16 is given only to tokens whose interval crosses a rounding boundary.

A token t can be that kernel's argmax only if highest(t) > lowest(v) for all v < t and highest(t) >= lowest(v) for all
v > t. A token that is not the oracle's and passes this is a near tie; any other is a mismatch. INT8 has e = 0: bits.

Rows with temperature > 0 need the noise rule and the round of the launch. GUMBEL adds noise to logit / T, monotone in the logit, so the
bound carries over from logits to scores, and so it does for HASH, whose noise is known to `murmur.score_slack`. UNIFORM's number must lie in the
token's share of the sum of weights for some logits within the bound, give or take CDF_SLACK. GROUPS grants no near ties; of LIBRARY only the support is known: a drawn token has a logit
above -inf, and is 0 where no logit is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import ReferenceHead, check_inputs, chosen, greedy, previous_tokens
from kernels.sampling import CDF_SLACK, Draws, gumbel_scores, hashed_scores, is_sampled, request_uniform, row_weights
from kernels.walk import NanRule, NoiseRule, Rounding, WalkInputs

_BY_SCORE = (NoiseRule.GUMBEL, NoiseRule.HASH)  # a row's score decides, and rises with its logit


@dataclass(frozen=True)
class Agreement:
    """What a check found.

    tokens:     how many were checked
    mismatches: tokens that no fp32 summation order explains, or that lie outside [0, vocab)
    near_ties:  tokens that differ from the oracle's within the bound
    worst_gap:  the largest distance, in logits, from the oracle's maximum to the oracle's logit of a checked greedy token
    reason:     the first mismatch in words; empty if there is none
    astray:     tokens of an approximate walk that the exact one, after the same tokens, would not choose; 0 where nobody asked
    """

    tokens: int
    mismatches: int
    near_ties: int
    worst_gap: float
    reason: str = ""
    astray: int = 0

    @property
    def ok(self) -> bool:
        return self.mismatches == 0


def check(
    tokens: Tensor,
    head: ReferenceHead,
    inputs: WalkInputs,
    rounding: Rounding,
    nan_rule: NanRule = NanRule.LOSES,
    exact: bool = False,
    noise: NoiseRule | None = None,
    round: int = 0,
) -> Agreement:
    """Compare `tokens` [batch, steps] int64 of a backend with the oracle; `exact` forbids near ties (INT8 always does).

    noise, round: how rows with temperature > 0 were drawn (`SampledWalk.noise`, and `SampledWalk.round()` before the launch).

    Raises:
        ValueError: tokens of another shape or type, a row with temperature > 0 without `noise`, or a rounding without an oracle.
    """
    check_inputs(head, inputs, noise)
    if tokens.shape != (inputs.batch, inputs.steps) or tokens.dtype != torch.int64:
        raise ValueError(f"tokens must be [{inputs.batch}, {inputs.steps}] int64; got {list(tokens.shape)} {tokens.dtype}.")
    exact = exact or rounding is Rounding.INT8
    oracle = _Oracle(head, inputs, rounding, nan_rule, noise, round)
    mismatches, near_ties, worst_gap, reason = 0, 0, 0.0, ""
    for step in range(inputs.steps):
        token, previous = tokens[:, step], previous_tokens(inputs, tokens, step)
        logits = head.step_logits(previous, inputs.base_logits[:, step], rounding)
        expected = oracle.expected(logits, step, token)
        worst_gap = max(worst_gap, oracle.gap(logits, expected, token))
        differs = token != expected
        if not bool(differs.any()):
            continue
        near = torch.zeros_like(differs) if exact else oracle.near(previous, step, token)
        wrong = differs & ~near
        near_ties += int((differs & near).sum())
        if not reason and bool(wrong.any()):
            reason = _describe(wrong, step, token, expected, logits, rounding)
        mismatches += int(wrong.sum())
    return Agreement(tokens.numel(), mismatches, near_ties, worst_gap, reason)


@dataclass(frozen=True)
class _Oracle:
    """What one check holds tokens against."""

    head: ReferenceHead
    inputs: WalkInputs
    rounding: Rounding
    nan_rule: NanRule
    noise: NoiseRule | None
    round: int

    def expected(self, logits: Tensor, step: int, token: Tensor) -> Tensor:
        """[batch] the oracle's tokens; of a row drawn with noise that no host repeats `token` itself, if it can be drawn."""
        if self.noise is not NoiseRule.LIBRARY:
            return chosen(logits, self.inputs, step, self.nan_rule, self.noise, self.round)
        inside = (token >= 0) & (token < logits.shape[1])
        drawable = inside & (logits.gather(1, token.clamp(0, logits.shape[1] - 1)[:, None])[:, 0] > -torch.inf)
        return torch.where(is_sampled(self.inputs.temperature) & drawable, token, greedy(logits, self.nan_rule))

    def gap(self, logits: Tensor, expected: Tensor, token: Tensor) -> float:
        inside = token.clamp(0, logits.shape[1] - 1)
        gap = (logits.gather(1, expected[:, None]) - logits.gather(1, inside[:, None]))[:, 0]
        return float(gap.masked_fill(gap.isnan() | is_sampled(self.inputs.temperature), 0.0).max())

    def near(self, previous: Tensor, step: int, token: Tensor) -> Tensor:
        """[batch] whether `token` can win in a kernel whose logits lie in the interval."""
        lowest, highest = self.head.step_interval(previous, self.inputs.base_logits[:, step], self.rounding)
        nan = lowest.isnan() | highest.isnan()
        least, most = (end.masked_fill(nan, -torch.inf) for end in (lowest, highest))
        lowest, highest = self._scores(least, step, -1), self._scores(most, step, 1)
        inside = (token >= 0) & (token < lowest.shape[1])
        index = token.clamp(0, lowest.shape[1] - 1)[:, None]
        top = highest.gather(1, index)
        before = torch.arange(lowest.shape[1], device=token.device)[None, :] < index
        itself = torch.zeros_like(before).scatter_(1, index, True)
        possible = torch.where(before, top > lowest, top >= lowest) | itself
        near = possible.all(dim=1)
        sampled = is_sampled(self.inputs.temperature)
        if self.noise is NoiseRule.UNIFORM:
            near = torch.where(sampled, self._within_cdf(least, most, step, index), near)
        elif self.noise not in _BY_SCORE:
            near = near & ~sampled
        near = near & inside
        return near & (sampled | ~nan.any(dim=1)) if self.nan_rule is NanRule.WINS else near

    def _within_cdf(self, lowest: Tensor, highest: Tensor, step: int, index: Tensor) -> Tensor:
        """[batch] whether logits of the interval can put rule UNIFORM's number into the share of token `index` [batch, 1]."""
        draws = Draws.of(self.inputs.temperature, self.inputs.seed, step, self.round)
        top = highest.amax(dim=1)
        least, most = row_weights(lowest, top, draws), row_weights(highest, top, draws)
        before = torch.arange(lowest.shape[1], device=index.device)[None, :] < index
        own_least, own_most = least.gather(1, index)[:, 0], most.gather(1, index)[:, 0]
        before_least, before_most = (least * before).sum(dim=1), (most * before).sum(dim=1)
        after_least, after_most = least.sum(dim=1) - before_least - own_least, most.sum(dim=1) - before_most - own_most
        start = before_least / (before_least + own_most + after_most)
        end = (before_most + own_most) / (before_most + own_most + after_least)
        u = request_uniform(draws).double()
        return (own_most > 0) & (start - CDF_SLACK <= u) & (u <= end + CDF_SLACK)

    def _scores(self, logits: Tensor, step: int, side: int) -> Tensor:
        """[batch, vocab] what the largest of wins: logits of greedy rows, noisy scores of rows drawn by a rule that scores every row. side:
        -1 or 1, the end of what another platform may make of it."""
        if self.noise not in _BY_SCORE:
            return logits
        draws = Draws.of(self.inputs.temperature, self.inputs.seed, step, self.round)
        if self.noise is NoiseRule.GUMBEL:
            scores = gumbel_scores(logits, draws)
        else:
            scores, slack = hashed_scores(logits, draws)
            scores = scores + side * slack
        return torch.where(is_sampled(self.inputs.temperature)[:, None], scores, logits)


def _describe(wrong: Tensor, step: int, token: Tensor, expected: Tensor, logits: Tensor, rounding: Rounding) -> str:
    row = int(wrong.nonzero()[0])
    got, want, vocab = int(token[row]), int(expected[row]), logits.shape[1]
    if not 0 <= got < vocab:
        return f"request {row} step {step}: token {got} is outside [0, {vocab})."
    return (
        f"request {row} step {step}: token {got} has logit {float(logits[row, got]):g} but the {rounding.value} oracle's "
        f"token {want} has {float(logits[row, want]):g}."
    )


def stray_logits(
    logits: Tensor, tokens: Tensor, head: ReferenceHead, inputs: WalkInputs, rounding: Rounding, rows: Tensor | None = None
) -> int:
    """How many of the corrected logits [batch, steps, vocab] that a backend kept lie outside the bound, given its own tokens.

    A NaN is right only where the oracle has one. rows: [batch] bool, the requests that count (all if None): a persistent walk keeps the
    logits of `kernels.sampling.is_sampled` rows only.
    """
    stray = 0
    for step in range(inputs.steps):
        lowest, highest = head.step_interval(previous_tokens(inputs, tokens, step), inputs.base_logits[:, step], rounding)
        kept = logits[:, step].float()
        right = ((lowest <= kept) & (kept <= highest)) | (kept.isnan() & (lowest.isnan() | highest.isnan()))
        stray += int((~right if rows is None else ~right[rows]).sum())
    return stray
