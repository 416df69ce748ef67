"""Rounds as a pair drafts them when it decodes held-out text: what its walks really read, one round of each prompt."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import torch
from torch import Tensor

from experiments.convert import ConfigError
from experiments.drafter.checkpoint import Pair
from experiments.drafter.decode import Decoder, Round
from experiments.drafter.text import HeldOut
from experiments.recorded_rounds import Rounds
from kernels.walk import PreparedWalk

PLACES = 4  # a prompt gives its first, second, third or fourth round


@dataclass(frozen=True)
class Prompt:
    """A part of a held-out document, and which of its rounds is kept. tokens: [n] int64."""

    source: str
    name: str
    tokens: Tensor
    place: int


def prompts_of(documents: Sequence[HeldOut], length: int, count: int, seed: int) -> list[Prompt]:
    """`count` parts of `length` tokens, in turn from every source as long as it has more.

    Raises:
        ConfigError: there are fewer.
    """
    order, by_source = random.Random(seed), defaultdict[str, list[Prompt]](list)
    for document in documents:
        parts = (part for part in document.tokens.split(length) if len(part) == length)
        by_source[document.source] += [Prompt(document.source, document.name, part, order.randrange(PLACES)) for part in parts]
    for parts in by_source.values():
        order.shuffle(parts)
    found = [part for part in chain.from_iterable(zip_longest(*by_source.values())) if part is not None]
    if len(found) < count:
        raise ConfigError(f"experiment.count: the held-out text has {len(found)} prompts of {length} tokens; got {count}, so ask for fewer")
    return found[:count]


def record(pair: Pair, walk: PreparedWalk, prompts: Sequence[Prompt], batch: int, seed: int) -> Rounds:
    """One greedy round of each prompt, in their order, on the host.

    walk: of the pair's serial head, prepared for `batch` requests and whole blocks
    """
    steps, keeper = pair.config.block, _Keeper(len(prompts))
    decoder = Decoder(pair, walk, steps, seed=seed, watch=keeper.watch)
    enough = 2 + (PLACES - 1) * (steps + 1)  # tokens that no request has before its last round that may be kept, whatever is accepted
    device = next(pair.target.parameters()).device
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        keeper.expect(start, [prompt.place for prompt in some])
        decoder.decode(torch.stack([prompt.tokens for prompt in some]).to(device), enough, batch)
    return keeper.rounds()


class _Keeper:
    """Watches a decoder and copies from every request the one round that is asked of it."""

    def __init__(self, count: int) -> None:
        self._kept: list[tuple[Tensor, ...]] = [()] * count

    def expect(self, first: int, places: Sequence[int]) -> None:
        """The next rounds are of the requests from `first` on, which are asked the round at their place."""
        self._first, self._places, self._seen = first, places, 0

    def watch(self, round: Round) -> None:
        found = round.inputs.base_logits, round.inputs.anchor, round.draft.tokens, round.verdict.accepted
        for row, place in enumerate(self._places):
            if place == self._seen:
                self._kept[self._first + row] = tuple(each[row].to("cpu", copy=True) for each in found)  # the next round overwrites them
        self._seen += 1

    def rounds(self) -> Rounds:
        return Rounds(*(torch.stack(each) for each in zip(*self._kept, strict=True)))
