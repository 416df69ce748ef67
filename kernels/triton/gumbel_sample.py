"""x = argmax_v l_v / T + g_v, i.e. a draw from softmax(l / T): a Triton kernel for the best of every 1024 tokens, then torch's argmax and a gather.

Source: `gumbel_sample` of vLLM's `v1/worker/gpu/sample/gumbel.py`, the revision with hashed noise. The noise is that of `kernels.murmur`,
keyed by the request's seed, the position and the token: where a request stands in the batch does not matter. The kernel also writes the
logits as they are, before the temperature, to a cache. T <= 0 or NaN is a plain argmax. Ties go to the first lane of the first block.
A NaN score counts as -inf, and a row with nothing above -inf gets token 0.

Importing this module needs Triton; on CPU tensors also TRITON_INTERPRET=1 before the first import of Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.murmur import DRAFT_SALT, ROUND_TOKENS
from kernels.triton.murmur import hashed_gumbel, hashed_word

BLOCK = tl.constexpr(1024)
_SALT = tl.constexpr(DRAFT_SALT)
_ROUND_TOKENS = tl.constexpr(ROUND_TOKENS)


@triton.jit(do_not_specialize=["step"])
def _best_in_block(logits, cache, temperatures, seeds, rounds, step, block_score, block_token, logits_stride, cache_stride, vocab):
    """One program a (row, block): its logits to the cache, its best noisy score and that one's lowest token."""
    row, block = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    logit = tl.load(logits + row.to(tl.int64) * logits_stride + token, mask=inside, other=float("-inf"))
    tl.store(cache + row.to(tl.int64) * cache_stride + token, logit, mask=inside)

    score = logit.to(tl.float32)
    temperature = tl.load(temperatures + row)
    if temperature > 0:  # false for NaN too
        seed = tl.load(seeds + row)
        position = tl.load(rounds) * _ROUND_TOKENS + step + _SALT
        score = score / temperature + hashed_gumbel(hashed_word(seed, seed >> 32, position, token))
    score = tl.where(score == score, score, float("-inf"))

    best = tl.max(score, axis=0)
    slot = row * tl.num_programs(1) + block
    tl.store(block_score + slot, best)
    tl.store(block_token + slot, tl.min(tl.where(score == best, token, 2147483647), axis=0).to(tl.int64))


def gumbel_sample(logits: Tensor, cache: Tensor, temperature: Tensor, seed: Tensor, rounds: Tensor, step: int) -> Tensor:
    """One token a row. Three launches and their scratch; legal in graph capture.

    logits: [batch, vocab] bf16, contiguous along vocab; cache: [batch, vocab] bf16, written, contiguous along vocab; temperature: [batch] fp32;
    seed: [batch] int64; rounds: [1] int64, see `kernels.murmur.position_of`. Returns [batch] int64.
    """
    batch, vocab = logits.shape
    blocks = -(-vocab // BLOCK.value)
    score = torch.empty(batch, blocks, dtype=torch.float32, device=logits.device)
    token = torch.empty_like(score, dtype=torch.int64)
    _best_in_block[(batch, blocks)](logits, cache, temperature, seed, rounds, step, score, token, logits.stride(0), cache.stride(0), vocab)
    return token.gather(1, score.argmax(dim=1, keepdim=True))[:, 0]
