"""A training run's state on disk, so that one that is killed goes on where it was a minute before."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_EVERY_S = 60.0
_SHARE = 0.03  # of the time, at most, is spent on snapshots: at V = 151,936 one has 2 GB


class SnapshotError(RuntimeError):
    """A file that cannot be taken up."""


class Snapshot:
    """Weights, optimizers and random numbers after a step, in one file that is replaced whole."""

    def __init__(self, path: Path, model: nn.Module, optimizers: Sequence[Optimizer], generator: torch.Generator) -> None:
        self._path, self._model, self._optimizers, self._generator = path, model, optimizers, generator
        self._next_s = time.monotonic() + _EVERY_S

    def restore(self) -> int:
        """Take up what is there; how many steps it has behind it.

        Raises:
            SnapshotError: it is not a snapshot of this training.
        """
        if not self._path.exists():
            return 0
        try:
            return self._restored(torch.load(self._path, map_location="cpu", weights_only=True))
        except (pickle.UnpicklingError, RuntimeError, KeyError, ValueError, EOFError) as error:
            raise SnapshotError(
                f"{self._path} is no snapshot of this training ({type(error).__name__}); delete it to begin anew."
            ) from error

    def _restored(self, state: dict[str, Any]) -> int:
        self._model.load_state_dict(state["model"])
        for optimizer, own in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        self._generator.set_state(state["generator"])
        return int(state["step"])

    @property
    def due(self) -> bool:
        """Whether the last one is a minute old, and older if that is little beside what it took."""
        return time.monotonic() >= self._next_s

    def keep(self, step: int) -> None:
        """Now."""
        began_s = time.monotonic()
        state = {
            "step": step,
            "model": self._model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "generator": self._generator.get_state(),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._path)
        ended_s = time.monotonic()
        self._next_s = ended_s + max(_EVERY_S, (ended_s - began_s) / _SHARE)
