"""Every prompt gives the round that is drawn for it."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from experiments.drafter.checkpoint import Pair
from experiments.drafter.decode import Decoder, Round
from experiments.drafter.prompts import Prompt
from experiments.drafter.rounds import PLACES, record
from kernels.device import load
from kernels.heads.markov import MarkovHead
from kernels.registry import create
from kernels.walk import Limits, PreparedWalk
from tests.experiments.drafter.test_target import tokens


def _walk(pair: Pair, batch: int) -> PreparedWalk:
    weights = {name: weight.bfloat16() for name, weight in pair.drafter.state_dict().items()}
    return create("reference").prepare(MarkovHead.from_tensors(weights), Limits(batch, pair.config.block), load("cpu"))


def test_every_prompt_gives_its_round(pair: Pair) -> None:
    prompts = [Prompt("s", "n", row) for row in tokens(5, 6, 5)]
    kept, places = record(pair, _walk(pair, 2), prompts, batch=2, seed=0)
    assert kept.accepted is not None
    for row, (prompt, place) in enumerate(zip(prompts, places, strict=True)):
        alone: list[Round] = []
        Decoder(pair, _walk(pair, 1), pair.config.block, watch=alone.append).decode(prompt.tokens[None], 40)
        round = alone[place]
        assert_close(kept.base_logits[row], round.inputs.base_logits[0])  # in fp32, which rounds otherwise in another batch
        assert torch.equal(kept.tokens[row], round.draft.tokens[0])
        assert (kept.anchor[row], kept.accepted[row]) == (round.inputs.anchor[0], round.verdict.accepted[0])
    assert len({int(anchor) for anchor in kept.anchor}) > 1
    assert 1 < len(set(places)) <= PLACES
    assert record(pair, _walk(pair, 2), prompts, batch=2, seed=1)[1] != places
