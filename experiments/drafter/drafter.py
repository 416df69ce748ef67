"""A DSpark drafter: backbone, serial head and confidence head, and the loss that trains them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.drafter.backbone import Backbone
from experiments.drafter.chunked_loss import Guesses, draft_loss
from experiments.drafter.pair import PairConfig
from experiments.drafter.serial_heads import serial_head
from experiments.drafter.target import Read, Target, TargetModel

DECAY = 4.0  # a step k counts exp(-k / DECAY)
CROSS_ENTROPY, DISTANCE, CONFIDENCE = 0.1, 0.9, 1.0


class Drafter(nn.Module):
    """Embedding and LM head are the target's, and are not parameters here."""

    def __init__(self, config: PairConfig, mask: int) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config, mask)
        self.markov_head = serial_head(config)
        self.confidence = nn.Linear(config.width + config.rank, 1)

    def base_logits(self, target: TargetModel, taps: Tensor, anchors: Tensor, positions: Tensor) -> Tensor:
        """[batch, anchors, block, vocab]: what a serial walk starts from."""
        return target.logits(self.backbone(taps, anchors, positions, target.embedding.weight))


@dataclass(frozen=True)
class Loss:
    """total is what is minimized; its parts, and the expected share of accepted tokens at each step [block], are for the log."""

    total: Tensor
    cross_entropy: Tensor
    distance: Tensor
    confidence: Tensor
    accepted: Tensor


def drafter_loss(
    drafter: Drafter, target: Target, tokens: Tensor, anchors: Tensor, read: Read, cross_entropy: float = CROSS_ENTROPY
) -> Loss:
    """DSpark's loss (DeepSpec's `loss.py`) on the blocks that start at `anchors` [batch, count], places in tokens [batch, context].

    0.1 cross-entropy + 0.9 L1 distance to the target's distribution + binary cross-entropy of the confidence with 1 - L1 / 2, each a mean over
    tokens with weight exp(-k / 4). Previous tokens are the text's. read: the target's pass over `tokens`.
    """
    config = drafter.config
    places = anchors[:, :, None] + torch.arange(config.block, device=tokens.device)  # of the token before each guess
    flat = places.flatten(1)
    previous, labels = (tokens.gather(1, flat + shift).view_as(places) for shift in (0, 1))
    hidden = drafter.backbone(read.taps, tokens.gather(1, anchors), anchors, target.embedding.weight)
    latent = drafter.markov_head(previous, hidden)
    embedded = drafter.markov_head.markov_w1(previous)
    confidence = drafter.confidence(torch.cat([hidden, embedded], dim=-1))[..., 0]
    teacher = read.hidden.gather(1, flat[:, :, None].expand(-1, -1, config.width)).view(*places.shape, -1)
    weight = torch.exp(-torch.arange(config.block, device=tokens.device) / DECAY).expand(places.shape)
    weight = weight / weight.sum()
    guesses = Guesses(*(rows.flatten(0, 2) for rows in (hidden, latent, teacher, labels)))
    of_entropy, of_distance = (share * weight.flatten() for share in (cross_entropy, DISTANCE))
    found = draft_loss(guesses, target.lm_head.weight, drafter.markov_head.markov_w2.weight, of_entropy, of_distance, config.drafter.rows)
    entropy, distance = (part.view_as(places) for part in (found.entropy, found.distance))
    sure = functional.binary_cross_entropy_with_logits(confidence.float(), 1 - 0.5 * distance, reduction="none")
    of_confidence = (weight * sure).sum()
    return Loss(
        total=found.total + CONFIDENCE * of_confidence,
        cross_entropy=(weight * entropy).sum(),
        distance=(weight * distance).sum(),
        confidence=of_confidence.detach(),
        accepted=1 - 0.5 * distance.mean(dim=(0, 1)),
    )
