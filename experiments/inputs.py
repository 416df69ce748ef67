"""Where a workload's head and input sets come from: drawn as the paper draws them, or a trained drafter and its recorded rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import torch

from experiments import head_file, trained_inputs
from experiments.recorded_rounds import recording
from experiments.schema import GREEDY, TRAINED, Config
from kernels.heads.markov import MarkovHead
from kernels.synthetic import synthetic_inputs
from kernels.walk import Limits, WalkInputs


@dataclass(frozen=True)
class Source:
    """A head and input sets for its walks, greedy and of the largest size, one after the other; they are drawn (without end) or
    read when asked for."""

    head: MarkovHead
    sets: Iterator[WalkInputs]


def source_of(config: Config, limits: Limits, device: str) -> Source:
    """The source of `config.inputs`, on `device`.

    Raises:
        ConfigError: files of a trained drafter that are not there, do not fit together or have too few rounds.
    """
    return (_trained if config.inputs.family == TRAINED else _synthetic)(config, limits, device)


def _synthetic(config: Config, limits: Limits, device: str) -> Source:
    size, inputs = config.head, config.inputs
    head = MarkovHead.synthetic(size.vocab, size.rank, size.seed, device, size.w1_std, size.w2_std)
    draw = (
        synthetic_inputs(size.vocab, limits.max_steps, limits.max_batch, seed, device, inputs.base_std, GREEDY)
        for seed in count(inputs.seed)
    )
    return Source(head, draw)


def _trained(config: Config, limits: Limits, device: str) -> Source:
    files = trained_inputs.files_of(config)
    head = head_file.read(str(files.checkpoint), trained_inputs.CHECKPOINT_KEY).head.to(device)
    return Source(head, _recorded(str(files.rounds), head, limits))


def _recorded(path: str, head: MarkovHead, limits: Limits) -> Iterator[WalkInputs]:
    """Set 0 is the first rounds, one a request; no other set has any of them."""
    batch = limits.max_batch
    with recording(path, trained_inputs.ROUNDS_KEY, head.vocab, head.w1.shape[0]) as found:
        trained_inputs.assert_enough(found, limits.max_steps, batch)
        for start in (0, *range(batch, found.count - batch + 1)):
            rounds = found.part(start, start + batch)
            yield WalkInputs(
                base_logits=rounds.base_logits[:, : limits.max_steps].contiguous().to(head.device),
                anchor=rounds.anchor.to(head.device),
                temperature=torch.full((batch,), GREEDY, dtype=torch.float32, device=head.device),
                seed=torch.arange(batch, device=head.device),
            )
