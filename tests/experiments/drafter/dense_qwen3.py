"""Qwen3's layer again, from its equations: fp64, one head and one token at a time, rotations as complex numbers, no cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tests.experiments.drafter.released_layout import HEAD_WIDTH, HEADS, KEY_VALUE_HEADS

EPS, BASE = 1e-6, 1e6


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(x: Tensor, position: int) -> Tensor:
    """x: [width of a head]."""
    half = len(x) // 2
    angles = position * BASE ** (-2 * torch.arange(half, dtype=torch.float64) / len(x))
    pairs = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag])


def layer(
    weights: Mapping[str, Tensor], of: str, x: Tensor, places: list[int], seen: list[list[int]], context: Tensor | None = None
) -> Tensor:
    """x: [tokens, width], token i at places[i]. It sees the rows seen[i] of `context` [n, width], at positions 0 to n - 1, then of x."""
    w = {name.removeprefix(f"{of}."): weight.double() for name, weight in weights.items() if name.startswith(f"{of}.")}
    normed = rms(x, w["input_layernorm.weight"])
    read = normed if context is None else torch.cat([context, normed])
    positions = [*range(len(read) - len(x)), *places]
    heads = []
    for head in range(HEADS):
        own, shared = (slice(at * HEAD_WIDTH, (at + 1) * HEAD_WIDTH) for at in (head, head // (HEADS // KEY_VALUE_HEADS)))
        queries = rms(normed @ w["self_attn.q_proj.weight"][own].T, w["self_attn.q_norm.weight"])
        keys = rms(read @ w["self_attn.k_proj.weight"][shared].T, w["self_attn.k_norm.weight"])
        keys = torch.stack([turned(key, at) for key, at in zip(keys, positions, strict=True)])
        values = read @ w["self_attn.v_proj.weight"][shared].T
        rows = []
        for query, place, rows_seen in zip(queries, places, seen, strict=True):
            weight = torch.softmax(keys[rows_seen] @ turned(query, place) / HEAD_WIDTH**0.5, dim=0)
            rows.append(weight @ values[rows_seen])
        heads.append(torch.stack(rows))
    x = x + torch.cat(heads, dim=1) @ w["self_attn.o_proj.weight"].T
    normed = rms(x, w["post_attention_layernorm.weight"])
    gate = normed @ w["mlp.gate_proj.weight"].T
    return x + (gate * torch.sigmoid(gate) * (normed @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


def target(weights: Mapping[str, Tensor], layers: int, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """tokens [n] -> logits [n, vocab], and what every layer puts out [n, width], the embedding first."""
    x = weights["model.embed_tokens.weight"].double()[tokens]
    outputs, places = [x], list(range(len(tokens)))
    for number in range(layers):
        x = layer(weights, f"model.layers.{number}", x, places, [list(range(at + 1)) for at in places])
        outputs.append(x)
    lm_head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).double()
    return rms(x, weights["model.norm.weight"].double()) @ lm_head.T, outputs


def drafter(weights: Mapping[str, Tensor], layers: int, taps: Tensor, anchor: int, mask: int, block: int) -> Tensor:
    """taps [n, taps * width] of the n tokens before the anchor -> base logits [block, vocab] of its block."""
    context = rms(taps @ weights["fc.weight"].double().T, weights["hidden_norm.weight"].double())
    x = weights["embed_tokens.weight"].double()[torch.tensor([anchor, *[mask] * (block - 1)])]
    places = [len(taps) + step for step in range(block)]
    everything = list(range(len(taps) + block))
    for number in range(layers):
        x = layer(weights, f"layers.{number}", x, places, [everything] * block, context)
    return rms(x, weights["norm.weight"].double()) @ weights["lm_head.weight"].double().T
