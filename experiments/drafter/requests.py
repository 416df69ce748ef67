"""What is known of the requests that are decoded together: fixed tensors on one device, so that a round can be captured once and replayed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from experiments.drafter.decodable import DecodablePair
from experiments.drafter.target import Cache
from experiments.drafter.verify import Verdict

_IDLE = -1  # in `accepted`: the request took no part in that round


class Requests:
    """`batch` requests of `length` prompt tokens, of which `count` more are wanted, in rounds of `steps` drafted tokens.

    cache:    of the target, what it has read of each request
    taps:     [batch, capacity, taps * width], valid up to the cache's lengths
    anchor:   [batch] int64, the one token that is known beyond the cache
    tokens:   [batch, room] int64 after the prompt, of which `written` [batch] count; a request with `wanted` [batch] of them is done
    accepted: [batch, count] int64 drafted tokens that passed, by round
    expected: [batch] float64, the sum over rounds of how many were expected to pass
    beside:   [walks, batch] float64, likewise of drafts that others made of the same rounds
    coins:    [count, batch, steps + 1] float64 in [0, 1), what the target's own draws use, by round
    rounds:   [1] int64 rounds so far
    """

    def __init__(self, pair: DecodablePair, batch: int, length: int, count: int, steps: int, beside: int = 0) -> None:
        self.batch, self.length, self.count, self.steps = batch, length, count, steps
        capacity = length + count + 2 * steps + 1  # the last round passes `count`, and requests that are done are read behind it
        self.cache = Cache(pair.target, batch, capacity)
        weight = pair.target.embedding.weight
        device, width = weight.device, len(pair.config.taps) * pair.config.width
        self.taps = torch.zeros(batch, capacity, width, dtype=weight.dtype, device=device)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.anchor, self.written, self.wanted = integers(batch), integers(batch), integers(batch)
        self.tokens, self.accepted, self.rounds = integers(batch, count + 2 * steps + 2), integers(batch, count), integers(1)
        self.expected = torch.zeros(batch, dtype=torch.float64, device=device)
        self.beside = torch.zeros(beside, batch, dtype=torch.float64, device=device)
        self.coins = torch.zeros(count, batch, steps + 1, dtype=torch.float64, device=device)

    @property
    def live(self) -> Tensor:
        """[batch] bool: who wants more tokens."""
        return self.written < self.wanted

    def admit(self, pair: DecodablePair, prompts: Tensor, coins: Tensor) -> Tensor:
        """Begin anew with prompts [n, length] int64, n up to the batch; slots beyond them stay idle. Gives the target's logits [batch, vocab]
        after each prompt, from which `settle` takes the first tokens."""
        idle = self.batch - len(prompts)
        filled = torch.cat([prompts, prompts[:1].expand(idle, -1)]).to(self.taps.device)
        for zeroed in (self.cache.length, self.rounds, self.expected, self.beside):
            zeroed.zero_()
        self.accepted.fill_(_IDLE)
        self.coins.copy_(coins)
        self.wanted.zero_()[: len(prompts)] = self.count
        read = pair.target.extend(filled, self.cache)
        self.taps[:, : self.length] = read.taps
        return pair.target.logits(read.hidden[:, -1])

    def settle(self, first: Tensor) -> None:
        """first: [batch] int64, the tokens after the prompts."""
        self.anchor.copy_(first)
        self.tokens[:, 0] = first
        self.written.fill_(1)

    def keep(self, taps: Tensor, drafted: Tensor, verdict: Verdict, live: Tensor) -> None:
        """The anchor and what was accepted count as read; the rest is forgotten. A request that is done stays where it was."""
        start = self.cache.length - taps.shape[1]
        places = start[:, None] + torch.arange(taps.shape[1], device=taps.device)
        self.taps.scatter_(1, places[:, :, None].expand_as(taps), taps)
        gained = torch.where(live, 1 + verdict.accepted, 0)
        self.cache.length.copy_(start + gained)
        self.anchor.copy_(torch.where(live, verdict.bonus, self.anchor))
        fresh = functional.pad(drafted, (0, 1)).scatter(1, verdict.accepted[:, None], verdict.bonus[:, None])
        self.tokens.scatter_(1, self.written[:, None] + torch.arange(fresh.shape[1], device=fresh.device), fresh)
        self.written += gained
        self.expected += torch.where(live, verdict.expected, 0.0)
        self.accepted.index_copy_(1, self.rounds, torch.where(live, verdict.accepted, _IDLE)[:, None])
        self.rounds += 1

    def decoded(self, requests: int) -> list[tuple[tuple[int, ...], tuple[int, ...], float, tuple[float, ...]]]:
        """Of each of the first `requests`: the tokens that were wanted, how many passed in every round, how many were expected to in all, and how many of
        others' drafts."""
        read = (self.tokens[:, : self.count], self.accepted, self.expected, self.beside.T)
        tokens, accepted, expected, beside = (each[:requests].tolist() for each in read)
        passed = [tuple(n for n in rounds if n != _IDLE) for rounds in accepted]
        return list(zip(map(tuple, tokens), passed, expected, map(tuple, beside), strict=True))
