from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from experiments.compose import CONFIGS, compose
from experiments.convert import ConfigError
from experiments.schema import EXPERIMENTS, InputsConfig, Smoke, StepSlope
from experiments.workload import create
from kernels import registry


def _names(group: str) -> list[str]:
    return sorted(path.stem for path in Path(CONFIGS, group).glob("*.yaml"))


def test_a_bare_run_is_a_smoke_test_of_the_reference_on_a_cpu() -> None:
    made = compose([])
    assert (made.device.name, made.head.name, made.backend.name, made.experiment.name) == ("cpu", "tiny", "reference", "smoke")
    assert made.experiment == Smoke()  # the YAML says what the dataclass says


def test_step_slope_asks_for_the_papers_arms() -> None:
    made = compose(["experiment=step_slope", "device=h200"])
    assert isinstance(made.experiment, StepSlope)
    assert [variant.label for variant in made.experiment.variants] == [
        "sglang_folded", "sglang_greedy", "vllm_addmm", "streaming_bf16", "streaming_int8", "resident",
    ]  # fmt: skip
    assert made.experiment.steps == (1, 2, 4, 7, 10, 13, 16)
    assert (made.head.vocab, made.head.rank, made.head.w1_std, made.head.w2_std, made.inputs.base_std) == (151936, 256, 1.0, 0.05, 2.0)
    for variant in made.experiment.variants:
        create(variant.backend, variant.options)


@pytest.mark.parametrize("experiment", _names("experiment"))
def test_every_experiment_composes_and_has_a_dataclass(experiment: str) -> None:
    assert compose([f"experiment={experiment}"]).experiment.name == experiment
    assert set(_names("experiment")) == set(EXPERIMENTS)


def test_every_head_device_and_backend_composes() -> None:
    for head in _names("head"):
        assert compose([f"head={head}"]).head.name == head
    for device in _names("device"):
        assert compose([f"device={device}"]).device.name == device
    for backend in registry.backends():
        made = compose([f"backend={backend}"]).backend
        create(made.name, made.options)


def test_inputs_are_synthetic_unless_asked_otherwise() -> None:
    assert compose([]).inputs == InputsConfig() == InputsConfig("synthetic", 2.0, 0)
    assert compose(["inputs=trained", "pair=tiny"]).inputs.family == "trained"
    assert compose(["inputs=trained", "inputs.checkpoint=h", "inputs.rounds=r"]).pair is None


def test_a_head_on_the_command_line_beats_the_one_an_experiment_prefers() -> None:
    assert compose(["experiment=toy_walk"]).head.name == "toy"
    assert compose(["experiment=toy_walk", "head=tiny"]).head.name == "tiny"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["experiment.stepz=3"], ["experiment.stepz", "did you mean 'steps'"]),
        (["experiment.steps=[1,2,x]"], ["experiment.steps[2]", "'x'"]),
        (["experiment.timing.round=3"], ["experiment.timing.round", "did you mean 'rounds'"]),
        (["experiment=step_slope", "experiment.variants.0.lable=x"], ["experiment.variants[0].lable", "did you mean 'label'"]),
        (["head.vocab=abc"], ["head.vocab", "'abc'"]),
        (["+head.vocabs=3"], ["head.vocabs", "did you mean 'vocab'"]),
        (["head=tinny"], ["head", "did you mean 'tiny'"]),
        (["hed=tiny"], ["hed", "did you mean 'head'"]),
        (["backend.options.rf_tiles=3"], ["backend.options.rf_tiles", "+backend.options.rf_tiles=VALUE"]),
        (["seed=1.5"], ["seed", "1.5"]),
        (["inputs=trainee"], ["inputs", "did you mean 'trained'"]),
        (["inputs.family=trainee"], ["inputs.family", "'trainee'", "synthetic, trained"]),
        (["inputs.rounds=x"], ["inputs.family", "inputs=trained"]),
        (["inputs=trained"], ["inputs", "add pair=tiny"]),
        (["inputs=trained", "pair=tiny", "pair.head=rnn"], ["pair", "tiny has head rnn"]),
        (["inputs=trained", "pair=tiny", "experiment.steps=[1,17]"], ["pair", "tiny drafts 16 tokens", "[1, 17]"]),
        (["inputs=trained", "pair=tiny", "experiment=toy_walk"], ["inputs", "experiment=toy_walk", "inputs=synthetic"]),
    ],
)
def test_a_typo_fails_in_one_line_that_names_the_key(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(words[0])
    assert all(word in message for word in words)


def test_the_twin_that_hydra_sees_has_the_fields_of_the_original() -> None:
    from experiments.compose import _open

    for experiment in EXPERIMENTS.values():
        assert [item.name for item in fields(_open(experiment))] == [item.name for item in fields(experiment)]
