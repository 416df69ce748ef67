"""A pair small enough for milliseconds, with random weights that are not symmetric in anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from experiments.drafter.checkpoint import Pair
from experiments.drafter.drafter import Drafter
from experiments.drafter.pair import PairConfig, TrainingConfig
from experiments.drafter.target import Target
from experiments.drafter.vocabulary import BytePairs

TEXT = [
    "def walk(head, inputs):\n    return head(inputs) if inputs else None\n",
    "the quick brown fox jumps over the lazy dog, twice. " * 3,
]


@pytest.fixture(scope="session")
def vocabulary() -> BytePairs:
    return small_vocabulary()


def small_vocabulary() -> BytePairs:
    return BytePairs.trained(TEXT * 4, 300)


_TRAINING = TrainingConfig(steps=3, batch=2, rate=1e-3, rows=7)
_SMALL = PairConfig(
    name="small",
    vocabulary="byte_pairs",
    vocab=300,
    width=16,
    layers=3,
    attention_heads=2,
    taps=(0, 2),
    draft_layers=2,
    context=24,
    anchors=3,
    corpus_mb=1.0,
    target=_TRAINING,
    drafter=_TRAINING,
    rank=8,
    block=4,
)


def config(**changes: Any) -> PairConfig:
    """V = 300, width 16, blocks of 4."""
    return replace(_SMALL, **changes)


@pytest.fixture(scope="session")
def pair(vocabulary: BytePairs) -> Pair:
    return small_pair(vocabulary)


def small_pair(vocabulary: BytePairs) -> Pair:
    """Random weights in fp32: what starts at zero is drawn too, so that every part counts."""
    torch.manual_seed(0)
    made = config()
    target, drafter = Target(made), Drafter(made, vocabulary.mask)
    for model in (target, drafter):
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.5 if weight.shape[0] == made.vocab else weight.shape[-1] ** -0.5)
        model.eval().requires_grad_(False)
    return Pair(made, target, drafter, vocabulary, torch.arange(made.vocab), {})
