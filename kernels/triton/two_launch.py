"""Two Triton kernels a step, no GEMM call: score a part of the vocabulary for 16 requests on the tensor cores, then take the best part.

Source: vLLM's `models/kimi_k3/nvidia/specialized_decode/drafter/markov.py`, as its API page describes it; the page quotes the
host code, not the kernels. A key is the rounded logit, or logit / T + hashed noise where T > 0. NaN keys count as -inf. The first of the
largest keys wins; a row in which every key is -inf gives token 0.

Importing this module needs Triton; on CPU tensors also TRITON_INTERPRET=1 before the first import of Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import murmur
from kernels.triton.bf16 import product, rounded
from kernels.triton.murmur import hashed_gumbel, hashed_word
from kernels.walk import WalkInputs

ROWS, PART, TILE, NOISE_BLOCK = tl.constexpr(16), tl.constexpr(256), tl.constexpr(64), tl.constexpr(1024)
LAUNCH: dict[str, Any] = {"num_warps": 4, "num_stages": 2}
DRAFT_SALT, ROUND_TOKENS = tl.constexpr(murmur.DRAFT_SALT), tl.constexpr(murmur.ROUND_TOKENS)
_NOWHERE = tl.constexpr(2147483647)  # above every token


class Noise(IntEnum):
    """Where a step has its noise from."""

    NONE = 0  # every row is greedy
    STORED = 1  # `draw_noise` wrote it before the steps
    HASHED = 2  # hashed in the step


_STORED, _HASHED = tl.constexpr(Noise.STORED.value), tl.constexpr(Noise.HASHED.value)


@dataclass(frozen=True)
class Parts:
    """What the kernels tell each other. key: fp32 [max_batch, parts], the best of each part of the vocabulary; token: int32, where it stands;
    previous: [max_batch] int64, the last step's tokens."""

    key: Tensor
    token: Tensor
    previous: Tensor

    @classmethod
    def empty(cls, batch: int, vocab: int, device: torch.device) -> Parts:
        shape = (batch, -(-vocab // PART.value))
        token, previous = torch.empty(shape, dtype=torch.int32, device=device), torch.empty(batch, dtype=torch.int64, device=device)
        return cls(torch.empty(shape, device=device), token, previous)


@triton.jit
def _noise_of_row(noise, noise_row, noise_step, seeds, rounds, vocab, steps):
    """One program a (block, request and step): the noise that its key will get."""
    token = tl.program_id(0) * NOISE_BLOCK + tl.arange(0, NOISE_BLOCK)
    row, step = (tl.program_id(1) // steps).to(tl.int64), (tl.program_id(1) % steps).to(tl.int64)
    seed = tl.load(seeds + row)
    position = tl.load(rounds) * ROUND_TOKENS + step + DRAFT_SALT
    drawn = hashed_gumbel(hashed_word(seed, seed >> 32, position, token))
    tl.store(noise + row * noise_row + step * noise_step + token, drawn, mask=token < vocab)


@triton.jit(do_not_specialize=["step"])
def _score(
    previous, anchors, w1, w2, base, base_row, base_step, cache, cache_row, cache_step, temperature, seeds, rounds, noise, noise_row,
    noise_step, part_key, part_token, batch, vocab, step, RANK: tl.constexpr, FIRST: tl.constexpr, NOISE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """One program a (16 rows, 256 tokens): the rows' latents times its tiles of W2; logits to the cache; each row's best key in the part."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part, step = tl.program_id(1), step.to(tl.int64)
    live, rank, wide = row < batch, tl.arange(0, RANK), row.to(tl.int64)
    if FIRST:
        token_before = tl.minimum(tl.maximum(tl.load(anchors + row, mask=live, other=0), 0), vocab - 1)
    else:
        token_before = tl.load(previous + row, mask=live, other=0)
    latent = tl.load(w1 + token_before[:, None] * RANK + rank[None, :], mask=live[:, None], other=0.0)
    if NOISE != 0:
        divisor = tl.load(temperature + row, mask=live, other=0.0)
        seed = tl.load(seeds + row, mask=live, other=0)
        position = tl.load(rounds) * ROUND_TOKENS + step + DRAFT_SALT
        hot = divisor > 0
        divisor = tl.where(hot, divisor, 1.0)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    best_token = tl.full([ROWS], 0, tl.int32) + part * PART
    for start in range(0, PART, TILE):
        token = part * PART + start + tl.arange(0, TILE)
        inside = token < vocab
        weights = tl.load(w2 + token.to(tl.int64)[:, None] * RANK + rank[None, :], mask=inside[:, None], other=0.0)
        bias = rounded(product(latent, tl.trans(weights))).to(tl.float32)
        here = live[:, None] & inside[None, :]
        own = tl.load(base + wide[:, None] * base_row + step * base_step + token[None, :], mask=here, other=0.0).to(tl.float32)
        logit = rounded(own + bias)
        if KEEP:
            tl.store(cache + wide[:, None] * cache_row + step * cache_step + token[None, :], logit, mask=here)

        key = logit.to(tl.float32)
        if NOISE == _STORED:
            at = noise + wide[:, None] * noise_row + step * noise_step + token[None, :]
            drawn = tl.load(at, mask=here & hot[:, None], other=0.0)
            key = tl.where(hot[:, None], key / divisor[:, None] + drawn, key)
        if NOISE == _HASHED:
            drawn = hashed_gumbel(hashed_word(seed[:, None], (seed >> 32)[:, None], position, token[None, :]))
            key = tl.where(hot[:, None], key / divisor[:, None] + drawn, key)
        key = tl.where(inside[None, :] & (key == key), key, float("-inf"))
        top = tl.max(key, axis=1)
        where = tl.min(tl.where(key == top[:, None], token[None, :], _NOWHERE), axis=1)
        best_token = tl.where(top > best, where, best_token)
        best = tl.maximum(top, best)
    slot = wide * tl.num_programs(1) + part
    tl.store(part_key + slot, best, mask=live)
    tl.store(part_token + slot, best_token, mask=live)


@triton.jit(do_not_specialize=["step"])
def _select(part_key, part_token, previous, tokens, tokens_row, tokens_step, parts, step, PARTS: tl.constexpr):
    """One program a row: the token of the first of the largest parts."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    key = tl.load(part_key + row * parts + part, mask=part < parts, other=float("-inf"))
    first = tl.min(tl.where(key == tl.max(key, axis=0), part, _NOWHERE), axis=0)
    token = tl.load(part_token + row * parts + first).to(tl.int64)
    tl.store(previous + row, token)
    tl.store(tokens + row * tokens_row + step.to(tl.int64) * tokens_step, token)


def draw_noise(inputs: WalkInputs, noise: Tensor, rounds: Tensor) -> None:
    """One launch: the Gumbel noise of every row and step. noise: [batch, steps, vocab] fp32, contiguous along vocab; rounds: [1] int64."""
    grid = (triton.cdiv(inputs.vocab, NOISE_BLOCK.value), inputs.batch * inputs.steps)
    _noise_of_row[grid](noise, noise.stride(0), noise.stride(1), inputs.seed, rounds, inputs.vocab, inputs.steps)


def step_in_two(
    inputs: WalkInputs,
    step: int,
    w1: Tensor,
    w2: Tensor,
    parts: Parts,
    tokens: Tensor,
    cache: Tensor | None,
    source: Noise,
    noise: Tensor | None,
    rounds: Tensor,
) -> None:
    """Two launches: the step's tokens. Anchors are clamped into the vocabulary where step 0 reads them. Legal in graph capture.

    w1: [.., rank], w2: [vocab, rank] bf16, contiguous; tokens: [batch, steps] int64, column `step` is written; cache: [batch, steps, vocab]
    bf16, contiguous along vocab, takes the corrected logits if there is one; noise: [batch, steps, vocab] fp32 where `source` is STORED;
    rounds: [1] int64, read where there is noise.
    """
    base, count = inputs.base_logits, -(-inputs.vocab // PART.value)
    # Where there is none, a pointer that nobody follows.
    kept, drawn = base if cache is None else cache, parts.key if noise is None else noise
    constants: dict[str, Any] = {"RANK": w1.shape[1], "FIRST": step == 0, "NOISE": source.value, "KEEP": cache is not None}
    _score[(triton.cdiv(inputs.batch, ROWS.value), count)](
        parts.previous,
        inputs.anchor,
        w1,
        w2,
        base,
        base.stride(0),
        base.stride(1),
        kept,
        kept.stride(0),
        kept.stride(1),
        inputs.temperature,
        inputs.seed,
        rounds,
        drawn,
        drawn.stride(0),
        drawn.stride(1),
        parts.key,
        parts.token,
        inputs.batch,
        inputs.vocab,
        step,
        **constants,
        **LAUNCH,
    )
    best = (parts.key, parts.token, parts.previous, tokens, tokens.stride(0), tokens.stride(1), count, step)
    _select[(inputs.batch,)](*best, PARTS=triton.next_power_of_2(count))
