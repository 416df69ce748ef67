"""Two Triton kernels that are torch.argmax of [batch, vocab]: the best token of every 4096, then the best of these.

Source: vLLM's `v1/worker/gpu/sample/greedy_argmax.py`. A NaN beats everything, then the larger value, then the lower index: what torch does.
Like the original it leaves to torch what it does not serve: vocab below 4096, a strided last axis, types other than bf16 and fp32.

Importing this module needs Triton; on CPU tensors also TRITON_INTERPRET=1 before the first import of Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = tl.constexpr(4096)
_LAUNCH: dict[str, Any] = {"num_warps": 8}


@triton.jit
def _best(value):
    """The value that wins in a block: NaN if there is one."""
    nan = value != value
    top = tl.max(tl.where(nan, float("-inf"), value), axis=0)
    return tl.where(tl.max(nan.to(tl.int32), axis=0) != 0, float("nan"), top)


@triton.jit
def _first(best, value, token):
    """The lowest token that has the best value. Padding lanes are -inf with tokens above all others."""
    wins = tl.where(best == best, value == best, value != value)
    return tl.min(tl.where(wins, token, 2147483647), axis=0)


@triton.jit
def _best_in_part(logits, part_value, part_token, stride, vocab):
    """One program a (row, part)."""
    row, part = tl.program_id(0), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    logit = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    best = _best(logit)
    slot = row * tl.num_programs(1) + part
    tl.store(part_value + slot, best)
    tl.store(part_token + slot, _first(best, logit, token))


@triton.jit
def _best_of_parts(part_value, part_token, out, parts, BLOCK: tl.constexpr):
    """One program a row."""
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    inside = part < parts
    value = tl.load(part_value + row * parts + part, mask=inside, other=float("-inf"))
    token = tl.load(part_token + row * parts + part, mask=inside, other=2147483647)
    tl.store(out + row, _first(_best(value), value, token).to(tl.int64))


def greedy_argmax(logits: Tensor) -> Tensor:
    """[batch, vocab] -> [batch] int64, the same as torch.argmax. Two launches and their scratch; legal in graph capture."""
    batch, vocab = logits.shape
    if vocab < PART.value or logits.stride(1) != 1 or logits.dtype not in (torch.bfloat16, torch.float32):
        return logits.argmax(dim=1)
    parts = -(-vocab // PART.value)
    value = torch.empty(batch, parts, dtype=torch.float32, device=logits.device)
    token = torch.empty_like(value, dtype=torch.int32)
    out = torch.empty(batch, dtype=torch.int64, device=logits.device)
    _best_in_part[(batch, parts)](logits, value, token, logits.stride(0), vocab, **_LAUNCH)
    _best_of_parts[(batch,)](value, token, out, parts, BLOCK=triton.next_power_of_2(parts))
    return out
