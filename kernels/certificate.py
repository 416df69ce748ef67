"""Steps of a greedy walk that a few rows of W2 prove: the certificate, and a walk that is exact because it falls back where there is none.

Theorem. Let a step have base logits b_i and biases v_i (W2 u, in any order of fp32 sums), and corrected logits s_i = f(b_i, v_i), where f is one of
the roundings of `kernels.rounding`. Let C be some rows, with t >= b_i and v >= v_i for every row i outside C. If the largest s_i of C is above
f(t, v), then the lowest row of C that has it is the token of the whole vocabulary.

Proof. Rounding to bf16 or fp32 and adding are monotone, and so is f in both arguments: s_i = f(b_i, v_i) <= f(t, v) < max over C of s for every i
outside C. So no such row reaches the maximum, also not with a lower index. A maximum that equals f(t, v) proves nothing: the row outside that has
it may be the lower one. A row with a NaN among its base logits is not proved, since NaN is in no order, nor one whose best is not finite.

C is here the rows with the largest base logits of the step, t the next one's; and the rows with the largest biases after the previous token, v the
next one's. Those are known before any walk: `bias_lists` makes them once for a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import ReferenceHead, check_inputs, greedy, previous_tokens
from kernels.rounding import corrected
from kernels.walk import NanRule, Rounding, WalkInputs

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
    """Rows of a step with the largest base logits: ids [batch, count] int64, and `bound` [batch] fp32, the largest of the others; -inf without any."""

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


def candidates(base: Tensor, count: int) -> Candidates:
    """base: [batch, vocab]. Which of equal logits are taken is the top-k's affair; a NaN is larger than any."""
    return Candidates(*_top(base.float(), count))


def prove(
    head: ReferenceHead, previous: Tensor, base: Tensor, found: Candidates, lists: BiasLists, rounding: Rounding
) -> tuple[Tensor, Tensor]:
    """The best of the rows named, [batch] int64, and whether that is the step's token, [batch] bool.

    previous: [batch] int64; base: [batch, vocab]; rounding: TWICE, ONCE or NEVER
    """
    rows = torch.cat([found.ids, lists.ids[previous]], dim=1)
    named = torch.zeros(base.shape, dtype=torch.bool, device=base.device).scatter_(1, rows, True)
    logits = head.step_logits(previous, base, rounding).masked_fill(~named, -torch.inf)
    token = greedy(logits, NanRule.LOSES)
    best = logits.gather(1, token[:, None])[:, 0]
    bound = corrected(found.bound[:, None], lists.bound[previous][:, None], rounding)[:, 0]
    return token, (best > bound) & best.isfinite() & ~base.isnan().any(dim=1)


def certified_walk(head: ReferenceHead, inputs: WalkInputs, count: int, lists: BiasLists, rounding: Rounding) -> CertifiedWalk:
    """A greedy walk over `count` candidates a step and the lists; a step that they do not prove is one over the whole vocabulary.

    Raises:
        ValueError: another vocabulary than the head's, or a row with temperature > 0.
    """
    check_inputs(head, inputs)
    tokens = torch.empty(inputs.batch, inputs.steps, dtype=torch.int64, device=head.device)
    proved, listed = (torch.zeros_like(tokens, dtype=torch.bool) for _ in range(2))
    for step in range(inputs.steps):
        previous, base = previous_tokens(inputs, tokens, step), inputs.base_logits[:, step]
        found = candidates(base, count)
        best, proved[:, step] = prove(head, previous, base, found, lists, rounding)
        whole = greedy(head.step_logits(previous, base, rounding), NanRule.LOSES)
        tokens[:, step] = torch.where(proved[:, step], best, whole)
        listed[:, step] = proved[:, step] & ~(found.ids == best[:, None]).any(dim=1)
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
