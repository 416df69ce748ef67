"""Rounds of a pair, recorded: trained first if it is not, the same each time, and of a sample the record says which steps it changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments import logits_sample, record, record_rounds, train_pair
from experiments.convert import ConfigError
from experiments.drafter import checkpoint
from experiments.drafter.decode import markov_head
from experiments.execute import execute
from experiments.plan import Plan
from experiments.recorded_rounds import Rounds, recording
from experiments.schema import RecordRounds
from kernels.reference import walk
from kernels.walk import Rounding, WalkInputs
from tests.experiments.drafter.conftest import config
from tests.experiments.test_train_pair import DOCUMENTS

COUNT, VOCAB = 10, 300


@pytest.fixture
def asked(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("WTS_PAIR_CACHE", str(tmp_path / "pairs"))
    monkeypatch.setattr(train_pair, "machine_documents", lambda megabytes: DOCUMENTS)
    return replace(plan, config=replace(plan.config, experiment=RecordRounds(count=COUNT, batch=4), pair=config()))


def _ask(asked: Plan, **changes: object) -> Plan:
    return replace(asked, config=replace(asked.config, experiment=replace(asked.config.experiment, **changes)))


def _read(path: Path) -> Rounds:
    with recording(str(path), "k", VOCAB, VOCAB) as found:
        return found.part(0, found.count)


def test_rounds_stand_beside_the_drafter_and_are_its_own_walks(asked: Plan, tmp_path: Path) -> None:
    run = record.load(execute(asked).folder)
    folder = checkpoint.folder_of(config())
    rounds = _read(folder / "rounds.safetensors")
    rows = run.tables["recorded_rounds"].to_pylist()
    assert rounds.accepted is not None
    assert [row["accepted"] for row in rows] == rounds.accepted.tolist()
    assert {row["source"] for row in rows[:3]} == {"package0", "package1", "package2"}
    assert {(row["head"], row["steps"], row["kept"], row["changed"]) for row in rows} == {("small_markov", 4, VOCAB, 0)}
    head = markov_head(checkpoint.load(config(), folder))
    inputs = WalkInputs(rounds.base_logits, rounds.anchor, torch.zeros(COUNT), torch.arange(COUNT))
    assert torch.equal(walk(head, inputs, Rounding.TWICE).tokens, rounds.tokens)
    assert run.meta["protocol"]["pair_key"] == config().key

    again = tmp_path / "again.safetensors"
    execute(_ask(asked, file=str(again)))
    for name in ("base_logits", "anchor", "tokens", "accepted"):
        assert torch.equal(getattr(_read(again), name), getattr(rounds, name))


def test_a_sample_says_which_steps_it_changes(asked: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sample.safetensors"

    def changed(top: int) -> list[int]:
        run = record.load(execute(_ask(asked, file=str(path), top=top)).folder)
        assert set(run.tables["recorded_rounds"].column("kept").to_pylist()) == {top}
        return run.tables["recorded_rounds"].column("changed").to_pylist()

    execute(asked)
    exact = _read(checkpoint.folder_of(config()) / "rounds.safetensors")
    assert changed(100) == [0] * COUNT
    best = exact.base_logits.topk(100).values
    assert torch.equal(_read(path).base_logits.topk(100).values, best)
    monkeypatch.setattr(logits_sample, "_tail", lambda *_: torch.full((4, VOCAB), 50.0, dtype=torch.bfloat16))
    assert changed(100) == [4] * COUNT, "a tail above all that were kept takes every step"


@pytest.mark.parametrize(
    ("pair", "ask", "words"),
    [
        (None, {}, "pair: experiment=record_rounds needs one; take pair=tiny"),
        (config(head="rnn"), {}, "pair: backends walk markov heads only; small has head rnn"),
        (config(), {"top": 301}, "experiment.top: small has 300 logits a step; got 301"),
        (config(), {"count": 10**6}, "experiment.count: the held-out text has .* prompts of 12 tokens; got 1000000"),
    ],
)
def test_what_cannot_be_recorded_is_one_sentence(asked: Plan, pair: object, ask: dict[str, int], words: str) -> None:
    plan = _ask(asked, **ask)
    with pytest.raises(ConfigError, match=words):
        record_rounds.run(replace(plan, config=replace(plan.config, pair=pair)))
