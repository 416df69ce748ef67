"""Rounds as a pair drafts them when it decodes held-out text: what its walks really read, one round of each prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from experiments.drafter.checkpoint import Pair
from experiments.drafter.decode import Decoder, Round
from experiments.drafter.prompts import Prompt
from experiments.recorded_rounds import Rounds
from kernels.walk import PreparedWalk

PLACES = 4  # a prompt gives its first, second, third or fourth round


def record(pair: Pair, walk: PreparedWalk, prompts: Sequence[Prompt], batch: int, seed: int) -> tuple[Rounds, list[int]]:
    """One greedy round of each prompt, in their order, on the host; and which round of the prompt it was, 0 to PLACES - 1, drawn by `seed`.

    walk: of the pair's serial head, prepared for `batch` requests and whole blocks
    """
    steps, draws = pair.config.block, random.Random(seed)
    places, keeper = [draws.randrange(PLACES) for _ in prompts], _Keeper(len(prompts))
    decoder = Decoder(pair, walk, steps, seed=seed, watch=keeper.watch)
    enough = 2 + (PLACES - 1) * (steps + 1)  # tokens that no request has before its last round that may be kept, whatever is accepted
    for start in range(0, len(prompts), batch):
        some = torch.stack([prompt.tokens for prompt in prompts[start : start + batch]])
        keeper.expect(start, places[start : start + batch])
        decoder.decode(some, enough, batch)
    return keeper.rounds(), places


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
