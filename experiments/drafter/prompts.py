"""Prompts from held-out documents: what a drafter is asked that was not trained on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from experiments.drafter.corpus import MIN_SOURCES
from experiments.drafter.text import HeldOut

_Item = TypeVar("_Item")


@dataclass(frozen=True, eq=False)
class Prompts:
    """tokens: [n, length] int64; sources: the package that each is from."""

    tokens: Tensor
    sources: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.sources)


def prompts_from(held_out: Sequence[HeldOut], count: int, length: int) -> Prompts:
    """The first `count` of all windows of `length` tokens, which do not overlap, one of each source in turn: a source counts as much as another
    until its text is used up. Documents follow one another in turn too, so that no long one stands for its source.

    Raises:
        ValueError: there are fewer, or they are from fewer than MIN_SOURCES sources.
    """
    by_source: dict[str, list[Sequence[Tensor]]] = defaultdict(list)
    for document in held_out:
        whole = len(document.tokens) // length * length
        if whole:
            by_source[document.source].append(document.tokens[:whole].split(length))
    found = _in_turn([[(source, window) for window in _in_turn(documents)] for source, documents in sorted(by_source.items())])
    sources = {source for source, _ in found[:count]}
    if len(found) < count or len(sources) < MIN_SOURCES:
        raise ValueError(
            f"the held-out text gives {len(found)} prompts of {length} tokens from {len(sources)} sources, and {count} from at least "
            f"{MIN_SOURCES} are asked for; lower experiment.prompts or experiment.prompt_tokens, or read more text with pair.corpus_mb"
        )
    return Prompts(torch.stack([window for _, window in found[:count]]), tuple(source for source, _ in found[:count]))


def _in_turn(lists: Sequence[Sequence[_Item]]) -> list[_Item]:
    """The first of each, the second of each, and so on."""
    longest = max((len(items) for items in lists), default=0)
    return [items[place] for place in range(longest) for items in lists if place < len(items)]
