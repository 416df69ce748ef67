"""The serial heads of DSpark, and one as Domino's, as they are trained: previous tokens are given, so all steps of a block are made at once.

Source: DeepSpec's `deepspec/modeling/dspark/markov_head.py`; for Domino SGLang's `python/sglang/srt/speculative/domino_utils.py`. Each gives a latent
[.., steps, rank]; its bias on the logits is W2 times that.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

_STD = 0.02  # DeepSpec's initializer_range


class HeadSizes(Protocol):
    """What decides a serial head: its kind and the sizes of its tensors; width is the backbone's."""

    @property
    def head(self) -> str: ...

    @property
    def vocab(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def rank(self) -> int: ...


class MarkovHead(nn.Module):
    """latent = W1[previous]."""

    def __init__(self, config: HeadSizes) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab, config.rank)
        self.markov_w2 = nn.Linear(config.rank, config.vocab, bias=False)
        for weight in (self.markov_w1.weight, self.markov_w2.weight):
            nn.init.normal_(weight, std=_STD)

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """previous: [.., steps] int64, the token before each step; hidden: [.., steps, width] of the backbone."""
        return self.markov_w1(previous)


class GatedHead(MarkovHead):
    """latent = sigmoid(G [hidden; e] + b) * e, with e = W1[previous]."""

    def __init__(self, config: HeadSizes) -> None:
        super().__init__(config)
        self.gate_proj = _linear(config.width + config.rank, config.rank)

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        embedded = self.markov_w1(previous)
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1))) * embedded


class RnnHead(MarkovHead):
    """A gated state s: (a, c, o) = J [s; e; hidden] + b, latent = tanh(o), then s = sigmoid(a) s + (1 - sigmoid(a)) tanh(c)."""

    def __init__(self, config: HeadSizes) -> None:
        super().__init__(config)
        self.joint_proj = _linear(2 * config.rank + config.width, 3 * config.rank)

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        embedded, latents = self.markov_w1(previous), []
        state = torch.zeros_like(embedded[..., 0, :])
        for step in range(previous.shape[-1]):
            joint = self.joint_proj(torch.cat([state, embedded[..., step, :], hidden[..., step, :]], dim=-1))
            keep, candidate, output = joint.chunk(3, dim=-1)
            latents.append(torch.tanh(output))
            keep = torch.sigmoid(keep)
            state = keep * state + (1 - keep) * torch.tanh(candidate)
        return torch.stack(latents, dim=-2)


class DominoHead(MarkovHead):
    """latent = SiLU(F [hidden; h]), with h = GRU(e, h) over the tokens so far, from zero; no bias anywhere, and none on the first step's logits.

    Domino embeds tokens by the target's matrix and its h is a quarter as wide as hidden at 4,096; here e = W1[previous], which the confidence head
    reads too, and h is as wide as hidden.
    """

    def __init__(self, config: HeadSizes) -> None:
        super().__init__(config)
        self.prefix_gru = nn.GRU(config.rank, config.width, bias=False, batch_first=True)
        self.embed_proj = nn.Linear(2 * config.width, config.rank, bias=False)
        for weight in (*self.prefix_gru.parameters(), self.embed_proj.weight):
            nn.init.normal_(weight, std=_STD)

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        embedded = self.markov_w1(previous)
        states, _ = self.prefix_gru(embedded.flatten(0, -3))
        latent = functional.silu(self.embed_proj(torch.cat([hidden, states.view(*previous.shape, -1)], dim=-1)))
        return torch.cat([torch.zeros_like(latent[..., :1, :]), latent[..., 1:, :]], dim=-2)


def serial_head(config: HeadSizes) -> MarkovHead:
    """The head that the config names."""
    return {"markov": MarkovHead, "gated": GatedHead, "rnn": RnnHead, "domino": DominoHead}[config.head](config)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=_STD)
    nn.init.zeros_(layer.bias)
    return layer
