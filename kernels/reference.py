"""The oracle: the walk of any head, step by step, under every rounding rule; greedy, or drawn with noise that a kernel shares.

Ties go to the lowest token, -0 equals +0, anchors are clamped into [0, vocab). Runs on CPU and GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.sampling import draw, is_sampled
from kernels.walk import Head, NanRule, NoiseRule, Rounding, WalkInputs


@runtime_checkable
class ReferenceHead(Head, Protocol):
    """A head with an exact step. All tensors on the head's device."""

    def step_logits(self, previous: Tensor, base: Tensor, rounding: Rounding) -> Tensor:
        """[batch] int64, [batch, vocab] -> corrected logits [batch, vocab] fp32."""
        ...

    def step_interval(self, previous: Tensor, base: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
        """The lowest and highest logits that a kernel with fp32 sums may compute."""
        ...


@runtime_checkable
class Approximation(Protocol):
    """A backend of rounding APPROXIMATE: not exact for its head, but for a restricted one, under the rounding `within`."""

    within: ClassVar[Rounding]

    def restricted(self, head: ReferenceHead) -> ReferenceHead:
        """What its tokens are held to. Equal for equal options and the same head."""
        ...


@dataclass(frozen=True)
class ReferenceWalk:
    """tokens [batch, steps] int64 and, where asked for, logits [batch, steps, vocab] fp32."""

    tokens: Tensor
    logits: Tensor | None = None


def walk(
    head: ReferenceHead,
    inputs: WalkInputs,
    rounding: Rounding,
    nan_rule: NanRule = NanRule.LOSES,
    teacher: Tensor | None = None,
    keep_logits: bool = False,
    noise: NoiseRule | None = None,
    round: int = 0,
) -> ReferenceWalk:
    """The walk: greedy, and with `noise` drawn where a row has temperature > 0.

    teacher: [batch, steps] int64; step k then follows the teacher's token k - 1 (clamped) instead of its own.
    round: the launch whose noise is meant (`SampledWalk.round`); a request's slot is its place in the batch.

    Raises:
        ValueError: another vocabulary than the head's, a row with temperature > 0 without `noise`, or noise that a host cannot repeat.
    """
    check_inputs(head, inputs, noise)
    tokens = torch.empty(inputs.batch, inputs.steps, dtype=torch.int64, device=head.device)
    kept: list[Tensor] = []
    for step in range(inputs.steps):
        previous = previous_tokens(inputs, tokens if teacher is None else teacher, step)
        logits = head.step_logits(previous, inputs.base_logits[:, step], rounding)
        tokens[:, step] = chosen(logits, inputs, step, nan_rule, noise, round)
        if keep_logits:
            kept.append(logits)
    return ReferenceWalk(tokens, torch.stack(kept, dim=1) if kept else None)


def previous_tokens(inputs: WalkInputs, tokens: Tensor, step: int) -> Tensor:
    """[batch] what step `step` conditions on: the anchor, then token step - 1; clamped into [0, vocab)."""
    previous = inputs.anchor if step == 0 else tokens[:, step - 1]
    return previous.clamp(0, inputs.vocab - 1)


def chosen(logits: Tensor, inputs: WalkInputs, step: int, nan_rule: NanRule, noise: NoiseRule | None, round: int) -> Tensor:
    """[batch, vocab] fp32 -> [batch] the greedy token, or with `noise` the drawn one of a row with temperature > 0 (there a NaN loses)."""
    tokens = greedy(logits, nan_rule)
    if noise is None:
        return tokens
    return torch.where(is_sampled(inputs.temperature), draw(logits, inputs.temperature, inputs.seed, step, round, noise), tokens)


def greedy(logits: Tensor, nan_rule: NanRule) -> Tensor:
    """[batch, vocab] -> [batch] the lowest index of the maximum; the first NaN where it wins; 0 where all are -inf."""
    if nan_rule is NanRule.LOSES:
        logits = logits.masked_fill(logits.isnan(), -torch.inf)
    return logits.argmax(dim=1)


def check_inputs(head: Head, inputs: WalkInputs, noise: NoiseRule | None = None) -> None:
    """A ValueError where the oracle has no answer."""
    if inputs.vocab != head.vocab:
        raise ValueError(f"base_logits have vocab {inputs.vocab} but the head drafts from {head.vocab} tokens.")
    if noise is None and bool(is_sampled(inputs.temperature).any()):
        hottest = inputs.temperature[is_sampled(inputs.temperature)].max().item()
        raise ValueError(
            f"without a noise rule the oracle is greedy but a row has temperature {hottest:g}; pass temperature 0 for every row, or `noise`."
        )
