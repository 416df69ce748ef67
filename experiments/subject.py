"""What is asked and timed: one walk of one arm, its inputs, and who tells whether its answer is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.examiner import Examiner
from kernels.walk import Draft


@dataclass(frozen=True)
class Subject:
    """One cell of an experiment.

    cell:     the columns that name it in every table
    launch:   enqueue one complete call on the current stream, from fixed input tensors into `draft`
    load:     put an input set into those tensors; the sets next to it have other answers, so a stale one is seen
    examiner: tells whether a draft is right
    draft:    what the launch writes
    floor_us: the least time that the bytes which must move can take, by l2 ("cold", "hot")
    tally:    what the walk counts of all its launches (`kernels.walk.TalliedWalk`), if it does
    """

    cell: Mapping[str, Any]
    launch: Callable[[], None]
    load: Callable[[int], None]
    examiner: Examiner
    draft: Draft
    floor_us: Mapping[str, float]
    rounding: str
    tally: Tensor | None = None

    @property
    def tokens(self) -> Tensor:
        """[batch, steps] int64."""
        return self.draft.tokens

    def poison(self) -> None:
        """Make the draft one that no walk may write, so that what is not written is seen."""
        self.draft.tokens.fill_(-1)
        if self.draft.logits is not None:
            self.draft.logits.fill_(torch.nan)

    def __str__(self) -> str:
        cell = self.cell
        return f"{cell['variant']} at {cell['steps']} steps, batch {cell['batch']}, T = {cell['temperature']:g}"
