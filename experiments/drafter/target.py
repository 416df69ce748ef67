"""The target: a small causal transformer whose middle layers can be read, with a cache of keys and values that can be cut back."""

from __future__ import annotations

from dataclasses import dataclass

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


class Cache:
    """Keys and values of the tokens so far, for every layer [batch, heads, capacity, width / heads]; `length` [batch] of them count.

    A request that rejects drafts keeps its prefix: lower its `length` and what lies behind is overwritten.
    """

    def __init__(self, target: Target, batch: int, capacity: int) -> None:
        size = (batch, target.config.attention_heads, capacity, target.config.width // target.config.attention_heads)
        like = target.embedding.weight
        self.keys, self.values = ([torch.zeros(size, dtype=like.dtype, device=like.device) for _ in target.blocks] for _ in range(2))
        self.length = torch.zeros(batch, dtype=torch.int64, device=like.device)
        self.capacity = capacity


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

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    @torch.no_grad()
    def extend(self, tokens: Tensor, cache: Cache) -> Read:
        """Read `tokens` [batch, new] after what the cache has of each request, and add them to it.

        That they fit is the caller's affair: to ask would wait for the device in every round.
        """
        new = tokens.shape[1]
        positions = cache.length[:, None] + torch.arange(new, device=tokens.device)
        mask = (torch.arange(cache.capacity, device=tokens.device) <= positions[:, :, None])[:, None]
        x, taps = norm(self.embedding(tokens)), []
        for layer, block in enumerate(self.blocks):
            normed = norm(x)
            for stored, fresh in zip((cache.keys[layer], cache.values[layer]), block.keys_and_values(normed, positions), strict=True):
                stored.scatter_(2, positions[:, None, :, None].expand_as(fresh), fresh)
            x = block(x, block.queries(normed, positions), cache.keys[layer], cache.values[layer], mask)
            if layer in self.config.taps:
                taps.append(x)
        cache.length += new
        return Read(norm(x), torch.cat(taps, dim=-1))


def next_token_loss(target: Target, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of tokens [batch, context + 1] given those before them."""
    hidden = target(tokens[:, :-1]).hidden.flatten(0, 1)
    return next_token_entropy(hidden, target.lm_head.weight, tokens[:, 1:].flatten(), target.config.target.rows)
