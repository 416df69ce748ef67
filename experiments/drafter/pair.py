"""What a target and its drafter are: sizes, text and training. One frozen dataclass; `configs/pair/` has its values."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

VOCABULARIES = ("byte_pairs", "qwen")
HEADS = ("markov", "gated", "rnn", "domino")
OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class TrainingConfig:
    """How long and in what portions a model is trained.

    steps:     optimizer steps; batch: sequences of `context` tokens a step
    rate:      of the optimizer on the matrices of the blocks, after warm-up
    rows:      rows of logits at once; bounds the scratch, which is several times 4 rows vocab bytes
    optimizer: of the matrices of the blocks; all else has AdamW. Muon learns more in a step, which on a CPU takes three times as long
    """

    steps: int
    batch: int
    rate: float
    rows: int = 8192
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer: {self.optimizer!r} is none of {', '.join(OPTIMIZERS)}")
        for key in ("steps", "batch", "rows"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: must be at least 1; got {getattr(self, key)}")


@dataclass(frozen=True)
class PairConfig:
    """A pair.

    vocabulary:   "byte_pairs" is trained on the text itself, "qwen" is Qwen's own; vocab is the number of logits
    width, layers, attention_heads: of the target
    taps:         target layers whose outputs the drafter reads; draft_layers: its own
    head, rank:   the serial head
    block:        tokens that the drafter guesses at once, gamma
    context:      tokens of a training sequence; anchors: blocks that start in each
    corpus_mb:    text to read, before tokens
    """

    name: str
    vocabulary: str
    vocab: int
    width: int
    layers: int
    attention_heads: int
    taps: tuple[int, ...]
    draft_layers: int
    context: int
    anchors: int
    corpus_mb: float
    target: TrainingConfig
    drafter: TrainingConfig
    head: str = "markov"
    rank: int = 256
    block: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for key, values in (("vocabulary", VOCABULARIES), ("head", HEADS)):
            if getattr(self, key) not in values:
                raise ValueError(f"{key}: {getattr(self, key)!r} is none of {', '.join(values)}")
        for key in ("vocab", "width", "layers", "attention_heads", "draft_layers", "context", "anchors", "rank", "block"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: must be at least 1; got {getattr(self, key)}")
        if self.width % (2 * self.attention_heads):
            raise ValueError(f"width: {self.width} does not give {self.attention_heads} attention heads an even width each")
        if not self.taps or not set(self.taps) <= set(range(self.layers)):
            raise ValueError(f"taps: needs layers from 0 to {self.layers - 1}; got {list(self.taps)}")
        if self.context < 2 * self.block:
            raise ValueError(f"context: must be at least two blocks of {self.block}; got {self.context}")

    def assert_walked(self) -> None:
        """Raises:
        ValueError: its head is one that no backend walks.
        """
        if self.head != "markov":
            raise ValueError(f"pair: backends walk markov heads only; {self.name} has head {self.head}, so take another pair")

    @property
    def key(self) -> str:
        """Twelve hex digits of everything that decides the weights but the text; see `experiments.drafter.checkpoint`."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class ReleasedConfig:
    """A pair that others trained and released.

    target, drafter: repositories of the Hugging Face hub, each in a folder of that name (`experiments.drafter.released` says where), or paths
    """

    name: str
    target: str
    drafter: str
