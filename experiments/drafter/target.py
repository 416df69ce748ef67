"""The target: a small causal transformer whose middle layers can be read, with a cache of keys and values that can be cut back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from experiments.drafter.chunked_loss import next_token_entropy
from experiments.drafter.pair import PairConfig
from experiments.drafter.transformer import Stack, linear, norm, through


@dataclass(frozen=True)
class Read:
    """What a pass over tokens gives: hidden [batch, tokens, width] for the LM head, taps [batch, tokens, taps * width] for a drafter."""

    hidden: Tensor
    taps: Tensor


class TargetModel(Protocol):
    """What a decoder and a drafter ask of a target. key_value_size: of its cache, how many layers, heads a layer and numbers a head."""

    @property
    def embedding(self) -> nn.Embedding: ...

    @property
    def key_value_size(self) -> tuple[int, int, int]: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def extend(self, tokens: Tensor, cache: Cache) -> Read: ...


class Cache:
    """Keys and values of the tokens so far, for every layer [batch, heads, capacity, width of a head]; `length` [batch] of them count.

    A request that rejects drafts keeps its prefix: lower its `length` and what lies behind is overwritten.
    """

    def __init__(self, target: TargetModel, batch: int, capacity: int) -> None:
        layers, heads, width = target.key_value_size
        size, like = (batch, heads, capacity, width), target.embedding.weight
        self.keys, self.values = ([torch.zeros(size, dtype=like.dtype, device=like.device) for _ in range(layers)] for _ in range(2))
        self.length = torch.zeros(batch, dtype=torch.int64, device=like.device)
        self.capacity = capacity

    def positions(self, new: int) -> Tensor:
        """[batch, new] int64: where the next tokens of each request stand."""
        return self.length[:, None] + torch.arange(new, device=self.length.device)

    def visible(self, positions: Tensor) -> Tensor:
        """[batch, 1, new, capacity] bool: a token at `positions` [batch, new] sees itself and those before it."""
        return (torch.arange(self.capacity, device=positions.device) <= positions[:, :, None])[:, None]

    def store(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys and values [batch, heads, new, width] at `positions`; all of the layer's are returned."""
        for stored, fresh in ((self.keys[layer], keys), (self.values[layer], values)):
            stored.scatter_(2, positions[:, None, :, None].expand_as(fresh), fresh)
        return self.keys[layer], self.values[layer]


class Target(nn.Module):
    """Embedding, blocks, final norm and LM head."""

    def __init__(self, config: PairConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = Stack(config.layers, config.width, config.attention_heads)
        self.lm_head = linear(config.width, config.vocab)
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.normal_(self.lm_head.weight, std=0.005)

    def forward(self, tokens: Tensor) -> Read:
        """tokens: [batch, tokens] int64; every token sees itself and those before it."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x, taps = norm(self.embedding(tokens)), []
        for layer, block in enumerate(self.blocks):
            x = through(block, x, positions)
            if layer in self.config.taps:
                taps.append(x)
        return Read(norm(x), torch.cat(taps, dim=-1))

    @property
    def key_value_size(self) -> tuple[int, int, int]:
        heads = self.config.attention_heads
        return self.config.layers, heads, self.config.width // heads

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    @torch.no_grad()
    def extend(self, tokens: Tensor, cache: Cache) -> Read:
        """Read `tokens` [batch, new] after what the cache has of each request, and add them to it.

        That they fit is the caller's affair: to ask would wait for the device in every round.
        """
        positions = cache.positions(tokens.shape[1])
        mask = cache.visible(positions)
        x, taps = norm(self.embedding(tokens)), []
        for layer, block in enumerate(self.blocks):
            normed = norm(x)
            keys, values = cache.store(layer, *block.keys_and_values(normed, positions), positions)
            x = block(x, block.queries(normed, positions), keys, values, mask)
            if layer in self.config.taps:
                taps.append(x)
        cache.length += tokens.shape[1]
        return Read(norm(x), torch.cat(taps, dim=-1))


def next_token_loss(target: Target, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of tokens [batch, context + 1] given those before them."""
    hidden = target(tokens[:, :-1]).hidden.flatten(0, 1)
    return next_token_entropy(hidden, target.lm_head.weight, tokens[:, 1:].flatten(), target.config.target.rows)
