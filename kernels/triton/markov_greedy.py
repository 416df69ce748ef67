"""Two Triton kernels that are a whole greedy step of the Markov head: x = argmax_v L_v + W2_v u with u = W1[previous], all in fp32.

Source: MarkovGreedyStep of SGLang's `kernels/ops/speculative/dspark/dspark_draft_model.py`. A program owns 256 tokens of one request, so
every request reads W2 again, mostly from L2. No bias and no logit reaches memory. Ties go to the lowest token. A NaN score counts as
-inf, and a request with nothing above -inf gets token 0.

Importing this module needs Triton; on CPU tensors also TRITON_INTERPRET=1 before the first import of Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = tl.constexpr(256)
CHUNK = tl.constexpr(32)  # of the rank, summed at a time


@triton.jit
def _best_in_tile(previous, w1, w2, base, tile_score, tile_token, base_stride, vocab, RANK: tl.constexpr):
    """One program a (request, tile): the best score and its lowest token."""
    row, tile = tl.program_id(0), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    inside = token < vocab
    latent = w1 + tl.load(previous + row) * RANK
    weights = w2 + token.to(tl.int64)[:, None] * RANK
    bias = tl.zeros([TILE], dtype=tl.float32)
    for start in tl.static_range(0, RANK, CHUNK):
        at = start + tl.arange(0, CHUNK)
        u = tl.load(latent + at, mask=at < RANK, other=0.0).to(tl.float32)
        w = tl.load(weights + at[None, :], mask=inside[:, None] & (at < RANK)[None, :], other=0.0).to(tl.float32)
        bias += tl.sum(w * u[None, :], axis=1)

    score = tl.load(base + row.to(tl.int64) * base_stride + token, mask=inside, other=float("-inf")).to(tl.float32) + bias
    score = tl.where(score == score, score, float("-inf"))
    best = tl.max(score, axis=0)
    slot = row * tl.num_programs(1) + tile
    tl.store(tile_score + slot, best)
    tl.store(tile_token + slot, tl.min(tl.where(score == best, token, 2147483647), axis=0))


@triton.jit
def _best_of_tiles(tile_score, tile_token, out, tiles, BLOCK: tl.constexpr):
    """One program a request: the lowest token of the best score. Tile 0 always has a token below vocab, so the winner has one too."""
    row = tl.program_id(0)
    tile = tl.arange(0, BLOCK)
    inside = tile < tiles
    score = tl.load(tile_score + row * tiles + tile, mask=inside, other=float("-inf"))
    token = tl.load(tile_token + row * tiles + tile, mask=inside, other=2147483647)
    winner = tl.min(tl.where(score == tl.max(score, axis=0), token, 2147483647), axis=0)
    tl.store(out + row, winner.to(tl.int64))


def greedy_step(previous: Tensor, base: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """One token a request. Two launches and their scratch; legal in graph capture.

    previous: [batch] int64 in [0, rows of w1); base: [batch, vocab] bf16, contiguous along vocab; w1: [at least vocab, rank] and
    w2: [vocab, rank] bf16, contiguous. Returns [batch] int64.
    """
    batch, vocab = base.shape
    tiles = -(-vocab // TILE.value)
    score = torch.empty(batch, tiles, dtype=torch.float32, device=base.device)
    token = torch.empty_like(score, dtype=torch.int32)
    out = torch.empty(batch, dtype=torch.int64, device=base.device)
    rank: Any = w2.shape[1]  # Triton makes a constexpr of an int
    _best_in_tile[(batch, tiles)](previous, w1, w2, base, score, token, base.stride(0), vocab, RANK=rank)
    _best_of_tiles[(batch,)](score, token, out, tiles, BLOCK=triton.next_power_of_2(tiles))
    return out
