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
    assert Counter(prompt.source for prompt in found) == {f"source{source}": 3 if source < 5 else 2 for source in range(10)}
    assert [prompt.source for prompt in found[:11]] == [*(f"source{source}" for source in range(10)), "source0"]
    assert found[0].tokens.tolist() == [0, 1, 2, 3, 4]
    assert found[10].tokens.tolist() == [7, 8, 9, 10, 11], "the second prompt of a source is of its second document"
    assert found[20].tokens.tolist() == [30, 31, 32, 33, 34]


def test_no_token_is_asked_twice() -> None:
    found = prompts_from(documents(10), 70, 5)
    assert len(found) == 70
    assert len(torch.cat([prompt.tokens for prompt in found]).unique()) == 350


def test_too_little_text_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="has 70 prompts of 5 tokens; got 71, so ask for fewer"):
        prompts_from(documents(10), 71, 5)
