"""How many steps a few rows prove, by how many rows: the reference's answer, on input sets of one request.

The sets are walked as the requests of one launch, so that where they sample each has noise of its own. Every step follows the exact walk's tokens. Its
biases, its noise and the order of its candidates are made once, for all pairs of widths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.outcome import Row
from kernels.certificate import Candidates, Step, nested_candidates, nested_lists
from kernels.reference import ReferenceHead
from kernels.sampling import Draws
from kernels.walk import Rounding, WalkInputs

_CHUNK_ELEMENTS = 1 << 24  # scores at once: 110 sets at V = 151,936; their noise takes a GB or two while it is made


@dataclass(frozen=True)
class Widths:
    """candidates: how many rows of a step are named by base logit; listed: by the previous token's bias. Every pair is asked."""

    candidates: tuple[int, ...]
    listed: tuple[int, ...]


def certified_shares(head: ReferenceHead, sets: Sequence[WalkInputs], temperature: float, widths: Widths) -> Iterator[Row]:
    """Rows of the table `certified_shares` without what names the run: one for each pair of widths, set and step, under rule TWICE.

    sets: of one request each, all of one length. A set's noise is that of round 0 and of its own slot.

    Raises:
        ValueError: a list longer than the vocabulary.
    """
    temperatures = torch.full((len(sets),), temperature, device=head.device)
    seeds = torch.cat([given.seed for given in sets])
    for chunk in torch.arange(len(sets), device=head.device).split(max(1, _CHUNK_ELEMENTS // head.vocab)):
        numbers = chunk.tolist()
        some = [sets[number] for number in numbers]
        previous = torch.cat([given.anchor for given in some]).clamp(0, head.vocab - 1)
        for step in range(some[0].steps):
            base = torch.cat([given.base_logits[:, step] for given in some])
            draws = Draws.of(temperatures, seeds, step, 0).rows(chunk) if temperature > 0 else None
            at = Step.of(head, previous, base, Rounding.TWICE, draws)
            for row in _step_rows(head, at, widths, numbers):
                yield {"temperature": temperature, "step": step, **row}
            previous = at.token


def _step_rows(head: ReferenceHead, at: Step, widths: Widths, numbers: Sequence[int]) -> Iterator[Row]:
    named = nested_candidates(at.reach, widths.candidates)
    for width, lists in zip(widths.listed, nested_lists(head, widths.listed, at.previous), strict=True):
        proofs = [at.proof(found, lists) for found in named]
        for count, found, proof, survivors in zip(widths.candidates, named, proofs, at.survivors(proofs, lists), strict=True):
            lifted = proof.proved & ~_among(found, proof.token)
            columns = (column.tolist() for column in (proof.proved, lifted, survivors))
            for number, *told in zip(numbers, *columns, strict=True):
                answer = dict(zip(("proved", "lifted", "survivors"), told, strict=True))
                yield {"candidates": count, "listed": width, "set": number, **answer}


def _among(named: Candidates, token: Tensor) -> Tensor:
    """[batch] bool"""
    return (named.ids == token[:, None]).any(dim=1)
