"""Steps of a walk that a few rows of W2 prove: the certificate, and a walk that is exact because it falls back where there is none.

Theorem. Let a step have base logits b_i and biases v_i (W2 u, in any order of fp32 sums), and corrected logits s_i = f(b_i, v_i), where f is one of
the roundings of `kernels.rounding`. Let C be some rows, with t >= b_i and v >= v_i for every row i outside C. If the largest s_i of C is above
f(t, v), then the lowest row of C that has it is the token of the whole vocabulary.

Proof. Rounding to bf16 or fp32 and adding are monotone, and so is f in both arguments: s_i = f(b_i, v_i) <= f(t, v) < max over C of s for every i
outside C. So no such row reaches the maximum, also not with a lower index. A maximum that equals f(t, v) proves nothing: the row outside that has
it may be the lower one. A row with a NaN among its base logits is not proved, since NaN is in no order, nor one whose best is not finite.

With noise (rule GUMBEL) the token is the row with the largest score s_i / T + g_i. Let n_i = b_i / T + g_i, t >= n_i outside C, and let no base logit be
larger than B in size. Then s_i <= b_i + v + e with e what rounding b_i + v_i may add, so the score of a row outside is at most t + (v + e) / T; the slack of
the fp32 operations on top. The noise stays apart from the bias because it belongs to the row, not to the previous token. Rounding to bf16 comes before
the noise, hence e = 2^-8 (B + |v|), and 2^-8 |v| more where the bias is rounded too: at T = 1 with logits up to 10 and biases up to 5 that is 0.08.

C is here the rows with the largest base logits of the step, t the next one's; and the rows with the largest biases after the previous token, v the
next one's. Those are known before any walk: `bias_lists` makes them once for a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import ReferenceHead, check_inputs, chosen, greedy, previous_tokens
from kernels.rounding import corrected
from kernels.sampling import Draws, gumbel_scores, is_sampled
from kernels.walk import NanRule, NoiseRule, Rounding, WalkInputs

_CHUNK_TOKENS = 64  # previous tokens at once: 78 MB of fp64 biases at V = 151,936


@dataclass(frozen=True)
class BiasLists:
    """What a previous token's bias can lift.

    ids:   [vocab, width] int64, its rows with the largest biases
    bound: [vocab] fp32, which no other row's bias exceeds, in any order of fp32 sums; -inf where there is no other row
    """

    ids: Tensor
    bound: Tensor


@dataclass(frozen=True)
class Candidates:
    """Rows of a step with the largest base logits, or with noise the largest base / T + noise: ids [batch, count] int64, and `bound` [batch] fp32, the
    largest of the others; -inf without any."""

    ids: Tensor
    bound: Tensor


@dataclass(frozen=True)
class CertifiedWalk:
    """tokens: [batch, steps] int64, those of the walk; proved: [batch, steps] bool, by the rows named; listed: [batch, steps] bool, proved tokens that
    are not among the candidates."""

    tokens: Tensor
    proved: Tensor
    listed: Tensor


def bias_lists(head: ReferenceHead, width: int) -> BiasLists:
    """The `width` largest biases after every token.

    Raises:
        ValueError: no such width.
    """
    if not 1 <= width <= head.vocab:
        raise ValueError(f"a list has 1 to {head.vocab} rows; got width {width}.")
    parts = [_lists(head, tokens, width) for tokens in torch.arange(head.vocab, device=head.device).split(_CHUNK_TOKENS)]
    return BiasLists(*(torch.cat(column) for column in zip(*parts, strict=True)))


def candidates(base: Tensor, count: int, draws: Draws | None = None) -> Candidates:
    """base: [batch, vocab]; draws: the noise of the rows, which are all sampled. Which of equal logits are taken is the top-k's affair."""
    return Candidates(*_top(base.float() if draws is None else gumbel_scores(base.float(), draws), count))


def prove(
    head: ReferenceHead,
    previous: Tensor,
    base: Tensor,
    found: Candidates,
    lists: BiasLists,
    rounding: Rounding,
    draws: Draws | None = None,
) -> tuple[Tensor, Tensor]:
    """The best of the rows named, [batch] int64, and whether that is the step's token, [batch] bool.

    previous: [batch] int64; base: [batch, vocab]; rounding: TWICE, ONCE or NEVER; draws: as `candidates` had them
    """
    rows = torch.cat([found.ids, lists.ids[previous]], dim=1)
    named = torch.zeros(base.shape, dtype=torch.bool, device=base.device).scatter_(1, rows, True)
    logits = head.step_logits(previous, base, rounding)
    scores = (logits if draws is None else gumbel_scores(logits, draws)).masked_fill(~named, -torch.inf)
    token = greedy(scores, NanRule.LOSES)
    best = scores.gather(1, token[:, None])[:, 0]
    bias = lists.bound[previous]
    if draws is None:
        bound = corrected(found.bound[:, None], bias[:, None], rounding)[:, 0]
    else:
        bound = _noisy_bound(found.bound, bias, base, rounding, draws)
    return token, (best > bound) & best.isfinite() & ~base.isnan().any(dim=1)


def _noisy_bound(noised: Tensor, bias: Tensor, base: Tensor, rounding: Rounding, draws: Draws) -> Tensor:
    """[batch] fp64: no score outside exceeds it. noised: the largest base / T + noise there; bias: the largest bias."""
    t, v, inverse = noised.double(), bias.double(), draws.inverse.double()
    largest = base.double().abs().nan_to_num(posinf=0.0).amax(dim=1)
    of_base, of_bias = {Rounding.TWICE: (1, 2), Rounding.ONCE: (1, 1), Rounding.NEVER: (0, 0)}[
        rounding
    ]  # roundings to bf16 that each meets
    slack = 2.0**-8 * (1 + 2.0**-7) * (of_base * largest + of_bias * v.abs()) + 2.0**-23 * (largest + v.abs())
    bound = t + (v + slack) * inverse
    bound = bound + 2.0**-22 * (t.abs() + bound.abs())  # of the fused multiply-adds that made t and will make the score
    return torch.where(t.isneginf() | v.isneginf(), -torch.inf, bound)


def certified_walk(
    head: ReferenceHead, inputs: WalkInputs, count: int, lists: BiasLists, rounding: Rounding, round: int = 0
) -> CertifiedWalk:
    """A walk over `count` candidates a step and the lists, drawn by rule GUMBEL where a row has temperature > 0; a step that they do not prove is one over
    the whole vocabulary. round: the launch whose noise is meant.

    Raises:
        ValueError: another vocabulary than the head's.
    """
    check_inputs(head, inputs, NoiseRule.GUMBEL)
    tokens = torch.empty(inputs.batch, inputs.steps, dtype=torch.int64, device=head.device)
    proved, listed = (torch.zeros_like(tokens, dtype=torch.bool) for _ in range(2))
    for step in range(inputs.steps):
        previous, base = previous_tokens(inputs, tokens, step), inputs.base_logits[:, step]
        whole = chosen(head.step_logits(previous, base, rounding), inputs, step, NanRule.LOSES, NoiseRule.GUMBEL, round)
        draws, hot = Draws.of(inputs.temperature, inputs.seed, step, round), is_sampled(inputs.temperature)
        for rows, noise in ((~hot, None), (hot, draws)):
            at = rows.nonzero()[:, 0]
            own = noise.rows(at) if noise else None
            found = candidates(base[at], count, own)
            best, proved[at, step] = prove(head, previous[at], base[at], found, lists, rounding, own)
            listed[at, step] = proved[at, step] & ~(found.ids == best[:, None]).any(dim=1)
            tokens[at, step] = torch.where(proved[at, step], best, whole[at])
    return CertifiedWalk(tokens, proved, listed)


def _lists(head: ReferenceHead, tokens: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """By the highest bias that fp32 sums may give, which the exact one differs little from."""
    nothing = torch.zeros(len(tokens), head.vocab, device=head.device)
    return _top(head.step_interval(tokens, nothing, Rounding.NEVER)[1], width)


def _top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Places of the `count` largest of each row, and the largest of the others."""
    most = values.topk(min(count + 1, values.shape[1]), dim=1)
    if count >= values.shape[1]:
        return most.indices, values.new_full(values.shape[:1], -torch.inf)
    return most.indices[:, :count], most.values[:, count]
