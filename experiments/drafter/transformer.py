"""The parts that target and drafter share: RMS norms without weights, rotary positions, normed queries and keys, squared ReLU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.drafter.compiled import compiled

_ROTARY_BASE = 10_000.0


def norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],))


def linear(inputs: int, outputs: int, *, zero: bool = False) -> nn.Linear:
    """No bias. What ends a residual branch starts at zero, so that a deep stack starts as the identity."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.zeros_(layer.weight) if zero else nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def rotate(x: Tensor, positions: Tensor, base: float = _ROTARY_BASE) -> Tensor:
    """x: [batch, heads, tokens, width] by positions [batch or 1, tokens]; pair i of a head turns by position / base**(2i / width)."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, device=x.device) / half)
    angles = (positions[:, None, :, None] * rates).float()
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Block(nn.Module):
    """Attention and a feed-forward layer, both residual. Who attends to what is the caller's affair."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (linear(width, width) for _ in range(3))
        self.merge = linear(width, width, zero=True)
        self.widen, self.narrow = linear(width, 4 * width), linear(4 * width, width, zero=True)

    def split(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> [batch, heads, tokens, width / heads]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def queries(self, normed: Tensor, positions: Tensor) -> Tensor:
        return rotate(norm(self.split(self.query(normed))), positions)

    def keys_and_values(self, normed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(norm(self.split(self.key(normed))), positions), self.split(self.value(normed))

    def forward(self, x: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """mask: [.., tokens, keys] bool, true where a token may look; None is causal."""
        attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None)
        x = x + self.merge(attended.transpose(1, 2).flatten(-2))
        return x + self.narrow(functional.relu(self.widen(norm(x))).square())


@compiled
def through(block: Block, x: Tensor, positions: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """x [batch, tokens, width] through a block of a whole pass; one compiled form serves all layers.

    context: [batch, earlier, width], normed, what a token may look at beside x; positions: [batch or 1, earlier + tokens]; mask: as `Block.forward`
    """
    normed = norm(x)
    seen = normed if context is None else torch.cat([context, normed], dim=1)
    return block(x, block.queries(normed, positions[:, -x.shape[1] :]), *block.keys_and_values(seen, positions), mask)


class Stack(nn.ModuleList):
    """Blocks, one after another."""

    def __init__(self, count: int, width: int, heads: int) -> None:
        super().__init__(Block(width, heads) for _ in range(count))

    def __iter__(self) -> Iterator[Block]:
        return cast("Iterator[Block]", super().__iter__())
