"""Which drafted tokens the target lets through, and what it says instead: the engines' rejection samplers.

Sources: SGLang's `kernels/ops/speculative` (coin q < p, strict; then the running sum of max(p - q, 0) against a second coin), vLLM's
`rejection_sampler_utils.py` (log p > log u + log q), and for greedy requests equality with the target's argmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class Rule(StrEnum):
    """How a token of a request with temperature > 0 is accepted."""

    SGLANG = "sglang"
    VLLM = "vllm"


@dataclass(frozen=True)
class Verdict:
    """accepted: [batch] how many of the drafted tokens, from the first on; bonus: [batch] the target's own token after them."""

    accepted: Tensor
    bonus: Tensor


def verify_greedy(tokens: Tensor, target: Tensor) -> Verdict:
    """tokens: [batch, steps] drafted; target: [batch, steps + 1, vocab] logits after the anchor and after each of them. Ties go to the lowest id."""
    wanted = target.argmax(dim=2)
    accepted = _leading(tokens == wanted[:, :-1])
    return Verdict(accepted, wanted.gather(1, accepted[:, None])[:, 0])


def verify_sampled(tokens: Tensor, draft: Tensor, target: Tensor, temperature: Tensor, coins: Tensor, rule: Rule = Rule.SGLANG) -> Verdict:
    """The output has the target's distribution, whatever the draft's.

    tokens: [batch, steps], drawn from softmax(draft / temperature); draft: [batch, steps, vocab] corrected logits; target: as above;
    temperature: [batch] > 0; coins: [batch, steps + 1] uniform in [0, 1), the last for the bonus.
    """
    scale = temperature[:, None, None].double()
    p, q = torch.softmax(target.double() / scale, dim=2), torch.softmax(draft.double() / scale, dim=2).nan_to_num(0.0)
    own_p, own_q = (of[:, : tokens.shape[1]].gather(2, tokens[:, :, None])[:, :, 0] for of in (p, q))
    coin = coins[:, :-1].double()
    passes = coin * own_q < own_p if rule is Rule.SGLANG else own_p.log() > coin.log() + own_q.log()
    accepted = _leading(passes)
    rejected = torch.cat([q, torch.zeros_like(q[:, :1])], dim=1)  # nothing was drafted after the last: its bonus is drawn from p
    places = accepted[:, None, None].expand(-1, 1, p.shape[2])
    rest = (p.gather(1, places) - rejected.gather(1, places)).clamp(min=0)[:, 0]
    running = rest.cumsum(dim=1)
    reached = running > coins[:, -1:].double() * running[:, -1:]
    last = torch.full_like(accepted, p.shape[2] - 1)
    return Verdict(accepted, torch.where(reached.any(dim=1), reached.long().argmax(dim=1), last))


def _leading(passes: Tensor) -> Tensor:
    """[batch, steps] bool -> [batch] how many are true before the first that is not."""
    return passes.long().cumprod(dim=1).sum(dim=1)
