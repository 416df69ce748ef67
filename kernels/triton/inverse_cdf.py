"""Two Triton kernels that end a step after its bias GEMM: add, keep, weigh by blocks; then draw one token a request by inverse CDF.

Source: the text of vLLM pull request 64442; the kernels themselves were not seen. A weight is exp((l - top) / T) of the kept bf16 logits l,
with the block's own top, so no sum overflows. NaN and -inf have no weight; +inf has 1, beside which nothing finite counts. A row without any weight gives token 0.

Importing this module needs Triton; on CPU tensors also TRITON_INTERPRET=1 before the first import of Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import murmur
from kernels.triton.bf16 import rounded
from kernels.triton.murmur import hashed_uniform, hashed_word
from kernels.walk import WalkInputs

BLOCK = tl.constexpr(1024)
DRAFT_SALT, ROUND_TOKENS = tl.constexpr(murmur.DRAFT_SALT), tl.constexpr(murmur.ROUND_TOKENS)
_NOWHERE = tl.constexpr(2147483647)  # above every place


@dataclass(frozen=True)
class Blocks:
    """What kernel 1 tells kernel 2 of every block of the vocabulary, each [max_batch, blocks].

    top: fp32, its largest logit that is not NaN; mass: fp32, the sum of its weights (sampled rows); token: int32, where its top first stands
    (greedy rows)
    """

    top: Tensor
    mass: Tensor
    token: Tensor

    @classmethod
    def empty(cls, batch: int, vocab: int, device: torch.device) -> Blocks:
        shape = (batch, -(-vocab // BLOCK.value))
        top, mass = torch.empty(shape, device=device), torch.empty(shape, device=device)
        return cls(top, mass, torch.empty(shape, dtype=torch.int32, device=device))


@triton.jit
def _weight(logit, top, temperature):
    """exp((logit - top) / T); where infinities meet it is 1 at the top and 0 elsewhere."""
    weight = tl.where(logit == top, 1.0, tl.exp((logit - top) / temperature))
    return tl.where((logit > float("-inf")) & (weight == weight), weight, 0.0)


@triton.jit
def _without_nan(logit):
    return tl.where(logit == logit, logit, float("-inf"))


@triton.jit
def _pick(weight, place, u):
    """The place whose share of the weights holds u times their sum, and how far into that share it lies, in [0, 1].

    Without any weight place 0. Rounding may leave nothing beyond u: then the last place that has weight. A running sum may fall a little
    where it should stay, so a place without weight is never taken by it.
    """
    running = tl.cumsum(weight, axis=0)
    threshold = u * tl.sum(weight, axis=0)
    weighs = weight > 0
    first = tl.min(tl.where(weighs & (running > threshold), place, _NOWHERE), axis=0)
    picked = tl.minimum(first, tl.max(tl.where(weighs, place, 0), axis=0))
    own = tl.sum(tl.where(place == picked, weight, 0.0), axis=0)
    end = tl.sum(tl.where(place == picked, running, 0.0), axis=0)
    into = tl.where(own > 0, (threshold - (end - own)) / own, 0.0)
    return picked, tl.minimum(tl.maximum(into, 0.0), 1.0)


@triton.jit(do_not_specialize=["step"])
def _add_and_weigh(
    base, base_row, base_step, bias, cache, cache_row, cache_step, block_top, block_mass, block_token, temperature, vocab, step
):
    """One program a (block, row): rho(base + bias) to the cache; the block's top and its mass, or in a greedy row where the top stands."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    own = tl.load(base + row * base_row + step.to(tl.int64) * base_step + token, mask=inside, other=0.0).to(tl.float32)
    logit = rounded(own + tl.load(bias + row * vocab + token, mask=inside, other=0.0).to(tl.float32))
    tl.store(cache + row * cache_row + step.to(tl.int64) * cache_step + token, logit, mask=inside)

    logit = tl.where(inside, _without_nan(logit.to(tl.float32)), float("-inf"))
    top = tl.max(logit, axis=0)
    divisor = tl.load(temperature + row)
    slot = row * tl.num_programs(0) + block
    tl.store(block_top + slot, top)
    if divisor > 0:
        tl.store(block_mass + slot, tl.sum(_weight(logit, top, divisor), axis=0))
    else:
        tl.store(block_token + slot, tl.min(tl.where(logit == top, token, _NOWHERE), axis=0))


@triton.jit(do_not_specialize=["step"])
def _select(
    cache, cache_row, cache_step, block_top, block_mass, block_token, temperature, seeds, rounds, tokens, tokens_row, tokens_step,
    w1, latents, vocab, rank, blocks, step, BLOCKS: tl.constexpr, RANK: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """One program a row: a block, a token inside it, and that token's latent for the next GEMM where there are more steps."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    top = tl.load(block_top + row * blocks + block, mask=block < blocks, other=float("-inf"))
    best = tl.max(top, axis=0)
    divisor = tl.load(temperature + row)
    if divisor > 0:
        mass = tl.load(block_mass + row * blocks + block, mask=block < blocks, other=0.0) * _weight(top, best, divisor)
        seed = tl.load(seeds + row)
        position = tl.load(rounds) * ROUND_TOKENS + step + DRAFT_SALT
        picked, into = _pick(mass, block, hashed_uniform(hashed_word(seed, seed >> 32, position, step)))
        lane = tl.arange(0, BLOCK)
        place = cache + row * cache_row + step.to(tl.int64) * cache_step + picked * BLOCK + lane
        logit = _without_nan(tl.load(place, mask=picked * BLOCK + lane < vocab, other=float("-inf")).to(tl.float32))
        inner, _ = _pick(_weight(logit, tl.max(logit, axis=0), divisor), lane, into)
        token = picked * BLOCK + inner
    else:
        first = tl.min(tl.where(top == best, block, _NOWHERE), axis=0)
        token = tl.load(block_token + row * blocks + first)
    tl.store(tokens + row * tokens_row + step.to(tl.int64) * tokens_step, token.to(tl.int64))
    if MORE:
        lane = tl.arange(0, RANK)
        latent = tl.load(w1 + token.to(tl.int64) * rank + lane, mask=lane < rank)
        tl.store(latents + row * rank + lane, latent, mask=lane < rank)


def finish_step(
    inputs: WalkInputs, step: int, bias: Tensor, cache: Tensor, blocks: Blocks, rounds: Tensor, tokens: Tensor, w1: Tensor, latents: Tensor
) -> None:
    """Two launches: the step's tokens from its bias. Legal in graph capture.

    bias: [batch, vocab] bf16, contiguous; cache: [batch, steps, vocab] bf16, contiguous along vocab, takes the corrected logits;
    rounds: [1] int64, read; tokens: [batch, steps] int64, column `step` is written; w1: [.., rank] bf16, contiguous; latents: [batch, rank]
    bf16, contiguous, takes the winners' rows of w1 unless this is the last step.
    """
    base, count, rank = inputs.base_logits, -(-inputs.vocab // BLOCK.value), w1.shape[1]
    constants: dict[str, Any] = {
        "BLOCKS": triton.next_power_of_2(count),
        "RANK": triton.next_power_of_2(rank),
        "MORE": step + 1 < inputs.steps,
    }
    kept = (cache, cache.stride(0), cache.stride(1), blocks.top, blocks.mass, blocks.token, inputs.temperature)
    _add_and_weigh[(count, inputs.batch)](base, base.stride(0), base.stride(1), bias, *kept, inputs.vocab, step)
    out = (tokens, tokens.stride(0), tokens.stride(1))
    _select[(inputs.batch,)](*kept, inputs.seed, rounds, *out, w1, latents, inputs.vocab, rank, count, step, **constants)
