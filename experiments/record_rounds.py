"""What do the walks of a trained drafter read? Rounds of a pair on held-out text, kept in a file for `inputs=trained`, and how many tokens of each the
target accepted. Of a sample the table also counts the steps whose token is another because of the tail that is filled in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from experiments import recorded_rounds
from experiments.convert import ConfigError
from experiments.drafter import checkpoint
from experiments.drafter.decode import markov_head
from experiments.drafter.pair import PairConfig
from experiments.drafter.prompts import prompts_from
from experiments.drafter.rounds import record
from experiments.outcome import Outcome, Row
from experiments.plan import Plan
from experiments.recorded_rounds import Rounds, recording
from experiments.schema import Config, RecordRounds
from experiments.train_pair import trained
from experiments.trained_inputs import ROUNDS_NAME, head_name
from experiments.workload import assert_arch, create
from kernels.device import check_live
from kernels.heads.markov import MarkovHead
from kernels.reference import walk
from kernels.walk import Limits, Rounding, WalkInputs


def run(plan: Plan) -> Outcome:
    """The table `recorded_rounds`.

    Raises:
        ConfigError: no pair, one whose head no walk serves, or more rounds or logits than there are.
        Unsupported: the device of the config is not here, or the backend cannot walk the head.
    """
    config, ask = plan.config, cast(RecordRounds, plan.config.experiment)
    pair, device, backend = _pair(config, ask), check_live(config.device), create(config.backend.name, config.backend.options)
    assert_arch(backend, config.device)
    folder = checkpoint.folder_of(pair)
    learnt = trained(pair, device, folder)
    head = markov_head(learnt.pair)
    try:
        prompts = prompts_from(learnt.held_out, ask.count, pair.context // 2)
    except ValueError as error:
        raise ConfigError(f"experiment.count: {error}") from error
    prepared = backend.prepare(head, Limits(ask.batch, pair.block), config.device)
    rounds, places = record(learnt.pair, prepared, prompts, ask.batch, config.seed)

    path = Path(ask.file) if ask.file else folder / ROUNDS_NAME
    facts = {
        "pair": pair.name,
        "pair_key": pair.key,
        "backend": backend.name,
        "rounding": str(backend.rounding),
        "seed": str(config.seed),
        "head_sha256": head.sha256,
    }
    recorded_rounds.write(path, rounds, facts, ask.top)
    changed = list(_changed(head, rounds, path, ask.batch)) if ask.top else [0] * ask.count
    named = {"device": config.device.name, "pair": pair.name, "head": head_name(pair), "backend": backend.name, "vocab": head.vocab}
    named |= {"rank": head.rank, "steps": pair.block, "kept": ask.top or head.vocab}
    assert rounds.accepted is not None
    rows: list[Row] = [
        {
            **named,
            "round": number,
            "source": prompt.source,
            "document": prompt.name,
            "place": place,
            "accepted": accepted,
            "changed": other,
        }
        for number, (prompt, place, accepted, other) in enumerate(zip(prompts, places, rounds.accepted.tolist(), changed, strict=True))
    ]
    return Outcome({"recorded_rounds": rows}, {"file": path.name, "bytes": path.stat().st_size, **facts})


def _pair(config: Config, ask: RecordRounds) -> PairConfig:
    pair = config.pair
    if not isinstance(pair, PairConfig):
        raise ConfigError("pair: experiment=record_rounds needs one; take pair=tiny or pair=qwen_vocab")
    try:
        pair.assert_walked()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if ask.top > pair.vocab:
        raise ConfigError(f"experiment.top: {pair.name} has {pair.vocab} logits a step; got {ask.top}, so keep fewer")
    return pair


def _changed(head: MarkovHead, exact: Rounds, path: Path, batch: int) -> Iterator[int]:
    """Of each round, the steps whose token is another with the base logits in the file. Every step follows the recorded token."""
    with recording(str(path), "experiment.file", head.vocab, head.w1.shape[0]) as found:
        for start in range(0, found.count, batch):
            end = min(start + batch, found.count)
            own, filled = exact.base_logits[start:end], found.part(start, end)
            differ = _tokens(head, own, filled) != _tokens(head, filled.base_logits, filled)
            yield from differ.sum(dim=1).tolist()


def _tokens(head: MarkovHead, base_logits: Tensor, rounds: Rounds) -> Tensor:
    """[n, steps] int64, what the oracle drafts from base logits [n, steps, vocab] after the tokens of `rounds`."""
    count, device = len(rounds.anchor), head.device
    inputs = WalkInputs(
        base_logits.to(device), rounds.anchor.to(device), torch.zeros(count, device=device), torch.arange(count, device=device)
    )
    return walk(head, inputs, Rounding.TWICE, teacher=rounds.tokens.to(device)).tokens
