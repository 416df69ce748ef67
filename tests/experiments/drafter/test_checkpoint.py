"""A pair comes back as it was saved, and what is not a pair says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.compose import compose
from experiments.drafter import checkpoint
from experiments.drafter.checkpoint import CheckpointError, Pair, folder_of, load, save
from experiments.drafter.drafter import drafter_loss
from experiments.drafter.pair import PairConfig, TrainingConfig
from experiments.drafter.target import next_token_loss
from experiments.provenance import ROOT
from tests.experiments.drafter.conftest import TEXT, config


def test_a_pair_comes_back_in_bf16(pair: Pair, tmp_path: Path) -> None:
    save(replace(pair, facts={"documents": 2}), tmp_path / "pair")
    found = load(pair.config, tmp_path / "pair")
    for own, other in ((pair.target, found.target), (pair.drafter, found.drafter)):
        for name, weight in own.state_dict().items():
            assert torch.equal(other.state_dict()[name], weight.bfloat16()), name
    assert torch.equal(found.counts, pair.counts)
    assert found.vocabulary.encode(TEXT) == pair.vocabulary.encode(TEXT)
    assert found.facts["documents"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["pair"], "nothing half-written stays behind"
    save(pair, tmp_path / "pair")  # over the other


def test_what_is_not_the_pair_is_a_sentence(pair: Pair, tmp_path: Path) -> None:
    again = r"train it with: python -m experiments.run experiment=train_pair pair=small"
    with pytest.raises(CheckpointError, match=f"holds no trained pair; {again}"):
        load(pair.config, tmp_path / "pair")
    save(pair, tmp_path / "pair")
    with pytest.raises(CheckpointError, match=f"holds the pair [0-9a-f]+ and the config is [0-9a-f]+; {again}"):
        load(config(rank=4), tmp_path / "pair")
    (tmp_path / "pair" / "drafter.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=rf"is not whole \(.*\); delete it and {again}"):
        load(pair.config, tmp_path / "pair")


def test_another_config_is_another_folder_and_a_committed_one_comes_first(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WTS_PAIR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoint, "COMMITTED", tmp_path / "committed")
    own, other = folder_of(pair.config), folder_of(config(seed=1))
    assert own.parent == other.parent == tmp_path / "cache"
    assert own.name != other.name
    save(pair, tmp_path / "committed" / "small")
    assert folder_of(pair.config) == tmp_path / "committed" / "small"
    assert folder_of(config(seed=1)) == other, "the committed pair has another config"
    assert json.loads((tmp_path / "committed" / "small" / "pair.json").read_text())["config"]["rank"] == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": "lstm"}, "head: 'lstm' is none of markov, gated, rnn, domino"),
        ({"vocabulary": "words"}, "vocabulary: 'words' is none of byte_pairs, qwen"),
        ({"taps": (3,)}, r"taps: needs layers from 0 to 2; got \[3\]"),
        ({"width": 18, "attention_heads": 4}, "width: 18 does not give 4 attention heads an even width each"),
        ({"context": 7}, "context: must be at least two blocks of 4; got 7"),
        ({"rank": 0}, "rank: must be at least 1; got 0"),
    ],
)
def test_a_config_that_cannot_be_built_is_a_sentence(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_a_training_needs_steps() -> None:
    with pytest.raises(ValueError, match="batch: must be at least 1; got 0"):
        TrainingConfig(steps=1, batch=0, rate=1e-3)
    with pytest.raises(ValueError, match="optimizer: 'sgd' is none of adamw, muon"):
        TrainingConfig(steps=1, batch=1, rate=1e-3, optimizer="sgd")
    assert isinstance(config(), PairConfig)


@pytest.fixture(scope="module")
def tiny() -> Pair:
    """The pair that is committed, found by its config."""
    made = compose(["experiment=train_pair", "pair=tiny"]).pair
    assert isinstance(made, PairConfig)
    folder = folder_of(made)
    assert folder == checkpoint.COMMITTED / "tiny"
    return load(made, folder)


@torch.no_grad()
def test_the_committed_pair_has_learnt_what_it_says(tiny: Pair) -> None:
    """On eight pieces of a text that does not change."""
    length, block = tiny.config.context + 1, tiny.config.block
    (encoded,) = tiny.vocabulary.encode([(ROOT / "LICENSE").read_text()])
    text = torch.tensor(encoded[: 8 * length]).view(8, length)
    assert float(next_token_loss(tiny.target, text)) < 5.5, "guessing at random is 7.6"
    text, anchors = text[:, :-1], torch.arange(block, tiny.config.context - block, block).expand(8, -1)
    accepted = drafter_loss(tiny.drafter, tiny.target, text, anchors, tiny.target(text)).accepted
    assert 0.55 < float(accepted[0]) < 0.9
    assert 0.3 < float(accepted[-1]) < float(accepted[0])


@torch.no_grad()
@pytest.mark.parametrize(("start", "later"), [("import os\nimport ", "import"), ("def __init__(self, name):\n        self.", "def")])
def test_the_committed_target_writes_python(tiny: Pair, start: str, later: str) -> None:
    tokens = torch.tensor([[tiny.vocabulary.separator, *tiny.vocabulary.encode([start])[0]]])
    known = tokens.shape[1]
    for _ in range(10):
        tokens = torch.cat([tokens, tiny.target.logits(tiny.target(tokens).hidden[:, -1:]).argmax(-1)], dim=1)
    assert later in tiny.vocabulary.decode(tokens[0, known:].tolist())
