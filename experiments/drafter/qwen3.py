"""Qwen3, dense, as a target: the layers that DSpark's Qwen3 drafters are made of too.

Source: the `qwen3` model of Hugging Face's transformers and the published configs. RMSNorm before attention and feed-forward, RMSNorm of
every query and key, rotary positions over a whole head, several query heads to one of keys and values, SwiGLU. Modules have the names that
their tensors have in checkpoints. Held against transformers with random weights; *not run on a released checkpoint*.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.drafter.target import Cache, Read
from experiments.drafter.transformer import rotate

# What the layers below assume, and whether a config says so.
_ASSUMED = {
    "model_type": lambda value: value == "qwen3",
    "hidden_act": lambda value: value == "silu",
    "attention_bias": lambda value: not value,
    "use_sliding_window": lambda value: not value,
    "rope_scaling": lambda value: value is None or value.get("rope_type", value.get("type")) == "default",
}


@dataclass(frozen=True)
class Qwen3Config:
    """Sizes. feed_forward: width inside the feed-forward layer; tied: whether the LM head is the embedding."""

    vocab: int
    width: int
    layers: int
    heads: int
    key_value_heads: int
    head_width: int
    feed_forward: int
    rotary_base: float
    norm_eps: float
    tied: bool

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> Qwen3Config:
        """Of a config.json.

        Raises:
            KeyError: a key is missing.
            ValueError: it says what these layers do not do.
        """
        rotary = config.get("rope_parameters") or {}  # transformers 5 moved the base there, and what was rope_scaling
        said = {**config, "rope_scaling": config.get("rope_scaling") or rotary or None}
        for key, holds in _ASSUMED.items():
            if key in said and not holds(said[key]):
                raise ValueError(f"{key} {said[key]!r} is not what this suite's Qwen3 does; take a dense Qwen3 with plain attention.")
        return cls(
            vocab=config["vocab_size"],
            width=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            key_value_heads=config["num_key_value_heads"],
            head_width=config["head_dim"],
            feed_forward=config["intermediate_size"],
            rotary_base=float(rotary.get("rope_theta") or config["rope_theta"]),
            norm_eps=config["rms_norm_eps"],
            tied=bool(config.get("tie_word_embeddings")),
        )


class Attention(nn.Module):
    """Who attends to what, and where keys and values are kept, is the caller's affair."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self._rotary_base = config.rotary_base
        queries, keys = config.heads * config.head_width, config.key_value_heads * config.head_width
        self.q_proj = nn.Linear(config.width, queries, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(config.width, keys, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(queries, config.width, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(config.head_width, config.norm_eps) for _ in range(2))

    def queries(self, normed: Tensor, positions: Tensor) -> Tensor:
        """[batch, tokens, width] at positions [batch, tokens] -> [batch, heads, tokens, width of a head]."""
        return rotate(self.q_norm(self._split(self.q_proj(normed))), positions, self._rotary_base)

    def keys_and_values(self, normed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        keys = rotate(self.k_norm(self._split(self.k_proj(normed))), positions, self._rotary_base)
        return keys, self._split(self.v_proj(normed))

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """visible: [batch, 1, tokens, keys] bool. Query heads that share keys and values are laid end to end as more tokens of one head:
        nothing is copied per query head, and every kernel of torch takes it."""
        group = queries.shape[1] // keys.shape[1]
        stacked = queries.unflatten(1, (-1, group)).flatten(2, 3)
        attended = functional.scaled_dot_product_attention(stacked, keys, values, attn_mask=visible.repeat(1, 1, group, 1))
        return self.o_proj(attended.unflatten(2, (group, -1)).flatten(1, 2).transpose(1, 2).flatten(-2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.q_norm.normalized_shape[0])).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(config.width, config.feed_forward, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(config.feed_forward, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, both residual. The caller norms what goes into the attention with `input_layernorm`."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), FeedForward(config)
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(config.width, config.norm_eps) for _ in range(2))

    def forward(self, x: Tensor, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        x = x + self.self_attn(queries, keys, values, visible)
        return x + self.mlp(self.post_attention_layernorm(x))


class Layers(nn.ModuleList):
    """Layers, one after another."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(Layer(config) for _ in range(config.layers))

    def __iter__(self) -> Iterator[Layer]:
        return cast("Iterator[Layer]", super().__iter__())


class Qwen3(nn.Module):
    """A target (`experiments.drafter.target.TargetModel`). taps: layers whose outputs a drafter reads, increasing; -1 is the embedding."""

    def __init__(self, config: Qwen3Config, taps: Sequence[int]) -> None:
        super().__init__()
        self.config, self.taps = config, tuple(taps)
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.layers = Layers(config)
        self.norm = nn.RMSNorm(config.width, config.norm_eps)
        self.lm_head = nn.Linear(config.width, config.vocab, bias=False)

    @property
    def key_value_size(self) -> tuple[int, int, int]:
        return self.config.layers, self.config.key_value_heads, self.config.head_width

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., width] -> [.., vocab]."""
        return self.lm_head(hidden)

    @torch.no_grad()
    def extend(self, tokens: Tensor, cache: Cache) -> Read:
        """Read `tokens` [batch, new] after what the cache has of each request, and add them to it. They must fit."""
        positions = cache.positions(tokens.shape[1])
        visible = cache.visible(positions)
        x = self.embedding(tokens)
        taps = [x] if -1 in self.taps else []
        for number, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)
            keys, values = cache.store(number, *layer.self_attn.keys_and_values(normed, positions), positions)
            x = layer(x, layer.self_attn.queries(normed, positions), keys, values, visible)
            if number in self.taps:
                taps.append(x)
        cache.length += tokens.shape[1]
        return Read(self.norm(x), torch.cat(taps, dim=-1))
