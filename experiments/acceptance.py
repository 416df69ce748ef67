"""How many tokens of a draft does the target take, walked by one backend and by another: real decoding of held-out prompts (Figure 15).

In a cell (steps, temperature, load) every arm decodes the same prompts in the same groups; of a second pass the order of arms is the opposite one. In sampled
cells all other arms draft every round of an arm's text too: then arms are compared on the same rounds, and how texts differ does not count.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch

from experiments.convert import ConfigError
from experiments.drafter import checkpoint, released
from experiments.drafter.checkpoint import CheckpointError
from experiments.drafter.corpus import MIN_SOURCES, machine_documents
from experiments.drafter.decodable import DecodablePair, PairSizes
from experiments.drafter.decode import Decoded, Decoder, markov_head
from experiments.drafter.pair import PairConfig
from experiments.drafter.prompts import Prompt, prompts_from
from experiments.drafter.text import HeldOut, held_out
from experiments.drafter.verify import Rule
from experiments.outcome import Outcome, Row
from experiments.plan import Plan
from experiments.quantized_bias import FORMATS, head_through
from experiments.schema import Acceptance, Config, DecodingArm, Load, Variant
from experiments.train_pair import trained
from experiments.workload import assert_arch, assert_variants, create
from kernels.device import DeviceSpec, check_live
from kernels.heads.markov import MarkovHead
from kernels.walk import Limits, PreparedWalk

_CORPUS_MB = 200.0  # of text, from which a released pair's prompts are taken


@dataclass(frozen=True)
class Cell:
    """What all arms are asked alike."""

    steps: int
    temperature: float
    load: Load

    @property
    def limits(self) -> Limits:
        return Limits(self.load.batch, self.steps, sampling=self.temperature > 0)

    def __str__(self) -> str:
        return f"{self.steps} steps, T = {self.temperature:g}, batch {self.load.batch}"


def run(plan: Plan) -> Outcome:
    """The tables `acceptance`, a row a prompt, and `acceptance_positions`, a row a source and place in the draft; of sampled cells `acceptance_expected`, a
    row a prompt, and `acceptance_beside`, a row a prompt and another arm."""
    config, ask = plan.config, cast(Acceptance, plan.config.experiment)
    assert_variants(ask.variants)
    _assert_arms(ask.variants, config.device)
    asked = _asked(config, ask)
    torch.manual_seed(ask.seed)  # for the arms that draw from torch's generator
    rows, places, expected, beside = list[Row](), list[Row](), list[Row](), list[Row]()
    cells = [Cell(*each) for each in product(ask.steps, ask.temperatures, ask.loads)]
    started = time.monotonic()
    for number, cell in enumerate(cells, start=1):
        for passed, order, variant, decoded in _decode(asked, ask, cell, config.device):
            named = _columns(config, asked, variant, cell) | {"pass": passed}
            rows += [named | row for row in _by_prompt(decoded, asked.prompts, cell, order)]
            places += [named | row for row in _by_position(decoded, asked.prompts, cell)]
            if cell.temperature > 0:
                expected += [named | {"prompt": number, "expected": each.expected} for number, each in enumerate(decoded)]
                beside += [named | row for row in _beside(decoded, variant, ask.variants)]
        spent_s = time.monotonic() - started
        left_s = spent_s / number * (len(cells) - number)
        print(f"cell {number} of {len(cells)} ({cell}): {spent_s:.0f} s so far, about {left_s:.0f} s left", file=sys.stderr, flush=True)
    protocol = {"rule": ask.rule, "prompt_tokens": ask.prompt_tokens, "tokens": {str(load.batch): load.tokens for load in ask.loads}}
    tables = {"acceptance": rows, "acceptance_positions": places, "acceptance_expected": expected, "acceptance_beside": beside}
    return Outcome(tables, protocol=protocol | {"pair": asked.facts})


@dataclass(frozen=True)
class _Asked:
    """What decodes what. heads: the pair's serial head, as trained ("") and through formats of 8 bits; facts: what the record should know of the pair."""

    pair: DecodablePair
    heads: dict[str, MarkovHead]
    prompts: list[Prompt]
    facts: dict[str, Any]


def _asked(config: Config, ask: Acceptance) -> _Asked:
    """The pair, trained first if it is to be trained here, and its prompts."""
    device, named = check_live(config.device), config.pair
    if named is None:
        raise ConfigError("pair: experiment=acceptance needs one; take pair=tiny or pair=qwen_vocab")
    if isinstance(named, PairConfig):
        try:  # before it is trained
            named.assert_walked()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        _assert_drafts(named, ask)
        learnt = trained(named, device, checkpoint.folder_of(named))
        pair, documents, facts = learnt.pair, learnt.held_out, learnt.pair.facts
    else:
        try:
            pair = released.load(named, device)
        except CheckpointError as error:
            raise ConfigError(f"pair: {error}") from error
        _assert_drafts(pair.config, ask)
        documents, facts = held_out(machine_documents(_CORPUS_MB), pair.vocabulary), pair.facts
    head = markov_head(pair)
    heads = {form: head_through(head, form) for form in {variant.weights for variant in ask.variants} - {""}} | {"": head}
    return _Asked(pair, heads, _prompts(documents, ask), facts)


def _assert_arms(arms: Sequence[DecodingArm], device: DeviceSpec) -> None:
    """Told before a pair is trained."""
    for place, arm in enumerate(arms):
        assert_arch(create(arm.backend, arm.options), device)
        if arm.weights and arm.weights not in FORMATS:
            raise ConfigError(f"experiment.variants[{place}].weights: {arm.weights!r} is none of {', '.join(FORMATS)}, nor empty")


def _assert_drafts(pair: PairSizes, ask: Acceptance) -> None:
    if max(ask.steps) > pair.block:
        raise ConfigError(f"experiment.steps: pair {pair.name} drafts up to {pair.block} tokens at once; got {max(ask.steps)}")


def _decode(asked: _Asked, ask: Acceptance, cell: Cell, device: DeviceSpec) -> Iterator[tuple[int, int, Variant, list[Decoded]]]:
    """Pass, the arm's place in it, the arm, and what it made of every prompt. Each arm is prepared once."""
    arms = [(variant, _prepare(asked.heads[variant.weights], variant, cell.limits, device)) for variant in ask.variants]
    tokens, load = torch.stack([prompt.tokens for prompt in asked.prompts]), cell.load
    for passed in range(load.passes):
        for order, (variant, walk) in enumerate(arms if passed % 2 == 0 else reversed(arms)):
            beside = tuple(other for of, other in arms if of is not variant) if cell.temperature > 0 else ()
            decoder = Decoder(asked.pair, walk, cell.steps, cell.temperature, ask.seed + passed, Rule(ask.rule), beside=beside)
            groups = tokens.split(load.batch)
            yield passed, order, variant, [each for group in groups for each in decoder.decode(group, load.tokens, load.batch)]


def _prepare(head: MarkovHead, variant: Variant, limits: Limits, device: DeviceSpec) -> PreparedWalk:
    return create(variant.backend, variant.options).prepare(head, limits, device)


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


def _columns(config: Config, asked: _Asked, variant: Variant, cell: Cell) -> Row:
    head = asked.heads[""]
    return {
        "device": config.device.name,
        "pair": asked.pair.config.name,
        "head": head.kind,
        "backend": variant.backend,
        "variant": variant.label,
        "vocab": head.vocab,
        "rank": head.rank,
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


def _beside(decoded: Sequence[Decoded], own: Variant, variants: Sequence[Variant]) -> Iterator[Row]:
    """What was expected of the other arms' drafts in the rounds of an arm's own text."""
    others = [variant for variant in variants if variant is not own]
    for number, each in enumerate(decoded):
        for other, expected in zip(others, each.beside, strict=True):
            found = {"prompt": number, "rounds": len(each.accepted), "expected": expected}
            yield found | {"text": own.label, "backend": other.backend, "variant": other.label}


def _by_position(decoded: Sequence[Decoded], prompts: Sequence[Prompt], cell: Cell) -> Iterator[Row]:
    """A token at a position is offered where all before it passed."""
    passed: dict[str, list[int]] = defaultdict(list)
    for each, prompt in zip(decoded, prompts, strict=True):
        passed[prompt.source] += each.accepted
    for source, accepted in sorted(passed.items()):
        for position in range(cell.steps):
            offered, through = (sum(count >= position + more for count in accepted) for more in (0, 1))
            yield {"source": source, "position": position, "offered": offered, "accepted": through}
