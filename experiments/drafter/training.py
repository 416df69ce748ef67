"""Training of a pair: the target on text, then the drafter on what the target makes of the same text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from experiments.drafter.drafter import CROSS_ENTROPY, Drafter, drafter_loss
from experiments.drafter.pair import TrainingConfig
from experiments.drafter.snapshot import Snapshot
from experiments.drafter.target import Target, next_token_loss

_WARMUP_STEPS = 60
_EMBEDDING_RATE, _LM_HEAD_RATE, _SERIAL_RATE = 0.02, 0.003, 1e-3
_CLIP = 1.0
_CHECKED = 20  # steps between two looks at the loss, each of which waits for the GPU
# With cross-entropy at 0.1 from the start W1 and W2 diverged near step 1,400; 0.5 for the first 60 % of training did not (V = 32,768).
_FIRST_SHARE, _FIRST_CROSS_ENTROPY = 0.6, 0.5


@dataclass(frozen=True)
class Progress:
    """After a step: its number from 1, of how many, and what is worth a log line, still on the device."""

    step: int
    steps: int
    parts: dict[str, Tensor]

    @property
    def losses(self) -> dict[str, float]:
        """Waits for the device."""
        return {name: float(part) for name, part in self.parts.items()}


Report = Callable[[Progress], None]


def train_target(target: Target, text: Tensor, report: Report, seed: int, state: Path) -> None:
    """text: [tokens] int64 on the target's device. state: the file that the training can be taken up from; the last step's stays there, so that
    a training that is over is not made again."""
    generator = torch.Generator().manual_seed(seed)
    config, portion = target.config, target.config.target
    optimizers = _optimizers(target.blocks, portion, ([target.embedding.weight], _EMBEDDING_RATE), ([target.lm_head.weight], _LM_HEAD_RATE))

    def loss(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        total = next_token_loss(target, _sequences(text, portion.batch, config.context + 1, generator))
        return total, {"cross_entropy": total.detach()}

    _descend(target, Snapshot(state, target, optimizers, generator), optimizers, portion.steps, loss, report)


def train_drafter(drafter: Drafter, target: Target, text: Tensor, report: Report, seed: int, state: Path) -> None:
    """As `train_target`; the target's weights stay as they are."""
    config, portion, generator = drafter.config, drafter.config.drafter, torch.Generator().manual_seed(seed)
    target.requires_grad_(False)
    serial = [*drafter.markov_head.parameters(), *drafter.confidence.parameters()]
    optimizers = _optimizers(drafter.backbone, portion, (serial, _SERIAL_RATE))

    def loss(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = _sequences(text, portion.batch, config.context, generator)
        last = config.context - config.block  # the last label is the context's last token
        anchors = torch.randint(1, last, (portion.batch, config.anchors), generator=generator).to(tokens.device, non_blocking=True)
        with torch.no_grad():
            read = target(tokens)
        weight = _FIRST_CROSS_ENTROPY if step < _FIRST_SHARE * portion.steps else CROSS_ENTROPY
        found = drafter_loss(drafter, target, tokens, anchors, read, weight)
        return found.total, {"cross_entropy": found.cross_entropy, "distance": found.distance, "confidence": found.confidence}

    _descend(drafter, Snapshot(state, drafter, optimizers, generator), optimizers, portion.steps, loss, report)


def _descend(
    model: nn.Module,
    snapshot: Snapshot,
    optimizers: Sequence[Optimizer],
    steps: int,
    loss: Callable[[int], tuple[Tensor, dict[str, Tensor]]],
    report: Report,
) -> None:
    """Warm-up, then a cosine to nothing. On a GPU products of matrices are in bf16."""
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    device = next(model.parameters()).device.type
    begin = snapshot.restore()
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]  # other ones than before
    for step in range(begin, steps):
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * _rate(step, steps)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            total, parts = loss(step)
        due = snapshot.due or step + 1 == steps
        if due or step % _CHECKED == 0:
            _refuse_infinite(total, step, steps)
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if due:
            snapshot.keep(step + 1)
        report(Progress(step + 1, steps, parts))


def _refuse_infinite(total: Tensor, step: int, steps: int) -> None:
    if not math.isfinite(value := total.item()):
        raise FloatingPointError(f"the loss is {value} at step {step} of {steps}; lower the rates in experiments/drafter/training.py")


def _optimizers(matrices: nn.Module, portion: TrainingConfig, *others: tuple[Iterable[Tensor], float]) -> tuple[Optimizer, Optimizer]:
    """The config's for a module that has matrices only, AdamW for other weights with their rates."""
    if portion.optimizer == "muon":
        return Muon(matrices.parameters(), lr=portion.rate, weight_decay=0.0), _adamw(*others)
    return _adamw((matrices.parameters(), portion.rate)), _adamw(*others)


def _adamw(*groups: tuple[Iterable[Tensor], float]) -> AdamW:
    parts = [{"params": list(weights), "lr": rate} for weights, rate in groups]
    fused = all(weight.is_cuda for part in parts for weight in part["params"])
    return AdamW(parts, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)


def _rate(step: int, steps: int) -> float:
    warm = min(_WARMUP_STEPS, max(1, steps // 10))
    return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _sequences(text: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """[batch, length] from random places."""
    starts = torch.randint(0, len(text) - length, (batch, 1), generator=generator)
    return text[starts.to(text.device, non_blocking=True) + torch.arange(length, device=text.device)].long()
