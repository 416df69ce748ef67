"""A real speculative decoder: prefill, draft, walk by any backend, verify, roll back. Requests of a batch go at their own pace.

What the target has read of a request lies in its cache; one token, the anchor, is known beyond that. A round drafts the tokens after the anchor, lets
the target read the anchor and the draft in one pass, and keeps what it accepts and one token of its own: the next anchor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from experiments.drafter.checkpoint import Pair
from experiments.drafter.target import Cache
from experiments.drafter.verify import Rule, Verdict, verify_greedy, verify_sampled
from kernels.walk import Draft, PreparedWalk, WalkInputs


@dataclass(frozen=True)
class Decoded:
    """What became of one prompt. accepted: drafted tokens that passed, of every round; a round adds one token of the target's own."""

    tokens: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """What one round worked on, for those who record it: the walk's inputs, its draft, the verdict, and which requests were still at work."""

    inputs: WalkInputs
    draft: Draft
    verdict: Verdict
    live: Tensor


@dataclass
class Decoder:
    """One arm: a pair whose serial head is walked by `walk`, prepared for the batch and for `steps` tokens.

    steps: drafted at once, up to the pair's block; temperature: of every request, 0 for greedy; seed: of the target's own draws and of the
    requests' noise; watch: called after every round
    """

    pair: Pair
    walk: PreparedWalk
    steps: int
    temperature: float = 0.0
    seed: int = 0
    rule: Rule = Rule.SGLANG
    watch: Callable[[Round], None] = lambda _: None
    _coins: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= self.pair.config.block:
            raise ValueError(f"pair {self.pair.config.name} drafts 1 to {self.pair.config.block} tokens at once; got steps {self.steps}.")
        self._coins = torch.Generator().manual_seed(self.seed)

    @torch.no_grad()
    def decode(self, prompts: Tensor, count: int) -> list[Decoded]:
        """prompts: [batch, tokens] int64, of one length. At least `count` tokens are decoded for each; what is beyond is cut off."""
        state = _State.of(
            self.pair, prompts, count + 2 * self.steps + 1
        )  # the last round passes `count`, and idle rounds are read behind it
        state.settle(self._draw(self.pair.target.logits(state.hidden[:, -1])))
        while (live := torch.tensor([len(tokens) < count for tokens in state.tokens])).any():
            inputs, draft = self._draft(state)
            read = self.pair.target.extend(torch.cat([state.anchor[:, None], draft.tokens], dim=1), state.cache)
            verdict = self._verify(draft, self.pair.target.logits(read.hidden))
            self.watch(Round(inputs, draft, verdict, live))
            state.keep(read.taps, draft.tokens, verdict, live)
        return [Decoded(tuple(tokens[:count]), tuple(accepted)) for tokens, accepted in zip(state.tokens, state.accepted, strict=True)]

    def _draft(self, state: _State) -> tuple[WalkInputs, Draft]:
        taps = state.taps[:, : int(state.cache.length.max())]
        base = self.pair.drafter.base_logits(self.pair.target, taps, state.anchor[:, None], state.cache.length[:, None])
        batch = len(state.anchor)
        inputs = WalkInputs(
            base_logits=base[:, 0, : self.steps].bfloat16(),
            anchor=state.anchor,
            temperature=torch.full((batch,), self.temperature, dtype=torch.float32, device=base.device),
            seed=self.seed + torch.arange(batch, device=base.device),
        )
        draft = Draft.like(inputs, logits=self.temperature > 0)
        self.walk.launch(inputs, draft)
        return inputs, draft

    def _verify(self, draft: Draft, target: Tensor) -> Verdict:
        if self.temperature <= 0:
            return verify_greedy(draft.tokens, target)
        assert draft.logits is not None, "a walk that samples writes the logits it sampled from"
        coins = torch.rand(len(target), self.steps + 1, generator=self._coins, dtype=torch.float64).to(target.device)
        temperature = torch.full((len(target),), self.temperature, device=target.device)
        return verify_sampled(draft.tokens, draft.logits, target, temperature, coins, self.rule)

    def _draw(self, logits: Tensor) -> Tensor:
        """[batch, vocab] -> [batch] the target's own next token."""
        if self.temperature <= 0:
            return logits.argmax(dim=1)
        weights = torch.softmax(logits.double() / self.temperature, dim=1).cpu()
        return torch.multinomial(weights, 1, generator=self._coins)[:, 0].to(logits.device)


def decode_plainly(pair: Pair, prompts: Tensor, count: int) -> list[tuple[int, ...]]:
    """The target alone, greedy, one token after the other: what speculative greedy decoding must repeat."""
    state = _State.of(pair, prompts, count)
    logits = pair.target.logits(state.hidden[:, -1])
    tokens = [logits.argmax(dim=1)]
    for _ in range(count - 1):
        logits = pair.target.logits(pair.target.extend(tokens[-1][:, None], state.cache).hidden[:, -1])
        tokens.append(logits.argmax(dim=1))
    return [tuple(row) for row in torch.stack(tokens, dim=1).tolist()]


class _State:
    """What is known of every request. taps: [batch, capacity, taps * width], valid up to the cache's lengths."""

    def __init__(self, cache: Cache, taps: Tensor, hidden: Tensor) -> None:
        self.cache, self.taps, self.hidden = cache, taps, hidden
        self.anchor = torch.zeros(len(taps), dtype=torch.int64, device=taps.device)
        self.tokens: list[list[int]] = [[] for _ in range(len(taps))]
        self.accepted: list[list[int]] = [[] for _ in range(len(taps))]

    @classmethod
    @torch.no_grad()
    def of(cls, pair: Pair, prompts: Tensor, more: int) -> _State:
        """After reading the prompts, with room for `more` tokens."""
        batch, length = prompts.shape
        cache = Cache(pair.target, batch, length + more)
        read = pair.target.extend(prompts, cache)
        taps = torch.zeros(batch, length + more, read.taps.shape[2], dtype=read.taps.dtype, device=read.taps.device)
        taps[:, :length] = read.taps
        return cls(cache, taps, read.hidden)

    def settle(self, first: Tensor) -> None:
        """The first token after the prompt."""
        self.anchor = first
        for tokens, token in zip(self.tokens, first.tolist(), strict=True):
            tokens.append(token)

    def keep(self, taps: Tensor, drafted: Tensor, verdict: Verdict, live: Tensor) -> None:
        """The anchor and what was accepted count as read; the rest is forgotten. A request that is done stays where it was."""
        start = self.cache.length - taps.shape[1]
        places = start[:, None] + torch.arange(taps.shape[1], device=taps.device)
        self.taps.scatter_(1, places[:, :, None].expand_as(taps), taps)
        moves = live.to(start.device)
        self.cache.length = start + torch.where(moves, 1 + verdict.accepted, 0)
        self.anchor = torch.where(moves, verdict.bonus, self.anchor)
        for row, accepted in enumerate(verdict.accepted.tolist()):
            if live[row]:
                self.tokens[row] += [*drafted[row, :accepted].tolist(), int(verdict.bonus[row])]
                self.accepted[row].append(accepted)
