"""Prompts come from all sources, and every prompt gives the round that is asked of it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from experiments.convert import ConfigError
from experiments.drafter.checkpoint import Pair
from experiments.drafter.decode import Decoder, Round
from experiments.drafter.rounds import PLACES, Prompt, prompts_of, record
from experiments.drafter.text import HeldOut
from kernels.device import load
from kernels.heads.markov import MarkovHead
from kernels.registry import create
from kernels.walk import Limits, PreparedWalk
from tests.experiments.drafter.test_target import tokens

DOCUMENTS = [
    HeldOut(source, f"{source}{size}", torch.arange(size)) for source, size in (("a", 50), ("b", 13), ("a", 4), ("c", 9), ("b", 5))
]


def test_prompts_are_whole_and_take_turns() -> None:
    found = prompts_of(DOCUMENTS, length=5, count=6, seed=0)
    assert [prompt.source for prompt in found] == ["a", "b", "c", "a", "b", "a"]
    assert all(len(prompt.tokens) == 5 and prompt.tokens[0] % 5 == 0 for prompt in found)
    whole = prompts_of(DOCUMENTS, length=5, count=14, seed=0)
    assert Counter(prompt.source for prompt in whole) == {"a": 10, "b": 3, "c": 1}
    assert len({(prompt.name, int(prompt.tokens[0])) for prompt in whole}) == 14
    assert {prompt.place for prompt in whole} == set(range(PLACES))


def test_prompts_follow_the_seed() -> None:
    def asked(seed: int) -> list[tuple[str, int, int]]:
        return [(prompt.name, int(prompt.tokens[0]), prompt.place) for prompt in prompts_of(DOCUMENTS, 5, 6, seed)]

    assert asked(1) == asked(1)
    assert asked(1) != asked(2)


def test_too_few_prompts_are_one_sentence() -> None:
    with pytest.raises(ConfigError, match="experiment.count: the held-out text has 14 prompts of 5 tokens; got 15"):
        prompts_of(DOCUMENTS, 5, 15, 0)


def _walk(pair: Pair, batch: int) -> PreparedWalk:
    weights = {name: weight.bfloat16() for name, weight in pair.drafter.state_dict().items()}
    return create("reference").prepare(MarkovHead.from_tensors(weights), Limits(batch, pair.config.block), load("cpu"))


def test_every_prompt_gives_its_round(pair: Pair) -> None:
    prompts = [Prompt("s", "n", row, place) for row, place in zip(tokens(5, 6, 5), (2, 0, 3, 1, 3), strict=True)]
    kept = record(pair, _walk(pair, 2), prompts, batch=2, seed=0)
    assert kept.accepted is not None
    for row, prompt in enumerate(prompts):
        alone: list[Round] = []
        Decoder(pair, _walk(pair, 1), pair.config.block, watch=alone.append).decode(prompt.tokens[None], 40)
        round = alone[prompt.place]
        assert torch.equal(kept.base_logits[row], round.inputs.base_logits[0])
        assert torch.equal(kept.tokens[row], round.draft.tokens[0])
        assert (kept.anchor[row], kept.accepted[row]) == (round.inputs.anchor[0], round.verdict.accepted[0])
    assert len({int(anchor) for anchor in kept.anchor}) > 1
