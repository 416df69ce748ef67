"""Text comes back from its tokens; sizes and special tokens are what they should be."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.drafter import vocabulary as room
from experiments.drafter.corpus import Document
from experiments.drafter.text import tokenize, vocabulary_for
from experiments.drafter.vocabulary import BytePairs, QwenBytePairs
from tests.experiments.drafter.conftest import TEXT, config


@given(st.text(max_size=60))
def test_any_text_comes_back(vocabulary: BytePairs, text: str) -> None:
    (tokens,) = vocabulary.encode([text])
    assert vocabulary.decode(tokens) == text
    assert all(token not in (vocabulary.separator, vocabulary.mask) for token in tokens)


def test_a_vocabulary_is_its_json(vocabulary: BytePairs) -> None:
    again = BytePairs(vocabulary.json)
    assert (again.size, again.separator, again.mask) == (300, vocabulary.separator, vocabulary.mask)
    assert again.encode(TEXT) == vocabulary.encode(TEXT)
    assert len(again.encode(TEXT)[0]) < 0.8 * len(TEXT[0]), "pairs that the text has often are one token"


def test_text_that_has_too_few_pairs_is_an_error() -> None:
    with pytest.raises(ValueError, match="gives a vocabulary of [0-9]+ byte pairs, not 5000"):
        BytePairs.trained(TEXT, 5000)


def test_a_vocabulary_of_another_maker_is_an_error(vocabulary: BytePairs) -> None:
    with pytest.raises(ValueError, match=r"has no token <\|mask\|>"):
        BytePairs(vocabulary.json.replace("<|mask|>", "<|other|>"))


def test_documents_become_one_training_text_and_held_out_documents(vocabulary: BytePairs) -> None:
    documents = [Document("package", f"file{number}", f"{TEXT[number % 2]} {number}") for number in range(200)]
    text = tokenize(documents, vocabulary)
    held = [document for document in documents if document.held_out]
    assert [(each.source, each.name) for each in text.held_out] == [(each.source, each.name) for each in held]
    assert vocabulary.decode(text.held_out[0].tokens.tolist()[1:]) == held[0].text
    assert int((text.train == vocabulary.separator).sum()) == 200 - len(held)
    assert int(text.counts(300).sum()) == len(text.train)


def test_byte_pairs_see_no_held_out_document() -> None:
    documents = [Document("package", f"file{number}", TEXT[0] if number else "ßßß" * 400) for number in range(100)]
    secret = next(number for number in range(100) if Document("package", f"file{number}", "").held_out)
    documents[0], documents[secret] = Document("package", "file0", TEXT[1] * 9), Document("package", f"file{secret}", "ßæßæßæ" * 400)
    trained = vocabulary_for(config(vocab=300), documents)
    assert len(trained.encode(["ßæ"])[0]) == 4, "its bytes were never merged"
    with (
        pytest.raises(ValueError, match=r"pair.vocab: qwen has 151936 logits; got 300") if _has_qwen() else pytest.raises(FileNotFoundError)
    ):
        vocabulary_for(config(vocabulary="qwen"), documents)


def _has_qwen() -> bool:
    return importlib.util.find_spec("dashscope") is not None and importlib.util.find_spec("tiktoken") is not None


@pytest.mark.skipif(
    not _has_qwen(), reason="needs Qwen's vocabulary; install it with: pip install tiktoken && pip install --no-deps dashscope"
)
def test_qwens_vocabulary_is_qwens() -> None:
    qwen = QwenBytePairs()
    (tokens,) = qwen.encode(["Hello world, 123 <|endoftext|>"])
    assert tokens[:5] == [9707, 1879, 11, 220, 16], "as Qwen2 has them"
    assert qwen.decode([qwen.separator, *tokens]) == "<|endoftext|>Hello world, 123 <|endoftext|>"
    assert (qwen.size, qwen.separator, qwen.mask) == (151_936, 151_643, 151_669)


def test_without_its_package_qwens_vocabulary_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps dashscope"):
        room._qwen_ranks()
