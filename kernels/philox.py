"""Philox4x32-10 in torch: 128 random bits for every (counter, key), without state. `kernels/cuda/common/philox.cuh` gives the same words.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the constants of the Random123 library.
A uint32 lives in an int64 here. Products wrap modulo 2^64, so their low and high halves are those of the unsigned product.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """[..., 4] words for [..., 4] counters and [..., 2] keys that broadcast against each other; all int64 in [0, 2^32)."""
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = _high(product1) ^ c1 ^ k0, _high(product0) ^ c3 ^ k1
        c1, c3 = product1 & MASK, product0 & MASK
        k0, k1 = (k0 + _WEYL[0]) & MASK, (k1 + _WEYL[1]) & MASK
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)


def philox_key(seed: Tensor) -> Tensor:
    """[..., 2] key of [...] int64 seeds: the low and the high word in two's complement."""
    return torch.stack((seed & MASK, _high(seed)), dim=-1)


def _high(x: Tensor) -> Tensor:
    return (x >> 32) & MASK
