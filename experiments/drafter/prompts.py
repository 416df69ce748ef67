"""Prompts from held-out documents: what a drafter is asked that was not trained on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from experiments.drafter.text import HeldOut

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Prompt:
    """A part of a held-out document. source: the package that has it; name: of the document; tokens: [length] int64."""

    source: str
    name: str
    tokens: Tensor


def prompts_from(held_out: Sequence[HeldOut], count: int, length: int) -> list[Prompt]:
    """The first `count` of all windows of `length` tokens, which do not overlap, one of each source in turn: a source counts as much as another
    until its text is used up. Documents of a source follow one another in turn too, so that no long one stands for it.

    Raises:
        ValueError: there are fewer.
    """
    by_source: dict[str, list[list[Prompt]]] = defaultdict(list)
    for document in held_out:
        windows = document.tokens.split(length)
        by_source[document.source].append([Prompt(document.source, document.name, each) for each in windows if len(each) == length])
    found = _in_turn([_in_turn(documents) for _, documents in sorted(by_source.items())])
    if len(found) < count:
        raise ValueError(
            f"the held-out text has {len(found)} prompts of {length} tokens; got {count}, so ask for fewer or read more text with pair.corpus_mb"
        )
    return found[:count]


def _in_turn(lists: Sequence[Sequence[_Item]]) -> list[_Item]:
    """The first of each, the second of each, and so on."""
    longest = max((len(items) for items in lists), default=0)
    return [items[place] for place in range(longest) for items in lists if place < len(items)]
