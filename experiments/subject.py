"""What is asked and timed: one walk of one arm, its inputs, and how to tell whether its answer is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kernels.agreement import Agreement


@dataclass(frozen=True)
class Subject:
    """One cell of an experiment.

    cell:    the columns that name it in every table
    launch:  enqueue one complete call on the current stream, from fixed input tensors into `tokens`
    load:    put input set 0 or 1 into those tensors; the sets have different answers, so a stale one is seen
    verify:  (set, tokens) against the oracle
    tokens:  [batch, steps] int64, what the launch writes
    floor_us: the least time that the bytes which must move can take, by l2 ("cold", "hot")
    """

    cell: Mapping[str, Any]
    launch: Callable[[], None]
    load: Callable[[int], None]
    verify: Callable[[int, Tensor], Agreement]
    tokens: Tensor
    floor_us: Mapping[str, float]
    rounding: str

    def __str__(self) -> str:
        return f"{self.cell['variant']} at {self.cell['steps']} steps"
