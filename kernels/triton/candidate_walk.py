"""One Triton program walks a request's whole block over candidates: the base half by base logit, the table half by bias.

Source: the design of SGLang's `dspark_markov_topk.py` and vLLM's `topk_markov.py`. A step scores fp32 base + bias: in the base half the bias is
W2[id] u, in the table half it was computed before. A token in both halves belongs to the table half, whose bias counts. The lowest token of the
largest score wins. A NaN score counts as -inf; a step in which every score is -inf gives token 0.

Importing this module needs Triton; on CPU tensors also TRITON_INTERPRET=1 before the first import of Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.murmur import hashed_gumbel, hashed_word

_CHUNK = 256  # of the rank: rows of W2 in registers at once
_LAUNCH: dict[str, Any] = {"num_warps": 8}
_NOBODY = tl.constexpr(2147483647)


@dataclass(frozen=True)
class Kept:
    """What the walk leaves for a verifier, of max_batch requests and max_steps steps.

    scores:  [max_batch, max_steps, vocab] fp32, -inf but for the candidates of the last launch
    touched: [max_batch, max_steps, candidates] int32, where they are not
    rounds:  [1] int64, launches so far
    """

    scores: Tensor
    touched: Tensor
    rounds: Tensor

    @classmethod
    def empty(cls, batch: int, steps: int, vocab: int, candidates: int, device: torch.device) -> Kept:
        scores = torch.full((batch, steps, vocab), -torch.inf, dtype=torch.float32, device=device)
        touched = torch.zeros(batch, steps, candidates, dtype=torch.int32, device=device)
        return cls(scores, touched, torch.zeros(1, dtype=torch.int64, device=device))


@triton.jit
def _larger(score):
    """NaN becomes -inf."""
    return tl.where(score == score, score, float("-inf"))


@triton.jit
def _noisy(score, token, temperature, seed, position):
    """score / T + Gumbel of (seed, position, token); the score itself where T <= 0 or NaN."""
    noise = hashed_gumbel(hashed_word(seed, seed >> 32, position, token))
    return tl.where(temperature > 0, _larger(score / temperature + noise), score)


@triton.jit
def _forget(scores, touched, vocab, steps, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr):
    """A request's scores are -inf again, by what the last launch touched: candidates, and token 0 where a step had none."""
    at = tl.arange(0, BLOCK)
    inside = at < steps * CANDIDATES
    step = at // CANDIDATES
    column = tl.load(touched + at, mask=inside, other=0)
    tl.store(scores + step.to(tl.int64) * vocab + column, float("-inf"), mask=inside)
    tl.store(scores + step.to(tl.int64) * vocab, float("-inf"), mask=inside)
    tl.debug_barrier()  # other threads write these columns next


@triton.jit
def _keep(scores, touched, column, token, score, mine):
    """One half's scores and where they are."""
    tl.store(scores + token, score, mask=mine)
    tl.store(touched + column, token.to(tl.int32), mask=mine)


@triton.jit
def _walk(
    w1, w2, table_token, table_bias, top_token, top_logit, base, anchor, temperature, seed, scores, touched, rounds, tokens,
    base_request_stride, base_step_stride, tokens_stride, vocab, steps, kept_steps,
    RANK: tl.constexpr, CHUNK: tl.constexpr, TOP: tl.constexpr, TABLE: tl.constexpr, TOP_BLOCK: tl.constexpr, TABLE_BLOCK: tl.constexpr,
    TOUCHED_BLOCK: tl.constexpr, SAMPLING: tl.constexpr,
):  # fmt: skip
    """One program a request. Shapes: see `walk`."""
    request = tl.program_id(0).to(tl.int64)
    top, table = tl.arange(0, TOP_BLOCK), tl.arange(0, TABLE_BLOCK)
    is_top, is_table = top < TOP, table < TABLE
    row = base + request * base_request_stride
    previous = tl.minimum(tl.maximum(tl.load(anchor + request), 0), vocab - 1)
    if SAMPLING:
        hot, key, round = tl.load(temperature + request), tl.load(seed + request), tl.load(rounds)
        scores += request * kept_steps * vocab
        touched += request * kept_steps * (TOP + TABLE)
        _forget(scores, touched, vocab, kept_steps, TOP + TABLE, TOUCHED_BLOCK)
    for step in range(steps):
        place = (request * steps + step) * TOP + top
        first = tl.load(top_token + place, mask=is_top, other=0)
        first_base = tl.load(top_logit + place, mask=is_top, other=float("-inf")).to(tl.float32)
        second = tl.load(table_token + previous * TABLE + table, mask=is_table, other=-1)
        second_bias = tl.load(table_bias + previous * TABLE + table, mask=is_table, other=0.0)
        second_base = tl.load(row + second, mask=is_table, other=float("-inf")).to(tl.float32)

        bias = tl.zeros([TOP_BLOCK], tl.float32)
        for start in tl.static_range(0, RANK, CHUNK):
            rank = start + tl.arange(0, CHUNK)
            latent = tl.load(w1 + previous * RANK + rank, mask=rank < RANK, other=0.0).to(tl.float32)
            rows = tl.load(w2 + first[:, None] * RANK + rank[None, :], mask=is_top[:, None] & (rank < RANK)[None, :], other=0.0)
            bias += tl.sum(rows.to(tl.float32) * latent[None, :], axis=1)

        in_both = tl.max((first[:, None] == second[None, :]).to(tl.int32), axis=1) > 0
        mine = is_top & (in_both == 0)
        first_score = tl.where(mine, _larger(first_base + bias), float("-inf"))
        second_score = _larger(second_base + second_bias)
        first_key, second_key = first_score, second_score
        if SAMPLING:
            position = round * 256 + step + 1073741824
            first_key = _noisy(first_score, first, hot, key, position)
            second_key = _noisy(second_score, second, hot, key, position)
        best = tl.maximum(tl.max(first_key, axis=0), tl.max(second_key, axis=0))
        first_token = tl.min(tl.where(first_key == best, first, _NOBODY), axis=0)
        second_token = tl.min(tl.where(second_key == best, second, _NOBODY), axis=0)
        previous = tl.where(best > float("-inf"), tl.minimum(first_token, second_token.to(tl.int64)), 0)
        tl.store(tokens + request * tokens_stride + step, previous)
        if SAMPLING:
            _keep(scores, touched, top, first, first_score, mine)
            _keep(scores, touched, TOP + table, second, second_score, is_table)
            tl.debug_barrier()
            tl.store(scores, 0.0, mask=best == float("-inf"))  # nobody to draw from: all mass on token 0, so that a softmax is finite
            scores += vocab
            touched += TOP + TABLE
        row += base_step_stride


def walk(
    w1: Tensor, w2: Tensor, table: tuple[Tensor, Tensor], tops: int, base: Tensor, anchor: Tensor, tokens: Tensor,
    drawn: tuple[Tensor, Tensor, Kept] | None,
) -> None:  # fmt: skip
    """One top-k over all base logits of the block, then one launch.

    w1: [target vocab, rank] bf16; w2: [vocab, rank] bf16; table: [vocab, m] int32 tokens and fp32 biases; tops: base candidates of a step;
    base: [batch, steps, vocab] bf16, contiguous along vocab; anchor: [batch] int64, clamped; tokens: [batch, steps] int64, written;
    drawn: [batch] fp32 temperatures, [batch] int64 seeds and what is kept, or None for a greedy walk
    """
    batch, steps, vocab = base.shape
    rank, width = w2.shape[1], table[0].shape[1]
    found = base.topk(tops, dim=2, sorted=False)
    temperature, seed, kept = drawn if drawn else (None, None, None)
    constants: dict[str, Any] = {
        "RANK": rank,
        "CHUNK": min(triton.next_power_of_2(rank), _CHUNK),
        "TOP": tops,
        "TABLE": width,
        "TOP_BLOCK": triton.next_power_of_2(tops),
        "TABLE_BLOCK": triton.next_power_of_2(width),
        "TOUCHED_BLOCK": triton.next_power_of_2(kept.scores.shape[1] * (tops + width)) if kept else 1,
        "SAMPLING": kept is not None,
    }
    _walk[(batch,)](
        w1, w2, table[0], table[1], found.indices, found.values, base, anchor, temperature, seed,
        kept.scores if kept else None, kept.touched if kept else None, kept.rounds if kept else None, tokens,
        base.stride(0), base.stride(1), tokens.stride(0), vocab, steps, kept.scores.shape[1] if kept else 0, **constants, **_LAUNCH,
    )  # fmt: skip
