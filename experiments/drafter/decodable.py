"""What a decoder asks of a pair, whoever trained it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from experiments.drafter.serial_heads import MarkovHead
from experiments.drafter.target import TargetModel
from experiments.drafter.vocabulary import Vocabulary


class DrafterModel(Protocol):
    """Base logits [batch, anchors, block, vocab] of the blocks that start at `anchors`, and the weights of the head that corrects them."""

    @property
    def markov_head(self) -> MarkovHead: ...

    def base_logits(self, target: TargetModel, taps: Tensor, anchors: Tensor, positions: Tensor) -> Tensor: ...


class PairSizes(Protocol):
    """block: tokens drafted at once; taps: of the target's layers; width: of each."""

    @property
    def name(self) -> str: ...

    @property
    def block(self) -> int: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def width(self) -> int: ...


class DecodablePair(Protocol):
    """A target and its drafter on one device, with their vocabulary."""

    @property
    def config(self) -> PairSizes: ...

    @property
    def target(self) -> TargetModel: ...

    @property
    def drafter(self) -> DrafterModel: ...

    @property
    def vocabulary(self) -> Vocabulary: ...
