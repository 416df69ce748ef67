"""Training of a pair: the target on text, then the drafter on what the target makes of the same text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from experiments.drafter.drafter import CROSS_ENTROPY, Drafter, drafter_loss
from experiments.drafter.snapshot import Snapshot
from experiments.drafter.target import Target, next_token_loss

_WARMUP_STEPS = 60
_EMBEDDING_RATE, _LM_HEAD_RATE, _SERIAL_RATE = 0.02, 0.003, 1e-3
_CLIP = 1.0
# With cross-entropy at 0.1 from the start W1 and W2 diverged near step 1,400; 0.5 for the first 60 % of training did not (V = 32,768).
_FIRST_SHARE, _FIRST_CROSS_ENTROPY = 0.6, 0.5


@dataclass(frozen=True)
class Progress:
    """After a step: its number from 1, of how many, and what is worth a log line."""

    step: int
    steps: int
    losses: dict[str, float]


Report = Callable[[Progress], None]


def train_target(target: Target, text: Tensor, report: Report, seed: int, state: Path) -> None:
    """text: [tokens] int64 on the target's device. state: the file that the training can be taken up from; the last step's stays there, so that
    a training that is over is not made again."""
    generator = torch.Generator().manual_seed(seed)
    config, portion = target.config, target.config.target
    optimizer = _optimizer(
        (target.blocks.parameters(), portion.rate), ([target.embedding.weight], _EMBEDDING_RATE), ([target.lm_head.weight], _LM_HEAD_RATE)
    )

    def loss(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        total = next_token_loss(target, _sequences(text, portion.batch, config.context + 1, generator))
        return total, {"cross_entropy": total.detach()}

    _descend(target, Snapshot(state, target, optimizer, generator), optimizer, portion.steps, loss, report)


def train_drafter(drafter: Drafter, target: Target, text: Tensor, report: Report, seed: int, state: Path) -> None:
    """As `train_target`; the target's weights stay as they are."""
    config, portion, generator = drafter.config, drafter.config.drafter, torch.Generator().manual_seed(seed)
    target.requires_grad_(False)
    serial = [*drafter.markov_head.parameters(), *drafter.confidence.parameters()]
    optimizer = _optimizer((drafter.backbone.parameters(), portion.rate), (serial, _SERIAL_RATE))

    def loss(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = _sequences(text, portion.batch, config.context, generator)
        last = config.context - config.block  # the last label is the context's last token
        anchors = torch.randint(1, last, (portion.batch, config.anchors), generator=generator).to(tokens.device)
        with torch.no_grad():
            read = target(tokens)
        weight = _FIRST_CROSS_ENTROPY if step < _FIRST_SHARE * portion.steps else CROSS_ENTROPY
        found = drafter_loss(drafter, target, tokens, anchors, read, weight)
        return found.total, {"cross_entropy": found.cross_entropy, "distance": found.distance, "confidence": found.confidence}

    _descend(drafter, Snapshot(state, drafter, optimizer, generator), optimizer, portion.steps, loss, report)


def _descend(
    model: nn.Module,
    snapshot: Snapshot,
    optimizer: Optimizer,
    steps: int,
    loss: Callable[[int], tuple[Tensor, dict[str, Tensor]]],
    report: Report,
) -> None:
    """Warm-up, then a cosine to nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(snapshot.restore(), steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * _rate(step, steps)
        total, parts = loss(step)
        if not bool(torch.isfinite(total)):
            raise FloatingPointError(
                f"the loss is {float(total.detach())} at step {step} of {steps}; lower the rates in experiments/drafter/training.py"
            )
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        snapshot.keep(step + 1)
        report(Progress(step + 1, steps, {name: float(part) for name, part in parts.items()}))
    snapshot.keep(steps, now=True)


def _optimizer(*groups: tuple[Iterable[Tensor], float]) -> AdamW:
    """Weights with their rates."""
    return AdamW([{"params": list(weights), "lr": rate} for weights, rate in groups], betas=(0.9, 0.95), weight_decay=0.0)


def _rate(step: int, steps: int) -> float:
    warm = min(_WARMUP_STEPS, max(1, steps // 10))
    return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _sequences(text: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """[batch, length] from random places."""
    starts = torch.randint(0, len(text) - length, (batch, 1), generator=generator)
    return text[(starts + torch.arange(length)).to(text.device)].long()
