"""Blocks of tokens to be guessed: what stands in them, at which positions, and what each token sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockLayout:
    """The blocks of a batch, one after another: `queries` = anchors x block tokens.

    tokens:  [batch, queries] int64, an anchor and masks in each block
    slots:   [batch, queries] int64, their positions
    places:  [batch, context + queries] int64, positions of all keys: those of the context, then those of the blocks
    visible: [batch, 1, queries, context + queries] bool, the context before the own anchor and the own block
    """

    tokens: Tensor
    slots: Tensor
    places: Tensor
    visible: Tensor


def layout_of(anchors: Tensor, positions: Tensor, context: int, block: int, mask: int) -> BlockLayout:
    """anchors: [batch, anchors] int64 tokens, at `positions` [batch, anchors] of `context` tokens; mask: the token of a slot to guess."""
    batch, count = anchors.shape
    tokens = torch.full((batch, count, block), mask, device=anchors.device)
    tokens[:, :, 0] = anchors
    slots = (positions[:, :, None] + torch.arange(block, device=anchors.device)).flatten(1)
    of_context = torch.arange(context, device=anchors.device)
    places = torch.cat([of_context.expand(batch, -1), slots], dim=1)
    before = of_context < positions.repeat_interleave(block, dim=1)[:, :, None]
    owner = torch.arange(count * block, device=anchors.device) // block
    own = (owner[:, None] == owner).expand(batch, -1, -1)
    return BlockLayout(tokens.flatten(1), slots, places, torch.cat([before, own], dim=2)[:, None])
