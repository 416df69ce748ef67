"""Rounds of a drafter: base logits, and the tokens that each step followed. Recorded in a .safetensors file, or drawn as the synthetic inputs are.

A file has the base logits in full, or as a sample (`experiments.logits_sample`): the largest of each step, and what its tail is like.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.convert import ConfigError
from experiments.head_file import opened
from experiments.logits_sample import ID_BYTES, LogitsSample, filled, sampled
from kernels.synthetic import synthetic_inputs

KEY = "experiment.rounds"
_Layout = Mapping[str, tuple[tuple[str, ...], str]]  # by tensor: its axes and its dtype
_ALWAYS: _Layout = {"anchor": (("rounds",), "I64"), "tokens": (("rounds", "steps"), "I64")}
_ACCEPTED: _Layout = {"accepted": (("rounds",), "I64")}
_FULL: _Layout = {"base_logits": (("rounds", "steps", "vocab"), "BF16")}
_SAMPLE: _Layout = {
    "top_ids": (("rounds", "steps", "top", str(ID_BYTES)), "U8"),
    "top_values": (("rounds", "steps", "top"), "BF16"),
    "moments": (("rounds", "steps", "2"), "F32"),
}


@dataclass(frozen=True, eq=False)
class Rounds:
    """Some rounds of one drafter.

    base_logits: [n, steps, vocab] bf16
    anchor:      [n] int64, the token before step 0
    tokens:      [n, steps] int64, the teacher's: step k follows tokens[:, k - 1], whatever it would draft itself
    accepted:    [n] int64, how many of them the target accepted; None where that was not recorded
    """

    base_logits: Tensor
    anchor: Tensor
    tokens: Tensor
    accepted: Tensor | None = None

    @property
    def steps(self) -> int:
        return self.base_logits.shape[1]

    @property
    def previous(self) -> Tensor:
        """[n, steps] int64, what each step follows."""
        return torch.cat([self.anchor[:, None], self.tokens[:, :-1]], dim=1)


@dataclass(frozen=True)
class Recording:
    """An open file of rounds whose shapes are right.

    where: its place in the config and its path, for messages
    count: rounds; steps: of each; facts: what its maker says of it
    """

    where: str
    count: int
    steps: int
    vocab: int
    facts: Mapping[str, str]
    _file: Any

    def part(self, start: int, end: int) -> Rounds:
        """Rounds `start` to `end`. The tail of a sample depends on the round only, not on the part it is read in.

        Raises:
            ConfigError: a sample has a token that the vocabulary has not.
        """

        def read(name: str) -> Tensor:
            return self._file.get_slice(name)[start:end]

        names = set(self._file.keys())
        try:
            base = filled(LogitsSample(*map(read, _SAMPLE)), self.vocab, start) if "top_ids" in names else read("base_logits")
        except ValueError as error:
            raise ConfigError(f"{self.where}: {error}; record it again") from error
        return Rounds(base, read("anchor"), read("tokens"), read("accepted") if "accepted" in names else None)


def synthetic(vocab: int, steps: int, count: int, seed: int, base_std: float) -> Rounds:
    """`count` rounds of the paper's synthetic base logits; what a step follows is a random token."""
    inputs = synthetic_inputs(vocab, steps, count, seed, "cpu", base_std)
    tokens = torch.randint(vocab, (count, steps), generator=torch.Generator().manual_seed(seed))
    return Rounds(inputs.base_logits, inputs.anchor, tokens)


def read(path: str, vocab: int, target_vocab: int, positions: int) -> Iterator[Rounds]:
    """The rounds in the file at `path`, in order and a few at a time, for base logits of many rounds do not fit into memory.

    positions: rounds times steps that may be in memory at once; at least one round is.

    Raises:
        ConfigError: as `recording`.
    """
    with recording(path, KEY, vocab, target_vocab) as found:
        some = max(1, positions // found.steps)
        for start in range(0, found.count, some):
            yield found.part(start, min(start + some, found.count))


@contextmanager
def recording(path: str, key: str, vocab: int, target_vocab: int) -> Iterator[Recording]:
    """The file at `path`, open. `key` is where the path stands in the config.

    Raises:
        ConfigError: no such file, a tensor that is missing or has another shape or dtype than its layout says, base logits of another
            vocabulary than the head's, or a token outside [0, target_vocab).
    """
    where = f"{key}: {path}"
    with opened(path, key) as file:
        count, steps = _check_shapes(file, where, vocab)
        facts = file.metadata() or {}
        if facts.get("vocab", str(vocab)) != str(vocab):
            raise ConfigError(f"{where} has rounds of {facts['vocab']} logits and the head has {vocab}; give rounds of that head")
        seen = torch.cat([file.get_tensor(name).flatten() for name in _ALWAYS])
        lowest, highest = int(seen.min()), int(seen.max())
        if lowest < 0 or highest >= target_vocab:
            raise ConfigError(f"{where}: tokens lie between {lowest} and {highest}, but W1 has the rows 0 to {target_vocab - 1}")
        yield Recording(where, count, steps, vocab, facts, file)


def write(path: Path, rounds: Rounds, facts: Mapping[str, str], top: int = 0) -> None:
    """`rounds` as a file, whole or not at all: in full, or a sample of the `top` largest logits of each step.

    Raises:
        ValueError: fewer logits than `top`.
    """
    from safetensors.torch import save_file  # inside, as in `experiments.head_file`

    kept = {"anchor": rounds.anchor, "tokens": rounds.tokens} | ({} if rounds.accepted is None else {"accepted": rounds.accepted})
    if top:
        sample = sampled(rounds.base_logits, top)
        kept |= dict(zip(_SAMPLE, (sample.ids, sample.values, sample.moments), strict=True))
    else:
        kept["base_logits"] = rounds.base_logits
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file(kept, partial, {**facts, "vocab": str(rounds.base_logits.shape[2])})
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _check_shapes(file: Any, where: str, vocab: int) -> tuple[int, int]:
    """Rounds and steps of a file whose tensors are those of a layout."""
    names = set(file.keys())
    layout = {**(_SAMPLE if "top_ids" in names else _FULL), **_ALWAYS, **(_ACCEPTED if "accepted" in names else {})}
    if missing := set(layout) - names:
        raise ConfigError(f"{where} lacks {', '.join(sorted(missing))}; it has: {', '.join(sorted(names)) or 'nothing'}")
    shapes = {name: (list(file.get_slice(name).get_shape()), file.get_slice(name).get_dtype()) for name in layout}
    count, steps = (*shapes["tokens"][0], 0, 0)[:2]
    top = (*shapes.get("top_values", ([],))[0], 0, 0, 0)[2]
    sizes = {"rounds": count, "steps": steps, "top": top, "vocab": vocab}
    wanted = {name: ([sizes[axis] if axis in sizes else int(axis) for axis in axes], dtype) for name, (axes, dtype) in layout.items()}
    if shapes != wanted or not count * steps or top > vocab:
        must = (f"{name} must be [{', '.join(axes)}] {dtype}".replace("vocab", str(vocab)) for name, (axes, dtype) in layout.items())
        got = (f"{name} {shape} {dtype}" for name, (shape, dtype) in shapes.items())
        raise ConfigError(f"{where}: {', '.join(must)}; got {', '.join(got)}")
    return count, steps
