"""Losses over a whole vocabulary whose forward pass makes the gradients too, so that logits live for one chunk of rows and are made once.

At V = 151,936 the logits of a training step are 10 GB in bf16, and autograd would keep two to four times that in fp32. Here a chunk's logits become its
gradients at once, by formulas that one compiled function holds: with p the softmax of the logits and q the teacher's,

    d cross-entropy / d logits = p - [label]
    d |p - q|_1 / d logits     = p (s - sum(p s)), s = sign(p - q)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from experiments.drafter.compiled import compiled


def next_token_entropy(hidden: Tensor, head: Tensor, labels: Tensor, rows: int) -> Tensor:
    """Mean cross-entropy of labels [n] int64 given hidden [n, width] and the LM head [vocab, width]; its gradient goes to both. rows: a chunk's."""
    low_head, low_hidden = _low(head), _low(hidden)
    weights = torch.full(labels.shape, 1 / len(labels), dtype=_wide(low_hidden).dtype, device=labels.device)
    total, of_head, of_hidden = weights.new_zeros(()), torch.zeros_like(head), list[Tensor]()
    for own, wanted, weight in zip(*(each.split(rows) for each in (low_hidden, labels, weights)), strict=True):
        entropy, to_own, to_head = _entropy_chunk(own, low_head, wanted, weight)
        total += (weight * entropy).sum()
        of_hidden.append(to_own)
        of_head += to_head
    return _with_gradient(total, (hidden, torch.cat(of_hidden)), (head, of_head))


@dataclass(frozen=True)
class DraftLoss:
    """total has gradients; entropy and distance [n] have none: cross-entropy, and L1 distance of the distribution to the teacher's."""

    total: Tensor
    entropy: Tensor
    distance: Tensor


@dataclass(frozen=True)
class Guesses:
    """What a drafter's logits are made of, [n] rows of it: hidden [n, width] under the frozen LM head, latent [n, rank] under w2 [vocab, rank];
    teacher [n, width]: the target's own hidden states there; labels: [n] int64."""

    hidden: Tensor
    latent: Tensor
    teacher: Tensor
    labels: Tensor


def draft_loss(guesses: Guesses, head: Tensor, w2: Tensor, of_entropy: Tensor, of_distance: Tensor, rows: int) -> DraftLoss:
    """The sum of of_entropy [n] times cross-entropy and of_distance [n] times L1 distance; its gradient goes to hidden, latent and w2."""
    low_head, low_w2 = _low(head), _low(w2)
    hidden, latent, teacher = (_low(each) for each in (guesses.hidden, guesses.latent, guesses.teacher))
    of_w2, made = torch.zeros_like(w2), list[tuple[Tensor, ...]]()
    for chunk in zip(*(each.split(rows) for each in (hidden, latent, teacher, guesses.labels, of_entropy, of_distance)), strict=True):
        *parts, to_w2 = _draft_chunk(low_head, low_w2, *chunk)
        made.append(tuple(parts))
        of_w2 += to_w2
    entropy, distance, of_hidden, of_latent = (torch.cat(part) for part in zip(*made, strict=True))
    total = (of_entropy * entropy + of_distance * distance).sum()
    return DraftLoss(_with_gradient(total, (guesses.hidden, of_hidden), (guesses.latent, of_latent), (w2, of_w2)), entropy, distance)


@compiled
def _entropy_chunk(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy [n], and what its sum with `weights` gives hidden and head."""
    logits = _wide(hidden @ head.T)
    total = torch.logsumexp(logits, dim=-1, keepdim=True)
    slope = (weights[:, None] * (torch.exp(logits - total) - _one_hot(labels, logits))).to(hidden.dtype)
    return _entropy(logits, total, labels), slope @ head, slope.T @ hidden


@compiled
def _draft_chunk(
    head: Tensor, w2: Tensor, hidden: Tensor, latent: Tensor, teacher: Tensor, labels: Tensor, of_entropy: Tensor, of_distance: Tensor
) -> tuple[Tensor, ...]:
    """Cross-entropy and distance [n], and what their weighted sum gives hidden, latent and w2."""
    both = torch.cat([head, w2], dim=1)  # one product for base logits and bias
    logits, wanted = _wide(torch.cat([hidden, latent], dim=1) @ both.T), _wide(teacher @ head.T)
    total = torch.logsumexp(logits, dim=-1, keepdim=True)
    p, q = torch.exp(logits - total), torch.exp(wanted - torch.logsumexp(wanted, dim=-1, keepdim=True))
    sign = torch.sign(p - q)
    of_logits = of_entropy[:, None] * (p - _one_hot(labels, p)) + of_distance[:, None] * p * (sign - (p * sign).sum(dim=-1, keepdim=True))
    slope = of_logits.to(hidden.dtype)
    to_hidden, to_latent = (slope @ both).split([head.shape[1], w2.shape[1]], dim=1)
    return _entropy(logits, total, labels), (p - q).abs().sum(dim=-1), to_hidden, to_latent, slope.T @ latent


def _entropy(logits: Tensor, total: Tensor, labels: Tensor) -> Tensor:
    return (total - logits.gather(1, labels[:, None]))[:, 0]


def _one_hot(labels: Tensor, like: Tensor) -> Tensor:
    """[n, vocab]; a comparison, so that nothing is written where it is fused."""
    return (torch.arange(like.shape[1], device=labels.device) == labels[:, None]).to(like.dtype)


def _low(x: Tensor) -> Tensor:
    """Without history, and as autocast would give it to a product of matrices: once, not for every chunk."""
    x, device = x.detach(), x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _wide(x: Tensor) -> Tensor:
    """In fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _with_gradient(value: Tensor, *known: tuple[Tensor, Tensor]) -> Tensor:
    """`value`, with these inputs and its gradients to them."""
    inputs, gradients = zip(*known, strict=True)
    return _Known.apply(value, gradients, *inputs)


class _Known(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*(gradient.to(each.dtype) for gradient, each in zip(gradients, inputs, strict=True)))
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(scale * gradient for gradient in ctx.saved_tensors)
