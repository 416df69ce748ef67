"""The corpus in tokens: one long training sequence, and held-out documents by source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.drafter.corpus import Document
from experiments.drafter.pair import PairConfig
from experiments.drafter.vocabulary import BytePairs, QwenBytePairs, Vocabulary


@dataclass(frozen=True)
class HeldOut:
    """A document that no model was trained on: tokens [n] int64, the separator first."""

    source: str
    name: str
    tokens: Tensor


@dataclass(frozen=True)
class Text:
    """train: [tokens] int64 of all other documents, each after a separator."""

    train: Tensor
    held_out: tuple[HeldOut, ...]

    def counts(self, vocab: int) -> Tensor:
        """[vocab] int64: how often each token stands in `train`."""
        return torch.bincount(self.train, minlength=vocab)


def vocabulary_for(config: PairConfig, documents: Sequence[Document]) -> Vocabulary:
    """The vocabulary of the config; byte pairs see training documents only.

    Raises:
        ValueError: it has another size than the config says.
    """
    if config.vocabulary == "qwen":
        found: Vocabulary = QwenBytePairs()
    else:
        found = BytePairs.trained([document.text for document in documents if not document.held_out], config.vocab)
    if found.size != config.vocab:
        raise ValueError(f"pair.vocab: {config.vocabulary} has {found.size} logits; got {config.vocab}")
    return found


def tokenize(documents: Sequence[Document], vocabulary: Vocabulary) -> Text:
    """Every document in tokens, in the order given."""
    train = [own for _, own in _encoded([document for document in documents if not document.held_out], vocabulary)]
    return Text(torch.cat(train), held_out(documents, vocabulary))


def held_out(documents: Sequence[Document], vocabulary: Vocabulary) -> tuple[HeldOut, ...]:
    """Those of them that no model is trained on."""
    encoded = _encoded([document for document in documents if document.held_out], vocabulary)
    return tuple(HeldOut(document.source, document.name, own) for document, own in encoded)


def _encoded(documents: Sequence[Document], vocabulary: Vocabulary) -> Iterator[tuple[Document, Tensor]]:
    """Each with its tokens, the separator first."""
    for document, encoded in zip(documents, vocabulary.encode([document.text for document in documents]), strict=True):
        yield document, torch.tensor([vocabulary.separator, *encoded], dtype=torch.int64)
