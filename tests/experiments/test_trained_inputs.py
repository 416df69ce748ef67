"""`inputs=trained`: the pair is made before anything is timed, its head and its rounds are what is walked, and the record says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import record, trained_inputs
from experiments.compose import compose
from experiments.convert import ConfigError
from experiments.drafter.pair import PairConfig
from experiments.execute import execute, report
from experiments.plan import Plan
from experiments.recorded_rounds import recording
from experiments.schema import Certified, Config, InputsConfig, Quantization, Smoke, Timing, Variant, WalkLatency
from experiments.trained_inputs import files_of, ready
from experiments.workload import Workload
from kernels.heads.markov import MarkovHead
from tests.experiments.drafter.conftest import config as small_pair
from tests.experiments.test_inputs import COUNT, RANK, VOCAB
from tests.experiments.test_inputs import trained as trained  # a fixture: a head and nine rounds in files
from tests.experiments.test_record_rounds import asked as asked  # a fixture: the text that a small pair is trained on


def _with(plan: Plan, config: Config) -> Plan:
    return replace(plan, config=config)


def test_a_workload_walks_the_head_of_the_checkpoint(plan: Plan, trained: Config) -> None:
    config = ready(_with(plan, trained)).plan.config
    assert (config.head.name, config.head.vocab, config.head.rank) == ("h", VOCAB, RANK)
    workload = Workload(config, 3, 2)
    head = MarkovHead.synthetic(VOCAB, RANK, 5, "cpu", 1.0, 0.5)
    assert torch.equal(workload.head.w2, head.w2)
    arm = workload.prepare("oracle", "reference", {})
    for which in (0, 1):
        subject = workload.subject(arm, 3, 2)
        subject.load(which)
        subject.launch()
        assert subject.examiner.examine(which, subject.draft).ok
    assert not workload.verify(arm.backend, 0, subject.tokens).ok


def test_a_plan_with_synthetic_inputs_stays_as_it_is(plan: Plan) -> None:
    assert ready(plan).plan is plan
    assert not ready(plan).protocol


def test_the_record_says_what_was_read(plan: Plan, trained: Config) -> None:
    run = record.load(execute(_with(plan, trained)).folder)
    cells = run.tables["cells"].to_pylist()
    assert {(row["inputs"], row["head"], row["vocab"], row["rank"], row["status"]) for row in cells} == {
        ("trained", "h", VOCAB, RANK, "ok")
    }
    told = run.meta["protocol"]["inputs"]
    assert (told["rounds"], told["recorded"]) == (COUNT, {"pair": "p", "vocab": str(VOCAB)})
    assert told["head_sha256"] == MarkovHead.synthetic(VOCAB, RANK, 5, "cpu", 1.0, 0.5).sha256
    assert run.meta["config"]["head"]["name"] == "h"


def test_replicas_read_the_same_files(plan: Plan, trained: Config) -> None:
    timing = Timing(rounds=2, warmup=1, kernel_replays=0)
    ask = WalkLatency((Variant("bits", "reference"),), steps=(2,), batches=(1, 3), replicas=1, replica_timeout_s=120, timing=timing)
    run = record.load(execute(_with(plan, replace(trained, experiment=ask))).folder)
    cells = run.tables["cells"].to_pylist()
    assert {(row["batch"], row["temperature"], row["inputs"], row["status"]) for row in cells} == {
        (batch, temperature, "trained", "ok") for batch in (1, 3) for temperature in (0.0, 1.0)
    }


def _lost(path: str) -> str:
    return path.replace(".safetensors", ".lost")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda c: replace(c, inputs=replace(c.inputs, checkpoint=_lost(c.inputs.checkpoint))),
            "inputs.checkpoint: .*h.lost cannot be read",
        ),
        (lambda c: replace(c, inputs=replace(c.inputs, rounds=_lost(c.inputs.rounds))), "inputs.rounds: .*r.lost cannot be read"),
        (lambda c: replace(c, inputs=replace(c.inputs, rounds="")), "inputs.rounds: .*/rounds.safetensors cannot be read"),
        (lambda c: replace(c, experiment=Smoke(steps=(1, 4))), "experiment.steps: .*r.safetensors has rounds of 3 steps; got 4"),
        (
            lambda c: replace(c, experiment=Smoke(steps=(1,), batch=5)),
            "has 9 rounds and two sets of 5 requests need 10.*experiment.count=10",
        ),
    ],
)
def test_files_that_are_not_there_or_too_small_are_one_sentence(
    plan: Plan, trained: Config, change: Callable[[Config], Config], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        execute(_with(plan, change(trained)))
    assert not list(Path(trained.output).rglob("run.json"))


def test_a_pair_is_trained_and_recorded_once_and_then_timed(asked: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def run_here(plan: Plan) -> int:
        made.append(plan.config.experiment)
        return report(execute(plan))

    monkeypatch.setattr(trained_inputs, "run_in_fresh_process", run_here)
    timed = replace(asked.config, experiment=Smoke(steps=(1, 4), timing=Timing(2, 1, 0)), inputs=InputsConfig("trained"))
    runs = [record.load(execute(_with(asked, timed)).folder) for _ in range(2)]
    assert len(made) == 1
    for run in runs:
        assert {(row["head"], row["vocab"], row["status"]) for row in run.tables["cells"].to_pylist()} == {("small_markov", 300, "ok")}
        assert run.meta["protocol"]["inputs"]["recorded"]["pair_key"] == small_pair().key
    with recording(str(files_of(timed).rounds), "k", 300, 300) as found:
        assert runs[0].meta["protocol"]["inputs"]["head_sha256"] == found.facts["head_sha256"]


@pytest.mark.parametrize(("sets", "batches", "count"), [(128, (1,), 128), (200, (1,), 200), (200, (1, 8), 214)])
def test_a_pair_without_rounds_records_as_many_as_the_sets_of_the_largest_batch_take(
    asked: Plan, monkeypatch: pytest.MonkeyPatch, sets: int, batches: tuple[int, ...], count: int
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(trained_inputs, "run_in_fresh_process", lambda plan: made.append(plan.config.experiment) or 1)
    ask = Certified((Variant("bits", "reference"),), steps=(4,), batches=batches, sets=sets)
    execute(_with(asked, replace(asked.config, experiment=ask, inputs=InputsConfig("trained"))))
    assert [record.count for record in made] == [count]


def test_a_pair_that_cannot_be_made_is_told(asked: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_inputs, "run_in_fresh_process", lambda plan: 1)
    timed = replace(asked.config, experiment=Smoke(), inputs=InputsConfig("trained"))
    finished = execute(_with(asked, timed))
    assert finished.status == "runtime_error"
    assert "experiment=record_rounds pair=small device=cpu" in finished.reason


def test_the_pair_in_the_repository_has_rounds() -> None:
    config = compose(["inputs=trained", "pair=tiny"])
    assert isinstance(config.pair, PairConfig)
    with recording(str(files_of(config).rounds), "k", 2048, 2048) as found:
        assert (found.count, found.steps, found.facts["pair_key"]) == (64, 16, config.pair.key)


def test_quantization_is_of_the_same_head_and_rounds(plan: Plan, trained: Config) -> None:
    run = record.load(execute(_with(plan, replace(trained, experiment=Quantization(tokens=50)))).folder)
    rows = run.tables["argmax_flips"].to_pylist()
    assert {(row["head"], row["inputs"]) for row in rows} == {("h", "rounds")}
    assert {row["walks"] for row in rows} == {COUNT}
    assert {row["weights"] for row in run.tables["quantization"].to_pylist()} == {"checkpoint"}
    with pytest.raises(ValueError, match="give that or experiment.checkpoints, not both"):
        replace(trained, experiment=Quantization(checkpoints=("a",)))
