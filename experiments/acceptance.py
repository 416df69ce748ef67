"""How many tokens of a draft does the target take, walked by one backend and by another: real decoding of held-out prompts (Figure 15).

In a cell (steps, temperature, load) every arm decodes the same prompts in the same groups; of a second pass the order of arms is the opposite one.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import cast

import torch

from experiments.convert import ConfigError
from experiments.drafter import checkpoint
from experiments.drafter.checkpoint import Pair
from experiments.drafter.corpus import MIN_SOURCES
from experiments.drafter.decode import Decoded, Decoder, markov_head
from experiments.drafter.prompts import Prompt, prompts_from
from experiments.drafter.text import HeldOut
from experiments.drafter.verify import Rule
from experiments.outcome import Outcome, Row
from experiments.plan import Plan
from experiments.schema import Acceptance, Load, Variant
from experiments.train_pair import trained
from experiments.workload import assert_arch, assert_variants, create
from kernels.device import DeviceSpec, check_live
from kernels.walk import Limits, PreparedWalk

_LOGGED = 25  # steps between two losses, where the pair is trained first


@dataclass(frozen=True)
class Cell:
    """What all arms are asked alike."""

    steps: int
    temperature: float
    load: Load

    @property
    def limits(self) -> Limits:
        return Limits(self.load.batch, self.steps, sampling=self.temperature > 0)


def run(plan: Plan) -> Outcome:
    """The tables `acceptance`, a row a prompt, and `acceptance_positions`, a row a source and place in the draft."""
    config, ask = plan.config, cast(Acceptance, plan.config.experiment)
    assert_variants(ask.variants)
    if config.pair is None:
        raise ConfigError("pair: experiment=acceptance needs one; take pair=tiny or pair=qwen_vocab")
    if max(ask.steps) > config.pair.block:
        raise ConfigError(
            f"experiment.steps: pair {config.pair.name} drafts up to {config.pair.block} tokens at once; got {max(ask.steps)}"
        )
    learnt = trained(config.pair, check_live(config.device), checkpoint.folder_of(config.pair), _LOGGED)
    pair, prompts = learnt.pair, _prompts(learnt.held_out, ask)
    torch.manual_seed(ask.seed)  # for the arms that draw from torch's generator
    rows, places = list[Row](), list[Row]()
    cells = [Cell(*each) for each in product(ask.steps, ask.temperatures, ask.loads)]
    started = time.monotonic()
    for number, cell in enumerate(cells, start=1):
        for passed, order, variant, decoded in _decode(pair, prompts, ask, cell, config.device):
            named = _columns(plan, pair, variant, cell) | {"pass": passed}
            rows += [named | row for row in _by_prompt(decoded, prompts, cell, order)]
            places += [named | row for row in _by_position(decoded, prompts, cell)]
        spent_s = time.monotonic() - started
        print(f"cell {number} of {len(cells)}: {spent_s:.0f} s so far", file=sys.stderr, flush=True)
    protocol = {"rule": ask.rule, "prompt_tokens": ask.prompt_tokens, "pair": pair.facts}
    return Outcome({"acceptance": rows, "acceptance_positions": places}, protocol=protocol)


def _decode(
    pair: Pair, prompts: Sequence[Prompt], ask: Acceptance, cell: Cell, device: DeviceSpec
) -> Iterator[tuple[int, int, Variant, list[Decoded]]]:
    """Pass, the arm's place in it, the arm, and what it made of every prompt. Each arm is prepared once."""
    arms = [(variant, _prepare(pair, variant, cell.limits, device)) for variant in ask.variants]
    tokens = torch.stack([prompt.tokens for prompt in prompts])
    for passed in range(ask.passes):
        for order, (variant, walk) in enumerate(arms if passed % 2 == 0 else reversed(arms)):
            decoder = Decoder(pair, walk, cell.steps, cell.temperature, ask.seed + passed, Rule(ask.rule))
            groups = tokens.split(cell.load.batch)
            yield passed, order, variant, [each for group in groups for each in decoder.decode(group, cell.load.tokens, cell.load.batch)]


def _prepare(pair: Pair, variant: Variant, limits: Limits, device: DeviceSpec) -> PreparedWalk:
    backend = create(variant.backend, variant.options)
    assert_arch(backend, device)
    return backend.prepare(markov_head(pair), limits, device)


def _prompts(documents: Sequence[HeldOut], ask: Acceptance) -> list[Prompt]:
    try:
        found = prompts_from(documents, ask.prompts, ask.prompt_tokens)
    except ValueError as error:
        raise ConfigError(f"experiment.prompts: {error}") from error
    sources = {prompt.source for prompt in found}
    if len(sources) < MIN_SOURCES:
        raise ConfigError(
            f"experiment.prompts: {len(found)} are from {len(sources)} sources and at least {MIN_SOURCES} are needed; "
            "ask for more, or read more text with pair.corpus_mb"
        )
    return found


def _columns(plan: Plan, pair: Pair, variant: Variant, cell: Cell) -> Row:
    config = pair.config
    return {
        "device": plan.config.device.name,
        "pair": config.name,
        "head": config.head,
        "backend": variant.backend,
        "variant": variant.label,
        "vocab": config.vocab,
        "rank": config.rank,
        "steps": cell.steps,
        "batch": cell.load.batch,
        "temperature": cell.temperature,
    }


def _by_prompt(decoded: Sequence[Decoded], prompts: Sequence[Prompt], cell: Cell, order: int) -> Iterator[Row]:
    for number, (each, prompt) in enumerate(zip(decoded, prompts, strict=True)):
        rounds, accepted = len(each.accepted), sum(each.accepted)
        yield {
            "order": order,
            "prompt": number,
            "source": prompt.source,
            "rounds": rounds,
            "drafted": rounds * cell.steps,
            "accepted": accepted,
            "tokens": accepted + rounds,
            "text_sha256": hashlib.sha256(repr(each.tokens).encode()).hexdigest(),
        }


def _by_position(decoded: Sequence[Decoded], prompts: Sequence[Prompt], cell: Cell) -> Iterator[Row]:
    """A token at a position is offered where all before it passed."""
    passed: dict[str, list[int]] = defaultdict(list)
    for each, prompt in zip(decoded, prompts, strict=True):
        passed[prompt.source] += each.accepted
    for source, accepted in sorted(passed.items()):
        for position in range(cell.steps):
            offered, through = (sum(count >= position + more for count in accepted) for more in (0, 1))
            yield {"source": source, "position": position, "offered": offered, "accepted": through}
