"""The serial heads of DSpark as they are trained: previous tokens are given, so all steps of a block are made at once.

Source: DeepSpec's `deepspec/modeling/dspark/markov_head.py`. Each gives a latent [.., steps, rank]; its bias on the logits is W2 times that.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

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


def serial_head(config: HeadSizes) -> MarkovHead:
    """The head that the config names."""
    return {"markov": MarkovHead, "gated": GatedHead, "rnn": RnnHead}[config.head](config)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=_STD)
    nn.init.zeros_(layer.bias)
    return layer
