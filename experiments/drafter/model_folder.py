"""A model in the file layout of the Hugging Face hub: config.json and safetensors, one file or several with an index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from experiments.drafter.checkpoint import CheckpointError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 3  # names in a message


@dataclass(frozen=True)
class ModelFolder:
    """A folder, and the repository that it is a copy of."""

    path: Path
    repository: str

    def json(self, name: str) -> dict[str, Any]:
        """Raises:
        CheckpointError: no such file, or not JSON.
        """
        try:
            return json.loads(self.text(name))
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{self.path / name} is not JSON ({error}); {self._again}") from error

    def text(self, name: str) -> str:
        """Raises:
        CheckpointError: no such file.
        """
        try:
            return (self.path / name).read_text()
        except OSError as error:
            raise CheckpointError(f"{self.path} has no {name}; {self._again}") from error

    def tensors(self, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        """All tensors by name, without the prefix `model.` that some models' names have.

        Raises:
            CheckpointError: a file is missing or cut.
        """
        found: dict[str, Tensor] = {}
        for path in self._weights:
            try:
                found |= load_file(path, device=str(device))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read ({error}); {self._again}") from error
        return {name.removeprefix("model."): tensor.to(dtype) for name, tensor in found.items()}

    def sha256(self) -> str:
        """Of all weights, file after file; the files must be there."""
        total = hashlib.sha256()
        for path in self._weights:
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()

    def fill(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Make `tensors` the weights of `model`, whose own may be on the meta device; every name and shape must be the model's.

        Raises:
            CheckpointError: they are not.
        """
        shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
        missing, unknown = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
        if missing or unknown:
            raise CheckpointError(
                f"{self.path} lacks {_some(missing)} and has {_some(unknown)} beside what a {type(model).__name__} has; "
                "take another checkpoint."
            )
        wrong = [f"{name} {list(tensors[name].shape)}" for name, shape in sorted(shapes.items()) if tensors[name].shape != shape]
        if wrong:
            raise CheckpointError(f"{self.path} has {_some(wrong)}, which its config.json says to be of other shapes; {self._again}")
        model.load_state_dict(dict(tensors), assign=True)

    @property
    def _weights(self) -> list[Path]:
        files = set(self.json(_INDEX)["weight_map"].values()) if (self.path / _INDEX).exists() else {_SINGLE}
        return [self.path / file for file in sorted(files)]

    @property
    def _again(self) -> str:
        return f"download it with: hf download {self.repository} --local-dir {self.path}"


def _some(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return (", ".join(every[:_SHOWN]) or "nothing") + more
