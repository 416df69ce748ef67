"""Rounds of a drafter: base logits, and the tokens that each step followed. Recorded in a .safetensors file, or drawn as the synthetic inputs are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.checkpoint import opened
from experiments.convert import ConfigError
from kernels.synthetic import synthetic_inputs

KEY = "experiment.rounds"
_NAMES = ("base_logits", "anchor", "tokens")


@dataclass(frozen=True, eq=False)
class Rounds:
    """Some rounds of one drafter.

    base_logits: [n, steps, vocab] bf16
    anchor:      [n] int64, the token before step 0
    tokens:      [n, steps] int64, the teacher's: step k follows tokens[:, k - 1], whatever it would draft itself
    """

    base_logits: Tensor
    anchor: Tensor
    tokens: Tensor

    @property
    def steps(self) -> int:
        return self.base_logits.shape[1]

    @property
    def previous(self) -> Tensor:
        """[n, steps] int64, what each step follows."""
        return torch.cat([self.anchor[:, None], self.tokens[:, :-1]], dim=1)


def synthetic(vocab: int, steps: int, count: int, seed: int, base_std: float) -> Rounds:
    """`count` rounds of the paper's synthetic base logits; what a step follows is a random token."""
    inputs = synthetic_inputs(vocab, steps, count, seed, "cpu", base_std)
    tokens = torch.randint(vocab, (count, steps), generator=torch.Generator().manual_seed(seed))
    return Rounds(inputs.base_logits, inputs.anchor, tokens)


def read(path: str, vocab: int, target_vocab: int, positions: int) -> Iterator[Rounds]:
    """The rounds in the file at `path`, in order and a few at a time, for base logits of many rounds do not fit into memory.

    positions: rounds times steps that may be in memory at once; at least one round is.

    Raises:
        ConfigError: no such file, a tensor that is missing or has another shape or dtype than `Rounds` says, base logits of another
            vocabulary than the head's, or a token outside [0, target_vocab).
    """
    with opened(path, KEY) as file:
        count, steps = _check(file, path, vocab)
        anchor, tokens = file.get_tensor("anchor"), file.get_tensor("tokens")
        seen = torch.cat([anchor, tokens.flatten()])
        lowest, highest = int(seen.min()), int(seen.max())
        if lowest < 0 or highest >= target_vocab:
            raise ConfigError(f"{KEY}: {path}: tokens lie between {lowest} and {highest}, but W1 has the rows 0 to {target_vocab - 1}")
        base_logits, some = file.get_slice("base_logits"), max(1, positions // steps)
        for start in range(0, count, some):
            end = start + some
            yield Rounds(base_logits[start:end], anchor[start:end], tokens[start:end])


def _check(file: Any, path: str, vocab: int) -> tuple[int, int]:
    """Rounds and steps of a file whose tensors have the right shapes."""
    missing = set(_NAMES) - set(file.keys())
    if missing:
        raise ConfigError(f"{KEY}: {path} lacks {', '.join(sorted(missing))}; it has: {', '.join(sorted(file.keys())) or 'nothing'}")
    shapes = {name: (list(file.get_slice(name).get_shape()), file.get_slice(name).get_dtype()) for name in _NAMES}
    count, steps = (*shapes["tokens"][0], 0, 0)[:2]
    wanted = {"base_logits": ([count, steps, vocab], "BF16"), "anchor": ([count], "I64"), "tokens": ([count, steps], "I64")}
    if shapes != wanted or not count * steps:
        raise ConfigError(
            f"{KEY}: {path}: base_logits must be [rounds, steps, {vocab}] BF16, anchor [rounds] I64 and tokens [rounds, steps] I64; got "
            + ", ".join(f"{name} {shape} {dtype}" for name, (shape, dtype) in shapes.items())
        )
    return count, steps
