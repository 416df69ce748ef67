"""The parallel part of a DSpark drafter: all tokens of a block guessed in one pass, from hidden states of the target's middle layers.

Source: DeepSpec's `deepspec/modeling/dspark`, at our sizes. A block starts at an anchor, the last known token: its queries are the anchor's
embedding and gamma - 1 masks. Keys and values are those of the target's taps at all positions before the anchor, projected once, and those of the
block itself, which sees all of itself. Embedding and LM head are the target's and stay as they are.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from experiments.drafter.block_layout import layout_of
from experiments.drafter.pair import PairConfig
from experiments.drafter.transformer import Stack, linear, norm, through


class Backbone(nn.Module):
    """Everything but the serial head. mask: the token whose embedding stands for a slot to be guessed."""

    def __init__(self, config: PairConfig, mask: int) -> None:
        super().__init__()
        self.block, self.mask = config.block, mask
        self.project = linear(len(config.taps) * config.width, config.width)
        self.blocks = Stack(config.draft_layers, config.width, config.attention_heads)

    def forward(self, taps: Tensor, anchors: Tensor, positions: Tensor, embedding: Tensor) -> Tensor:
        """Hidden states [batch, anchors, block, width] of all blocks.

        taps: [batch, context, taps * width]; anchors: [batch, anchors] int64 tokens, at `positions` [batch, anchors] of the context; what a
        tap holds from there on is not read.
        embedding: [vocab, width], the target's.
        """
        layout = layout_of(anchors, positions, taps.shape[1], self.block, self.mask)
        context = norm(self.project(taps))
        x = norm(functional.embedding(layout.tokens, embedding)).to(context.dtype)
        for block in self.blocks:
            x = through(block, x, layout.places, context, layout.visible)
        return norm(x).unflatten(1, (anchors.shape[1], self.block))
