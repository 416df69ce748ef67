"""What does a pair learn: the losses while it is trained, and by source what the held-out text says of it. The pair itself is kept, see
`experiments.drafter.checkpoint`; trained before, it is only asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
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
from experiments.drafter.text import Text, tokenize, vocabulary_for
from experiments.drafter.training import Progress, train_drafter, train_target
from experiments.outcome import Outcome, Row
from experiments.plan import Plan
from experiments.schema import TrainPair
from kernels.device import check_live


def run(plan: Plan) -> Outcome:
    """The tables `training` and `held_out`."""
    ask, config = cast(TrainPair, plan.config.experiment), plan.config.pair
    if not isinstance(config, PairConfig):
        raise ConfigError("pair: experiment=train_pair needs one to train; take pair=tiny or pair=qwen_vocab")
    device, folder = check_live(plan.config.device), checkpoint.folder_of(config)
    learnt = _train(config, device, folder, ask.logged)
    rows = list(_held_out(learnt.pair, learnt.text, ask.held_out, device))
    protocol = {"folder": folder.name, "trained": "in this run" if learnt.rows else "before this run"} | learnt.pair.facts
    return Outcome({"training": learnt.rows, "held_out": rows}, protocol=protocol)


@dataclass(frozen=True)
class Learnt:
    """A pair, its text, and rows of the table `training` if it was trained just now."""

    pair: Pair
    text: Text
    rows: list[Row]


def _train(config: PairConfig, device: str, folder: Path, logged: int) -> Learnt:
    documents = machine_documents(config.corpus_mb)
    if (folder / "pair.json").exists():
        pair = checkpoint.load(config, folder, device)
        return Learnt(pair, tokenize(documents, pair.vocabulary), [])
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
    return Learnt(checkpoint.load(config, folder, device), text, rows)


def _logger(pair: str, model: str, logged: int, rows: list[Row]) -> Callable[[Progress], None]:
    """Keeps every `logged`th step as rows, with a bar and an estimate of the time left."""
    from tqdm import tqdm

    bar = tqdm(desc=f"{pair}: {model}", disable=None, leave=False)

    def report(progress: Progress) -> None:
        bar.total = progress.steps
        bar.update(progress.step - bar.n)
        if progress.step % logged == 0 or progress.step == progress.steps:
            bar.set_postfix({name: f"{value:.3f}" for name, value in progress.losses.items()})
            rows.extend(
                {"pair": pair, "model": model, "step": progress.step, "loss": name, "value": value}
                for name, value in progress.losses.items()
            )

    return report


@torch.no_grad()
def _held_out(pair: Pair, text: Text, most: int, device: str) -> Iterator[Row]:
    """By source: the target's cross-entropy, and at each step of a block the share of tokens that a verifier at T = 1 would be expected to accept,
    given the text's own tokens before it."""
    config = pair.config
    by_source: dict[str, list[Tensor]] = defaultdict(list)
    for document in text.held_out:
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
