"""The serial head of a drafter's checkpoint: a .safetensors file with `markov_head.markov_w{1,2}.weight`, as DSpark's have them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.convert import ConfigError
from kernels.heads.markov import MarkovHead

COUNTS_NAME = "token_counts"
_HEAD_PREFIX = "markov_head."


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A head, and which tokens it was trained on where the file says so.

    name:         of the pair and its head where `pair.json` stands beside the file, else the file's name without its ending
    token_counts: [rows of W1] int64, how often the training text has each token; None where the file has no `token_counts`
    """

    name: str
    head: MarkovHead
    token_counts: Tensor | None = None

    @property
    def used(self) -> Tensor | None:
        """[n] int64, the tokens that were seen at least once; None where that is not known."""
        return None if self.token_counts is None else self.token_counts.nonzero()[:, 0]


def read(path: str, key: str) -> Checkpoint:
    """The head in the file at `path`; its other tensors are not read. `key` is where the path stands in the config.

    Raises:
        ConfigError: no such file, no vanilla Markov head in it, or counts that do not fit W1; one sentence that begins with `key`.
    """
    with opened(path, key) as file:
        names = file.keys()
        tensors = {name: file.get_tensor(name) for name in names if name.startswith(_HEAD_PREFIX) or name == COUNTS_NAME}
    try:
        head = MarkovHead.from_tensors(tensors)
        return Checkpoint(_name(Path(path)), head, _counts(tensors, head))
    except ValueError as error:
        raise ConfigError(f"{key}: {path}: {error}") from error


@contextmanager
def opened(path: str, key: str) -> Iterator[Any]:
    """The safetensors file at `path`, open for reading by name.

    Raises:
        ConfigError: it does not exist, or is none.
    """
    from safetensors import SafetensorError, safe_open  # inside: other experiments run on machines that lack the package

    try:
        file = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{key}: {path} cannot be read as a safetensors file ({' '.join(str(error).split())}); give the path of one"
        ) from error
    with file as entered:
        yield entered


def _name(path: Path) -> str:
    beside = path.with_name("pair.json")  # see experiments/drafter/checkpoint.py
    if not beside.exists():
        return path.stem
    pair = json.loads(beside.read_text())["config"]
    return f"{pair['name']}_{pair['head']}"


def _counts(tensors: Mapping[str, Tensor], head: MarkovHead) -> Tensor | None:
    counts = tensors.get(COUNTS_NAME)
    if counts is None:
        return None
    rows = head.w1.shape[0]
    if counts.shape != (rows,) or counts.dtype != torch.int64:
        raise ValueError(f"{COUNTS_NAME} must be [{rows}] torch.int64, one for each row of W1; got {list(counts.shape)} {counts.dtype}.")
    if bool((counts < 0).any()) or not bool(counts.any()):
        raise ValueError(
            f"{COUNTS_NAME} must be counts, some of them above 0; they lie between {int(counts.min())} and {int(counts.max())}."
        )
    return counts
