"""What does a pair learn: the losses while it is trained, and by source what the held-out text says of it. The pair itself is kept, see
`experiments.drafter.checkpoint`; trained before, it is only asked."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from experiments.convert import ConfigError
from experiments.drafter import checkpoint
from experiments.drafter.checkpoint import Pair
from experiments.drafter.corpus import digest, machine_documents
from experiments.drafter.drafter import Drafter, drafter_loss
from experiments.drafter.pair import PairConfig
from experiments.drafter.target import Target, next_token_loss
from experiments.drafter.text import HeldOut, held_out, tokenize, vocabulary_for
from experiments.drafter.training import Progress, train_drafter, train_target
from experiments.outcome import Outcome, Row
from experiments.plan import Plan
from experiments.schema import TrainPair
from kernels.device import check_live

_SAID_EVERY_S = 30.0


def run(plan: Plan) -> Outcome:
    """The tables `training` and `held_out`."""
    ask, config = cast(TrainPair, plan.config.experiment), plan.config.pair
    if not isinstance(config, PairConfig):
        raise ConfigError("pair: experiment=train_pair needs one to train; take pair=tiny or pair=qwen_vocab")
    device, folder = check_live(plan.config.device), checkpoint.folder_of(config)
    learnt = trained(config, device, folder, ask.logged)
    rows = list(_by_source(learnt.pair, learnt.held_out, ask.held_out, device))
    protocol = {"folder": folder.name, "trained": "in this run" if learnt.rows else "before this run"} | learnt.pair.facts
    return Outcome({"training": learnt.rows, "held_out": rows}, protocol=protocol)


@dataclass(frozen=True)
class Learnt:
    """A pair, text that it was not trained on, and rows of the table `training` if it was trained just now."""

    pair: Pair
    held_out: tuple[HeldOut, ...]
    rows: list[Row]


def trained(config: PairConfig, device: str, folder: Path, logged: int = TrainPair.logged) -> Learnt:
    """The pair in `folder`, trained there first if there is none. logged: steps between two rows."""
    documents = machine_documents(config.corpus_mb)
    if (folder / "pair.json").exists():
        pair = checkpoint.load(config, folder, device)
        return Learnt(pair, held_out(documents, pair.vocabulary), [])
    vocabulary = vocabulary_for(config, documents)
    text = tokenize(documents, vocabulary)
    torch.manual_seed(config.seed)
    target, drafter = Target(config).to(device), Drafter(config, vocabulary.mask).to(device)
    tokens, rows = text.train.to(device), list[Row]()
    states = [
        folder.parent / f"{folder.name}.{model}.snapshot" for model in ("target", "drafter")
    ]  # beside the pair's folder, which comes whole
    train_target(target, tokens, _logger(config.name, "target", logged, rows), config.seed, states[0])
    train_drafter(drafter, target, tokens, _logger(config.name, "drafter", logged, rows), config.seed + 1, states[1])
    facts = {"documents": len(documents), "corpus_sha256": digest(documents), "train_tokens": len(text.train)}
    checkpoint.save(Pair(config, target, drafter, vocabulary, text.counts(config.vocab), facts), folder)
    for state in states:
        state.unlink()
    return Learnt(checkpoint.load(config, folder, device), text.held_out, rows)


def _logger(pair: str, model: str, logged: int, rows: list[Row]) -> Callable[[Progress], None]:
    """Keeps every `logged`th step as rows, and says every half minute how far it is."""
    say = _Narrator(f"{pair}: {model}")

    def report(progress: Progress) -> None:
        say.hear(progress)
        if progress.step % logged == 0 or progress.step == progress.steps:
            rows.extend(
                {"pair": pair, "model": model, "step": progress.step, "loss": name, "value": value}
                for name, value in progress.losses.items()
            )

    return report


class _Narrator:
    """Prints a line about every _SAID_EVERY_S and at the end, to a terminal or a log: losses, and an estimate of the time left."""

    def __init__(self, what: str) -> None:
        self._what, self._steps = what, 0
        self._began_s = self._said_s = time.monotonic()

    def hear(self, progress: Progress) -> None:
        self._steps += 1
        if time.monotonic() - self._said_s < _SAID_EVERY_S and progress.step < progress.steps:
            return
        losses = ", ".join(f"{name} {value:.3f}" for name, value in progress.losses.items())
        self._said_s = time.monotonic()  # the losses waited for the device
        spent_s = self._said_s - self._began_s
        left_s = spent_s / self._steps * (progress.steps - progress.step)
        print(
            f"{self._what}, step {progress.step} of {progress.steps}: {losses}; {spent_s:.0f} s so far, about {left_s:.0f} s left",
            file=sys.stderr,
            flush=True,
        )


@torch.no_grad()
def _by_source(pair: Pair, documents: Sequence[HeldOut], most: int, device: str) -> Iterator[Row]:
    """By source: the target's cross-entropy, and at each step of a block the share of tokens that a verifier at T = 1 would be expected to accept,
    given the text's own tokens before it."""
    config = pair.config
    by_source: dict[str, list[Tensor]] = defaultdict(list)
    for document in documents:
        by_source[document.source] += [part for part in document.tokens.split(config.context + 1) if len(part) == config.context + 1]
    for source, parts in sorted(by_source.items()):
        if not parts:
            continue
        tokens = torch.stack(parts[:most]).to(device)
        named = {"pair": config.name, "source": source, "sequences": len(tokens)}
        yield {**named, "model": "target", "step": 0, "measure": "cross_entropy", "value": float(next_token_loss(pair.target, tokens))}
        anchors = torch.arange(config.block, config.context - config.block, config.block, device=device).expand(len(tokens), -1)
        read = pair.target(tokens[:, :-1])
        found = drafter_loss(pair.drafter, pair.target, tokens[:, :-1], anchors, read)
        for step, share in enumerate(found.accepted.tolist()):
            yield {**named, "model": "drafter", "step": step, "measure": "expected_acceptance", "value": share}
