"""Text to tokens and back: byte pairs trained on the text at hand, or Qwen's own."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SEPARATOR, MASK = "<|separator|>", "<|mask|>"
# Qwen2's split, as its tokenizer_config states it.
_QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN_VOCAB, _QWEN_SEPARATOR, _QWEN_MASK = 151_936, 151_643, 151_669  # logits; <|endoftext|>; the mask of DSpark's Qwen3 drafters


class Vocabulary(Protocol):
    """size: number of logits. separator: stands before every document. mask: a slot whose token is to be guessed."""

    size: int
    separator: int
    mask: int

    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class TokenizerVocabulary:
    """A tokenizer of the `tokenizers` library, with the number of logits and the special tokens that a model uses."""

    def __init__(self, tokenizer: Tokenizer, size: int, separator: int, mask: int) -> None:
        self._tokenizer = tokenizer
        self.size, self.separator, self.mask = size, separator, mask

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)


class BytePairs(TokenizerVocabulary):
    """Byte-level byte pairs, trained on the text at hand."""

    def __init__(self, json: str) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(json)
        super().__init__(tokenizer, tokenizer.get_vocab_size(), _id(tokenizer, SEPARATOR), _id(tokenizer, MASK))
        self.json = json

    @classmethod
    def trained(cls, texts: Sequence[str], size: int) -> BytePairs:
        """Raises:
        ValueError: the text has not enough pairs for so large a vocabulary.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[SEPARATOR, MASK], initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        if tokenizer.get_vocab_size() != size:
            raise ValueError(
                f"this text gives a vocabulary of {tokenizer.get_vocab_size()} byte pairs, not {size}; take more text or fewer."
            )
        return cls(tokenizer.to_str())


class QwenBytePairs:
    """Qwen's 151,643 byte pairs and 293 more logits, as its models have them. The ranks ship inside the package dashscope, which is not imported."""

    size, separator, mask = _QWEN_VOCAB, _QWEN_SEPARATOR, _QWEN_MASK

    def __init__(self) -> None:
        import tiktoken

        lines = (line.split() for line in _qwen_ranks().read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        self._encoding = tiktoken.Encoding(
            "qwen", pat_str=_QWEN_SPLIT, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": _QWEN_SEPARATOR}
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encoding.encode_ordinary_batch(list(texts))

    def decode(self, tokens: Sequence[int]) -> str:
        return self._encoding.decode([token for token in tokens if token <= _QWEN_SEPARATOR])


def _id(tokenizer: Tokenizer, name: str) -> int:
    found = tokenizer.token_to_id(name)
    if found is None:
        raise ValueError(f"this vocabulary has no token {name}, so it is none of this suite's.")
    return int(found)


def _qwen_ranks() -> Path:
    found = find_spec("dashscope")
    path = Path(found.origin).parent / "resources" / "qwen.tiktoken" if found and found.origin else None
    if path is None or not path.exists():
        raise FileNotFoundError("Qwen's vocabulary comes with the package dashscope; install it with: pip install --no-deps dashscope")
    return path
