"""Two Triton kernels that draw x = argmax_v softmax(l / T)_v / E_v with E_v ~ Exp(1): an exponential race.

Source: the fast sampler of SGLang's `kernels/ops/speculative/dspark/dspark_draft_model.py`. A greedy row uses E = 1, so it is a
plain argmax with the lowest index on ties, as far as exp resolves: two logits closer than about 2^-25 T are a tie.
Keys stay defined everywhere: NaN and -inf lanes are out of the race (key -1), +inf beats every finite logit, a
tile or a row with nobody in the race gives way, and then token 0.

Importing this module needs Triton; on CPU tensors also TRITON_INTERPRET=1 before the first import of Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = tl.constexpr(1024)


@triton.jit
def _race_in_tile(logits, noise, temperature, greedy, tile_key, tile_max, tile_token, logits_stride, noise_stride, vocab):
    """One program a (row, tile): the best key exp(s - tile max) / E, its lowest token, and the tile's maximum of s = l / T."""
    row, tile = tl.program_id(0), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    inside = token < vocab
    logit = tl.load(logits + row.to(tl.int64) * logits_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    drawn = tl.load(noise + row.to(tl.int64) * noise_stride + token, mask=inside, other=1.0)
    exponential = tl.where(tl.load(greedy + row) != 0, 1.0, drawn)

    score = logit / tl.load(temperature + row)
    racing = score > float("-inf")  # false for NaN too
    score = tl.where(racing, score, float("-inf"))
    top = tl.max(score, axis=0)
    below_top = tl.where(score == top, 0.0, score - top)  # inf - inf would be NaN
    key = tl.where(racing, tl.exp(below_top) / exponential, -1.0)
    key = tl.where(key == key, key, -1.0)

    best = tl.max(key, axis=0)
    slot = row * tl.num_programs(1) + tile
    tl.store(tile_key + slot, best)
    tl.store(tile_max + slot, top)
    tl.store(tile_token + slot, tl.min(tl.where(key == best, token, 2147483647), axis=0))


@triton.jit
def _race_of_tiles(tile_key, tile_max, tile_token, out, tiles, BLOCK: tl.constexpr):
    """One program a row: keys brought to the row's maximum, the best one's lowest token; token 0 if nobody raced."""
    row = tl.program_id(0)
    tile = tl.arange(0, BLOCK)
    inside = tile < tiles
    key = tl.load(tile_key + row * tiles + tile, mask=inside, other=-1.0)
    tile_top = tl.load(tile_max + row * tiles + tile, mask=inside, other=float("-inf"))
    token = tl.load(tile_token + row * tiles + tile, mask=inside, other=2147483647)

    racing = key >= 0
    top = tl.max(tl.where(racing, tile_top, float("-inf")), axis=0)
    below_top = tl.where(tile_top == top, 0.0, tile_top - top)
    key = tl.where(racing, key * tl.exp(below_top), -1.0)
    key = tl.where(key == key, key, -1.0)

    best = tl.max(key, axis=0)
    winner = tl.min(tl.where(key == best, token, 2147483647), axis=0)
    tl.store(out + row, winner.to(tl.int64))  # nobody raced: every key is -1 and the lowest token is 0


def race(logits: Tensor, temperature: Tensor, greedy: Tensor, noise: Tensor) -> Tensor:
    """One token a row. Two launches and their scratch; legal in graph capture.

    logits: [batch, vocab] bf16, contiguous along vocab; temperature: [batch] fp32 > 0; greedy: [batch] int32, non-zero for E = 1;
    noise: [batch, vocab] fp32 Exp(1). Returns [batch] int64.
    """
    batch, vocab = logits.shape
    tiles = -(-vocab // TILE.value)
    key = torch.empty(batch, tiles, dtype=torch.float32, device=logits.device)
    top, token = torch.empty_like(key), torch.empty_like(key, dtype=torch.int32)
    out = torch.empty(batch, dtype=torch.int64, device=logits.device)
    _race_in_tile[(batch, tiles)](logits, noise, temperature, greedy, key, top, token, logits.stride(0), noise.stride(0), vocab)
    _race_of_tiles[(batch,)](key, top, token, out, tiles, BLOCK=triton.next_power_of_2(tiles))
    return out


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, on CPU tensors."""
    return not isinstance(_race_in_tile, triton.runtime.JITFunction)
