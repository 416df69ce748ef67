"""The released DSpark drafters of Qwen3 targets: Qwen3 layers over the target's taps, and a serial head.

Source: DeepSpec's `deepspec/modeling/dspark` (`qwen3/modeling.py`, `common.py`, `markov_head.py`). The taps are projected and normed once
for all layers, each of which makes keys and values of them as of its own normed tokens. Embedding and LM head are the target's. The
confidence head, which only decides how many tokens are sent to the verifier, is left out. *Not run on a released checkpoint*.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.drafter.block_layout import layout_of
from experiments.drafter.qwen3 import Layers, Qwen3Config
from experiments.drafter.serial_heads import serial_head
from experiments.drafter.target import TargetModel

HEADS = {"vanilla": "markov", "gated": "gated", "rnn": "rnn"}  # a checkpoint's word and ours


@dataclass(frozen=True)
class DSparkConfig:
    """layers: sizes of the drafter's own; block: tokens guessed at once; mask: the token that stands for one; taps: of the target;
    head, rank: the serial head."""

    layers: Qwen3Config
    block: int
    mask: int
    taps: tuple[int, ...]
    head: str
    rank: int

    @property
    def vocab(self) -> int:
        return self.layers.vocab

    @property
    def width(self) -> int:
        return self.layers.width

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> DSparkConfig:
        """Of a config.json.

        Raises:
            KeyError: a key is missing.
            ValueError: it asks for what this drafter does not do.
        """
        layers, kind = Qwen3Config.from_json(config), config["markov_head_type"]
        if kind not in HEADS:
            raise ValueError(f"markov_head_type {kind!r} is none of {', '.join(HEADS)}; take a drafter with one of these heads.")
        drafted = config.get("draft_vocab_size") or layers.vocab
        if drafted != layers.vocab:
            raise ValueError(f"draft_vocab_size {drafted} is not vocab_size {layers.vocab}; take a drafter of the whole vocabulary.")
        taps = tuple(config["target_layer_ids"])
        return cls(layers, config["block_size"], config["mask_token_id"], taps, HEADS[kind], config["markov_rank"])


class DSpark(nn.Module):
    """A drafter (`experiments.drafter.decodable.DrafterModel`)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.config = config
        width, eps = config.width, config.layers.norm_eps
        self.fc = nn.Linear(len(config.taps) * width, width, bias=False)
        self.hidden_norm, self.norm = (nn.RMSNorm(width, eps) for _ in range(2))
        self.layers = Layers(config.layers)
        self.markov_head = serial_head(config)

    def forward(self, taps: Tensor, anchors: Tensor, positions: Tensor, embedding: nn.Embedding) -> Tensor:
        """Hidden states [batch, anchors, block, width] of all blocks.

        taps: [batch, context, taps * width]; anchors: [batch, anchors] int64 tokens, at `positions` [batch, anchors] of the context; what a
        tap holds from there on is not read. embedding: the target's.
        """
        layout = layout_of(anchors, positions, taps.shape[1], self.config.block, self.config.mask)
        context = self.hidden_norm(self.fc(taps))
        x = embedding(layout.tokens)
        for layer in self.layers:
            normed = layer.input_layernorm(x)
            keys, values = layer.self_attn.keys_and_values(torch.cat([context, normed], dim=1), layout.places)
            x = layer(x, layer.self_attn.queries(normed, layout.slots), keys, values, layout.visible)
        return self.norm(x).unflatten(1, (anchors.shape[1], self.config.block))

    def base_logits(self, target: TargetModel, taps: Tensor, anchors: Tensor, positions: Tensor) -> Tensor:
        """[batch, anchors, block, vocab]: what a serial walk starts from."""
        return target.logits(self(taps, anchors, positions, target.embedding))
