"""What a previous token's bias can lift, for every token of a head: the static half of the certificate, made once a head.

`kernels.certificate.bias_lists` is the same from exact sums; this one is by the matrix units, with a margin for the order of their sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.heads.markov import MarkovHead

_CHUNK_TOKENS = 2048  # previous tokens at once: 1.2 GB of fp32 biases at V = 151,936


@dataclass(frozen=True)
class KernelLists:
    """rows: [vocab, width] int32, of every token the rows with the largest biases; biases: [vocab, width] bf16, those; bound: [vocab] fp32, which no
    other row's bias exceeds in any order of fp32 sums; -inf where there is no other row."""

    rows: Tensor
    biases: Tensor
    bound: Tensor

    @property
    def nbytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in (self.rows, self.biases, self.bound))


def kernel_lists(head: MarkovHead, width: int) -> KernelLists:
    """The `width` largest biases after every token. A vocabulary of fewer rows is listed whole, its last row again and again."""
    device, vocab = head.device, head.vocab
    rows = torch.empty(vocab, width, dtype=torch.int32, device=device)
    biases = torch.empty(vocab, width, dtype=torch.bfloat16, device=device)
    bound = torch.full((vocab,), -torch.inf, device=device)
    longest = float(head.w2.float().norm(dim=1).max())
    for start in range(0, vocab, _CHUNK_TOKENS):
        latents = head.w1[start : min(start + _CHUNK_TOKENS, vocab)]
        most = _products(latents, head.w2).topk(min(width + 1, vocab), dim=1)
        listed = min(width, vocab)
        at = slice(start, start + len(latents))
        rows[at] = most.indices[:, listed - 1, None].int()
        biases[at] = most.values[:, listed - 1, None].bfloat16()
        rows[at, :listed] = most.indices[:, :listed].int()
        biases[at, :listed] = most.values[:, :listed].bfloat16()
        if vocab > width:
            # Twice the bound of kernels.agreement, for these sums and for any other; a sum of products is at most the product of norms.
            slack = 2 * (head.rank + 2) * 2.0**-23 * longest * latents.float().norm(dim=1)
            bound[at] = (most.values[:, width] + slack) * (1 + 2.0**-22 * most.values[:, width].sign())
    return KernelLists(rows, biases, bound)


def _products(latents: Tensor, w2: Tensor) -> Tensor:
    """[n, rank] x [vocab, rank] bf16 -> [n, vocab] fp32 sums."""
    if latents.is_cuda:
        return torch.mm(latents, w2.T, out_dtype=torch.float32)
    return latents.float() @ w2.float().T
