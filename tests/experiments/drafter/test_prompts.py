"""Prompts are whole windows of held-out text, one of each source in turn."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from experiments.drafter.prompts import prompts_from
from experiments.drafter.text import HeldOut


def documents(sources: int, lengths: tuple[int, ...] = (7, 23, 12)) -> list[HeldOut]:
    """Every token is one of a kind."""
    found, first = [], 0
    for source in range(sources):
        for length in lengths:
            found.append(HeldOut(f"source{source}", f"file{length}", torch.arange(first, first + length)))
            first += length
    return found


def test_sources_and_documents_take_turns() -> None:
    found = prompts_from(documents(10), 25, 5)
    assert Counter(found.sources) == {f"source{source}": 3 if source < 5 else 2 for source in range(10)}
    assert found.sources[:11] == (*(f"source{source}" for source in range(10)), "source0")
    assert found.tokens[0].tolist() == [0, 1, 2, 3, 4]
    assert found.tokens[10].tolist() == [7, 8, 9, 10, 11], "the second prompt of a source is of its second document"
    assert found.tokens[20].tolist() == [30, 31, 32, 33, 34]


def test_no_token_is_asked_twice() -> None:
    found = prompts_from(documents(10), 70, 5)
    assert len(found) == 70
    assert len(found.tokens.flatten().unique()) == 350


@pytest.mark.parametrize(("sources", "count"), [(10, 71), (8, 8)])
def test_too_little_text_says_what_to_do(sources: int, count: int) -> None:
    with pytest.raises(ValueError, match=rf"gives {7 * sources} prompts of 5 tokens from {sources} sources, and {count} from at least 9"):
        prompts_from(documents(sources), count, 5)
