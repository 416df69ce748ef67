"""A training run's state on disk, so that one that is killed goes on where it was a minute before."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_EVERY_S = 60.0


class SnapshotError(RuntimeError):
    """A file that cannot be taken up."""


class Snapshot:
    """Weights, optimizer and random numbers after a step, in one file that is replaced whole."""

    def __init__(self, path: Path, model: nn.Module, optimizer: Optimizer, generator: torch.Generator) -> None:
        self._path, self._model, self._optimizer, self._generator = path, model, optimizer, generator
        self._last = time.monotonic()

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
        self._optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"])
        return int(state["step"])

    def keep(self, step: int, *, now: bool = False) -> None:
        """At most once a minute, or `now`."""
        if not now and time.monotonic() - self._last < _EVERY_S:
            return
        self._last = time.monotonic()
        state = {
            "step": step,
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generator": self._generator.get_state(),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._path)
