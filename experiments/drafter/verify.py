"""Which drafted tokens the target lets through, and what it says instead: the engines' rejection samplers.

Sources: SGLang's `kernels/ops/speculative` (coin q < p, strict; then the running sum of max(p - q, 0) against a second coin), vLLM's
`rejection_sampler_utils.py` (log p > log u + log q), and for greedy requests equality with the target's argmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional

_GROUP = 512  # tokens. With one running sum over all 151,936 sampled decoding of 16 requests took twice as long as greedy decoding.


class Rule(StrEnum):
    """How a token of a request with temperature > 0 is accepted."""

    SGLANG = "sglang"
    VLLM = "vllm"


@dataclass(frozen=True)
class Verdict:
    """accepted: [batch] how many of the drafted tokens, from the first on; bonus: [batch] the target's own token after them; expected: [batch] float64, how
    many were expected to pass: of every token the mean over the coins and over what might have been drawn in its place, given those drawn before it.
    Over drafts it has the mean of `accepted`, if tokens are drawn from what the draft states, and a fifth of its variance."""

    accepted: Tensor
    bonus: Tensor
    expected: Tensor


def verify_greedy(tokens: Tensor, target: Tensor) -> Verdict:
    """tokens: [batch, steps] drafted; target: [batch, steps + 1, vocab] logits after the anchor and after each of them. Ties go to the lowest id."""
    wanted = target.argmax(dim=2)
    accepted = _leading(tokens == wanted[:, :-1])
    return Verdict(accepted, wanted.gather(1, accepted[:, None])[:, 0], accepted.double())


def verify_sampled(tokens: Tensor, draft: Tensor, target: Tensor, temperature: float, coins: Tensor, rule: Rule = Rule.SGLANG) -> Verdict:
    """The output has the target's distribution, whatever the draft's.

    tokens: [batch, steps], drawn from softmax(draft / temperature); draft: [batch, steps, vocab] corrected logits; target: as above;
    temperature: > 0; coins: [batch, steps + 1] float64 uniform in [0, 1), the last for the bonus.
    """
    (p, q), both = _log_probabilities(tokens, draft, target[:, : tokens.shape[1]], temperature)
    coin = coins[:, :-1]
    passes = coin * q.exp() < p.exp() if rule is Rule.SGLANG else p > coin.log() + q
    accepted, expected = _leading(passes), _expected(p, q, both)
    rest = _softmax_after(target, accepted, temperature)
    rejected = _softmax_after(draft, accepted.clamp(max=tokens.shape[1] - 1), temperature).nan_to_num(0.0)
    whole = accepted == tokens.shape[1]  # nothing was drafted after the last: its bonus is drawn from p
    return Verdict(accepted, draw((rest - rejected.masked_fill(whole[:, None], 0.0)).clamp(min=0), coins[:, -1]), expected)


def expected_to_pass(tokens: Tensor, draft: Tensor, target: Tensor, temperature: float) -> Tensor:
    """`Verdict.expected` alone, of a draft that nobody keeps; arguments as of `verify_sampled`."""
    (p, q), both = _log_probabilities(tokens, draft, target[:, : tokens.shape[1]], temperature)
    return _expected(p, q, both)


def draw(weights: Tensor, coins: Tensor) -> Tensor:
    """[batch] tokens by weights [batch, vocab], which need not add up to 1, and coins [batch] in [0, 1): first a group of _GROUP tokens, then one of it,
    each the first whose running sum exceeds its share of the whole. Sums are float64: over 151,936 weights fp32 would lose the last of them."""
    padded = functional.pad(weights.double(), (0, -weights.shape[1] % _GROUP)).unflatten(1, (-1, _GROUP))
    masses = padded.sum(dim=2)
    group, left = _reach(masses, coins * masses.sum(dim=1))
    token, _ = _reach(padded.gather(1, group[:, None, None].expand(-1, 1, _GROUP))[:, 0], left)
    return (group * _GROUP + token).clamp(max=weights.shape[1] - 1)


def _reach(masses: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """The first place of masses [batch, n] whose running sum exceeds goal [batch], and how much of the goal is left before it. Where rounding lets
    none exceed it, the last that has a mass."""
    running = masses.cumsum(dim=1)
    beyond = running > goal[:, None]
    places = torch.arange(masses.shape[1], device=masses.device)
    last = torch.where(masses > 0, places, 0).amax(dim=1)
    place = torch.where(beyond.any(dim=1), beyond.byte().argmax(dim=1), last)
    before = (running - masses).gather(1, place[:, None])[:, 0]
    return place, goal - before


def _log_probabilities(tokens: Tensor, draft: Tensor, target: Tensor, temperature: float) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Log-probabilities [batch, steps] of `tokens` under target and draft, logits [batch, steps, vocab], and the mass that the two distributions share. All
    float64, summed in fp32 as the engines do. A row whose mass is infinite or NaN gives probability 0."""
    rows = [logits.float() / temperature for logits in (target, draft)]
    rows = [row - row.logsumexp(dim=2, keepdim=True) for row in rows]
    p, q = (row.gather(2, tokens[:, :, None])[:, :, 0].double().nan_to_num(nan=-torch.inf, neginf=-torch.inf) for row in rows)
    return (p, q), torch.minimum(*rows).exp().sum(dim=2).double().nan_to_num(0.0)


def _expected(p: Tensor, q: Tensor, both: Tensor) -> Tensor:
    """[batch] from what `_log_probabilities` gives: a token that was drawn passes with probability min(1, p / q), all before one with the product; one yet
    to be drawn with sum min(p, q)."""
    passed = (p - q).exp().nan_to_num(0.0).clamp(max=1.0).cumprod(dim=1)
    return (functional.pad(passed, (1, -1), value=1.0) * both).sum(dim=1)


def _softmax_after(logits: Tensor, accepted: Tensor, temperature: float) -> Tensor:
    """[batch, vocab] float64 probabilities of the row after the accepted ones."""
    row = logits.gather(1, accepted[:, None, None].expand(-1, 1, logits.shape[2]))[:, 0]
    return torch.softmax(row.double() / temperature, dim=1)


def _leading(passes: Tensor) -> Tensor:
    """[batch, steps] bool -> [batch] how many are true before the first that is not."""
    return passes.long().cumprod(dim=1).sum(dim=1)
