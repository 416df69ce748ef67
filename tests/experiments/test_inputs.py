"""Both sources give a head and sets that differ: the synthetic ones as they always were, the recorded ones round by round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from experiments.inputs import source_of
from experiments.recorded_rounds import Rounds, write
from experiments.schema import Config, InputsConfig, Smoke, Timing
from kernels.heads.markov import W1_NAME, W2_NAME, MarkovHead
from kernels.synthetic import synthetic_inputs
from kernels.walk import Limits

COUNT, STEPS, VOCAB, RANK = 9, 3, 120, 8


@pytest.fixture
def trained(config: Config, tmp_path: Path) -> Config:
    """A head and nine rounds in files."""
    head = MarkovHead.synthetic(VOCAB, RANK, 5, "cpu", 1.0, 0.5)
    save_file({W1_NAME: head.w1, W2_NAME: head.w2}, tmp_path / "h.safetensors")
    given = synthetic_inputs(VOCAB, STEPS, COUNT, seed=6)
    write(tmp_path / "r.safetensors", Rounds(given.base_logits, given.anchor, torch.zeros(COUNT, STEPS, dtype=torch.int64)), {"pair": "p"})
    inputs = InputsConfig("trained", checkpoint=str(tmp_path / "h.safetensors"), rounds=str(tmp_path / "r.safetensors"))
    return replace(config, inputs=inputs, experiment=Smoke(steps=(1, 3), batch=2, timing=Timing(2, 1, 0)))


def test_sets_are_rounds_and_share_none(trained: Config) -> None:
    given = synthetic_inputs(VOCAB, STEPS, COUNT, seed=6)
    sets = list(source_of(trained, Limits(4, 2), "cpu").sets)
    for drawn, start in zip(sets, (0, 4, 5), strict=True):
        assert torch.equal(drawn.base_logits, given.base_logits[start : start + 4, :2])
        assert torch.equal(drawn.anchor, given.anchor[start : start + 4])
        assert drawn.temperature.tolist() == [0.0] * 4


def test_synthetic_inputs_are_what_they_were(config: Config) -> None:
    source = source_of(config, Limits(2, 3), "cpu")
    size = config.head
    assert torch.equal(source.head.w1, MarkovHead.synthetic(size.vocab, size.rank, size.seed, "cpu", size.w1_std, size.w2_std).w1)
    for seed, drawn in zip(range(3), source.sets, strict=False):
        expected = synthetic_inputs(size.vocab, 3, 2, seed, "cpu", config.inputs.base_std)
        assert torch.equal(drawn.base_logits, expected.base_logits)
        assert torch.equal(drawn.anchor, expected.anchor)
