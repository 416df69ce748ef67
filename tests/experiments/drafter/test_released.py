"""A released pair, from files in the released layout: base logits by their equations, decoding, and what is wrong with files in a sentence.

The same drafter was compared once with DeepSpec's own `Qwen3DSparkModel` on these random weights (transformers 5.24, fp32): base logits at
anchors 1, 17 and 59 differed by at most 1.2e-6 of 3.4, the gated head's bias by nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from torch.testing import assert_close

from experiments.drafter.checkpoint import CheckpointError, Pair
from experiments.drafter.corpus import Document
from experiments.drafter.decodable import DecodablePair
from experiments.drafter.decode import Decoder, decode_plainly
from experiments.drafter.pair import ReleasedConfig
from experiments.drafter.released import load
from experiments.drafter.target import Cache
from experiments.drafter.text import tokenize
from experiments.drafter.vocabulary import BytePairs
from kernels.device import load as load_device
from kernels.heads.markov import MarkovHead
from kernels.registry import create
from kernels.walk import Limits
from tests.experiments.drafter import dense_qwen3
from tests.experiments.drafter.conftest import TEXT
from tests.experiments.drafter.released_layout import CONFIG, DRAFT_LAYERS, RANK, TARGET_LAYERS, VOCAB, Released, random_pair
from tests.experiments.drafter.test_qwen3 import tokens


@pytest.fixture
def released(vocabulary: BytePairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Released:
    monkeypatch.setenv("WTS_PAIR_CACHE", str(tmp_path))
    made = random_pair(vocabulary)
    made.write(tmp_path)
    return made


def test_base_logits_are_those_of_the_equations(released: Released) -> None:
    pair: DecodablePair = load(CONFIG, dtype=torch.float32)
    text = tokens(2, 11)
    taps = pair.target.extend(text, Cache(pair.target, 2, 11)).taps
    places = torch.tensor([[1, 7], [3, 10]])
    base = pair.drafter.base_logits(pair.target, taps, text.gather(1, places), places)
    assert base.shape == (2, 2, 4, VOCAB)
    for row in range(2):
        _, outputs = dense_qwen3.target(released.target, TARGET_LAYERS, text[row])
        read = torch.cat([outputs[0], outputs[1], outputs[3]], dim=1)
        for anchor, place in enumerate(places[row].tolist()):
            mask = released.drafter_config["mask_token_id"]
            expected = dense_qwen3.drafter(released.drafter, DRAFT_LAYERS, read[:place], int(text[row, place]), mask, 4)
            assert_close(base[row, anchor].double(), expected, rtol=1e-4, atol=1e-4)


def test_it_decodes_as_the_target_does(released: Released, vocabulary: BytePairs) -> None:
    """In bf16, and with prompts from held-out documents."""
    documents = [Document("pkg", f"{number}.py", text) for number, text in enumerate(TEXT * 60)]
    pair = load(CONFIG)
    text = tokenize(documents, pair.vocabulary)
    assert text.held_out[0].tokens[0] == vocabulary.separator
    prompts = torch.stack([document.tokens[:8] for document in text.held_out[:2]])
    head = MarkovHead(pair.drafter.markov_head.markov_w1.weight, pair.drafter.markov_head.markov_w2.weight)
    walk = create("reference").prepare(head, Limits(2, 3, False), load_device("cpu"))
    trained = cast("Pair", pair)  # the decoder asks nothing of it that `DecodablePair` has not
    decoded = Decoder(trained, walk, 3).decode(prompts, 12)
    assert [each.tokens for each in decoded] == decode_plainly(trained, prompts, 12)
    assert (pair.config.name, pair.config.block, pair.config.taps, pair.config.width) == ("theirs", 4, (-1, 0, 2), 24)


def test_a_pair_is_what_its_files_say(released: Released, vocabulary: BytePairs, tmp_path: Path) -> None:
    pair = load(CONFIG)
    assert torch.equal(pair.drafter.markov_head.markov_w2.weight, released.drafter["markov_head.markov_w2.weight"].bfloat16())
    assert (pair.vocabulary.size, pair.drafter.config.rank) == (VOCAB, RANK)
    assert pair.vocabulary.decode(pair.vocabulary.encode(TEXT)[0]) == TEXT[0]
    random_pair(vocabulary, head="gated").write(tmp_path)
    other = load(CONFIG)
    assert pair.facts["them/target"] == other.facts["them/target"]
    assert pair.facts["them/drafter"] != other.facts["them/drafter"]
    assert other.drafter.markov_head.get_parameter("gate_proj.weight").shape == (RANK, 24 + RANK)


def _without(name: str) -> Callable[[Released], object]:
    return lambda made: made.drafter.pop(name)


def _with(name: str, *shape: int) -> Callable[[Released], object]:
    return lambda made: made.drafter.update({name: torch.zeros(shape)})


def _says(**changes: object) -> Callable[[Released], object]:
    return lambda made: made.drafter_config.update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("fc.weight"), "them/drafter lacks fc.weight and has nothing beside what a DSpark has; take another checkpoint"),
        (_with("d2t", 3), "them/drafter lacks nothing and has d2t beside what a DSpark has"),
        (
            _with("fc.weight", 24, 48),
            r"has fc.weight \[24, 48\], which its config.json says to be of other shapes; download it with: hf download",
        ),
        (_with("lm_head.weight", VOCAB, 24), "has another lm_head.weight than its target; take the target that it was trained for"),
        (_says(markov_head_type="lstm"), "markov_head_type 'lstm' is none of vanilla, gated, rnn"),
        (_says(markov_head_type="gated"), "lacks markov_head.gate_proj.bias, markov_head.gate_proj.weight and has nothing"),
        (_says(draft_vocab_size=100), "draft_vocab_size 100 is not vocab_size 320"),
        (_says(target_layer_ids=[0, 2, 3]), r"target_layer_ids \[0, 2, 3\] are not increasing ones from -1 to 2"),
        (_says(target_layer_ids=[2, 0, 1]), r"target_layer_ids \[2, 0, 1\] are not increasing ones"),
        (_says(hidden_size=48), r"them/drafter has vocabulary and width \(320, 48\) and its target \(320, 24\)"),
        (lambda made: made.drafter_config.pop("block_size"), "them/drafter/config.json does not say 'block_size'; take a checkpoint whose"),
        (lambda made: made.target_config.pop("bos_token_id"), "them/target/config.json does not say 'bos_token_id'"),
    ],
)
def test_what_is_not_a_pair_is_a_sentence(released: Released, tmp_path: Path, change: Callable[[Released], object], message: str) -> None:
    change(released)
    released.write(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load(CONFIG)


def test_what_is_not_there_says_how_to_get_it(released: Released, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"them/other has no config.json; download it with: hf download them/other --local-dir .*them/other"
    ):
        load(ReleasedConfig("theirs", "them/other", "them/drafter"))
    folder = tmp_path / CONFIG.target
    for name, message in (("model-00002-of-00002.safetensors", "cannot be read"), ("tokenizer.json", "has no tokenizer.json")):
        (folder / name).unlink()
        with pytest.raises(CheckpointError, match=f"{message}.*hf download them/target"):
            load(CONFIG)
        released.write(tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is not JSON \(.*hf download them/target"):
        load(CONFIG)
