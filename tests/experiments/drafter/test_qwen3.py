"""Our Qwen3 is Qwen3: by its equations in fp64, by Hugging Face's transformers where it is installed, and read in pieces as at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from experiments.drafter.qwen3 import Qwen3Config
from experiments.drafter.released import load
from experiments.drafter.target import Cache
from experiments.drafter.vocabulary import BytePairs
from tests.experiments.drafter import dense_qwen3
from tests.experiments.drafter.released_layout import CONFIG, TARGET_LAYERS, VOCAB, Released, random_pair


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def released(request: pytest.FixtureRequest, vocabulary: BytePairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Released:
    monkeypatch.setenv("WTS_PAIR_CACHE", str(tmp_path))
    made = random_pair(vocabulary, tied=request.param)
    made.write(tmp_path)
    return made


def test_logits_and_taps_are_those_of_the_equations(released: Released) -> None:
    text = tokens(2, 9)
    target = load(CONFIG, dtype=torch.float32).target
    read = target.extend(text, Cache(target, 2, 12))
    for row in range(2):
        logits, outputs = dense_qwen3.target(released.target, TARGET_LAYERS, text[row])
        assert_close(target.logits(read.hidden[row]).double(), logits, rtol=1e-4, atol=1e-4)
        assert_close(read.taps[row].double(), torch.cat([outputs[0], outputs[1], outputs[3]], dim=1), rtol=1e-4, atol=1e-4)


def test_logits_are_those_of_transformers(released: Released, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="an oracle that the suite does not need otherwise")
    oracle = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / CONFIG.target, dtype=torch.float32)
    text, target = tokens(2, 50), load(CONFIG, dtype=torch.float32).target
    with torch.no_grad():
        expected = oracle(text, output_hidden_states=True)
    read = target.extend(text, Cache(target, 2, 64))
    assert_close(target.logits(read.hidden), expected.logits, rtol=1e-4, atol=1e-4)
    assert_close(read.taps, torch.cat([expected.hidden_states[at] for at in (0, 1, 3)], dim=2), rtol=1e-4, atol=1e-4)


def test_pieces_give_what_the_whole_gives_and_a_rejected_piece_leaves_nothing(released: Released) -> None:
    target = load(CONFIG, dtype=torch.float32).target
    text, cache = tokens(2, 12), Cache(target, 2, 20)
    whole = target.extend(text, Cache(target, 2, 12))
    target.extend(text[:, :6], cache)
    target.extend(tokens(2, 4, 7), cache)
    cache.length -= torch.tensor([4, 7])  # the second request is cut back further
    found = target.extend(torch.stack([text[0, 6:11], text[1, 3:8]]), cache)
    for row, start in enumerate((6, 3)):
        assert_close(found.hidden[row], whole.hidden[row, start : start + 5], rtol=1e-4, atol=1e-5)
        assert_close(found.taps[row], whole.taps[row, start : start + 5], rtol=1e-4, atol=1e-5)
    assert cache.length.tolist() == [11, 8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' is not what this suite's Qwen3 does"),
        ({"use_sliding_window": True}, "use_sliding_window True is not what"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling {'rope_type': 'yarn', 'factor': 4.0} is not what"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_scaling {'rope_type': 'yarn'"),
    ],
)
def test_another_model_is_a_sentence(vocabulary: BytePairs, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Qwen3Config.from_json(random_pair(vocabulary).target_config | changes)


def test_the_rotary_base_may_stand_where_transformers_5_puts_it(vocabulary: BytePairs) -> None:
    said = random_pair(vocabulary).target_config
    del said["rope_theta"]
    assert Qwen3Config.from_json(said | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}).rotary_base == 5e5
