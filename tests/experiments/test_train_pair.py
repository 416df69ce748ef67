"""A pair is trained once, on what there is, and says by source what it learnt; killed between target and drafter it goes on with the drafter."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments import record, train_pair
from experiments.compose import compose
from experiments.convert import ConfigError
from experiments.drafter.corpus import Document
from experiments.drafter.pair import PairConfig, ReleasedConfig
from experiments.drafter.training import Progress
from experiments.execute import execute
from experiments.plan import Plan
from experiments.schema import TrainPair
from tests.experiments.drafter.conftest import TEXT, config

WORDS = [f"word{number} of {number * number} and {number % 7}" for number in range(400)]
DOCUMENTS = [
    Document(f"package{number % 3}", f"file{number}", TEXT[number % 2] + " ".join(WORDS[number : number + 60])) for number in range(300)
]


@pytest.fixture
def asked(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("WTS_PAIR_CACHE", str(tmp_path / "pairs"))
    monkeypatch.setattr(train_pair, "machine_documents", lambda megabytes: DOCUMENTS)
    return replace(plan, config=replace(plan.config, experiment=TrainPair(logged=2, held_out=2), pair=config()))


def test_it_is_trained_once_and_asked_again(asked: Plan, tmp_path: Path) -> None:
    first, second = (record.load(execute(asked).folder) for _ in range(2))
    trained = Counter((row["model"], row["step"]) for row in first.tables["training"].to_pylist())
    assert trained == {("target", 2): 1, ("target", 3): 1, ("drafter", 2): 3, ("drafter", 3): 3}
    assert (first.meta["protocol"]["trained"], second.meta["protocol"]["trained"]) == ("in this run", "before this run")
    assert second.tables["training"].num_rows == 0
    rows, again = ([{**row, "run_id": ""} for row in run.tables["held_out"].to_pylist()] for run in (first, second))
    assert rows == again
    assert Counter(row["source"] for row in rows) == dict.fromkeys(("package0", "package1", "package2"), 1 + 4)
    assert all(0 <= row["value"] <= 1 for row in rows if row["measure"] == "expected_acceptance")
    assert not list((tmp_path / "pairs").glob("*.snapshot"))


def test_killed_before_its_drafter_it_keeps_the_target(asked: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train_pair, "train_drafter", killed)
        with pytest.raises(KeyboardInterrupt):
            train_pair.run(asked)
    assert [path.name.split(".")[1] for path in (tmp_path / "pairs").iterdir()] == ["target"]
    assert {row["model"] for row in train_pair.run(asked).tables["training"]} == {"drafter"}


def test_it_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """From step 11 on, 10 s a step: every third step has a line, and the last."""
    clock = [0.0]
    monkeypatch.setattr(train_pair.time, "monotonic", lambda: clock[0])
    report = train_pair._logger("small", "target", 100, rows := [])
    for step in range(11, 16):
        clock[0] += 10
        report(Progress(step, 15, {"cross_entropy": torch.tensor(2.5)}))
    assert capsys.readouterr().err.splitlines() == [
        "small: target, step 13 of 15: cross_entropy 2.500; 30 s so far, about 20 s left",
        "small: target, step 15 of 15: cross_entropy 2.500; 50 s so far, about 0 s left",
    ]
    assert rows == [{"pair": "small", "model": "target", "step": 15, "loss": "cross_entropy", "value": 2.5}]


@pytest.mark.parametrize("released", [None, ReleasedConfig("theirs", "them/target", "them/drafter")])
def test_without_a_pair_to_train_it_says_which_there_are(plan: Plan, released: ReleasedConfig | None) -> None:
    with pytest.raises(ConfigError, match="needs one to train; take pair=tiny or pair=qwen_vocab"):
        train_pair.run(replace(plan, config=replace(plan.config, experiment=TrainPair(), pair=released)))


def test_the_configs_are_pairs() -> None:
    tiny = compose(["experiment=train_pair"]).pair
    large = compose(["experiment=train_pair", "pair=qwen_vocab"]).pair
    assert isinstance(tiny, PairConfig)
    assert isinstance(large, PairConfig)
    assert (tiny.name, tiny.rank, tiny.block) == ("tiny", 256, 16)
    assert (large.vocab, large.vocabulary) == (151_936, "qwen")
    assert compose([]).pair is None
