"""Who may enter: the checks that every backend makes before it prepares and before it launches."""

from __future__ import annotations

from typing import TypeVar

import torch

from kernels.walk import Draft, Head, Limits, Unsupported, WalkInputs

H = TypeVar("H", bound=Head)


def admit_head(backend: str, head: Head, accepted: type[H]) -> H:
    """The head as `accepted`, or Unsupported."""
    if not isinstance(head, accepted):
        raise Unsupported(f"{backend} serves the {accepted.kind!r} head only; got {head.kind!r}; backend=reference serves every head.")
    return head


def admit_limits(backend: str, limits: Limits, *, sampling: bool) -> None:
    """Unsupported where the limits make no sense or ask a greedy-only backend to sample."""
    if limits.max_batch < 1 or limits.max_steps < 1:
        raise Unsupported(f"{backend} needs max_batch and max_steps of at least 1; got {limits.max_batch} and {limits.max_steps}.")
    if limits.sampling and not sampling:
        raise Unsupported(f"{backend} is greedy only and cannot serve temperature > 0; backend=sglang_folded can.")


def admit_walk(
    backend: str, inputs: WalkInputs, out: Draft, limits: Limits, head: Head, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
) -> None:
    """A ValueError where a launch exceeds what was prepared. Looks at shapes and types only, so it is legal in graph capture."""
    if inputs.batch > limits.max_batch or inputs.steps > limits.max_steps:
        raise ValueError(
            f"{backend} was prepared for batch <= {limits.max_batch} and steps <= {limits.max_steps}; got batch {inputs.batch} and "
            f"steps {inputs.steps}; prepare again with larger limits."
        )
    if inputs.vocab != head.vocab:
        raise ValueError(f"base_logits have vocab {inputs.vocab} but the head drafts from {head.vocab} tokens.")
    if inputs.base_logits.dtype not in dtypes:
        raise ValueError(f"{backend} reads base logits in {', '.join(map(str, dtypes))}; got {inputs.base_logits.dtype}.")
    if inputs.base_logits.device != head.device:
        raise ValueError(f"base_logits are on {inputs.base_logits.device} but the head is on {head.device}.")
    if out.tokens.shape != (inputs.batch, inputs.steps):
        raise ValueError(f"out.tokens must be [{inputs.batch}, {inputs.steps}]; got {list(out.tokens.shape)}.")
    if out.logits is not None and out.logits.shape != inputs.base_logits.shape:
        raise ValueError(f"out.logits must be {list(inputs.base_logits.shape)}; got {list(out.logits.shape)}.")
