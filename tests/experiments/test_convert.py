from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.convert import ConfigError, config, convert
from experiments.schema import BackendConfig, Config, HeadConfig, StepSlope, Timing, Variant
from kernels.device import load

DEVICE = {"name": "cpu", "arch": "cpu"}
HEAD = {"name": "t", "vocab": 12, "rank": 4}
GOOD: dict[str, Any] = {"device": DEVICE, "head": HEAD, "backend": {"name": "reference"}, "experiment": {"name": "smoke"}}


def test_defaults_fill_what_is_not_said() -> None:
    made = config(GOOD)
    assert (made.head.vocab, made.head.w2_std, made.inputs.base_std, made.output) == (12, 0.05, 2.0, "runs")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experiment": {"name": "smoke", "steps": [1, 2, "x"]}}, "experiment.steps[2]: expected int, got 'x'"),
        ({"experiment": {"name": "smoke", "stepz": [1]}}, "experiment.stepz: unknown key (did you mean 'steps'?)"),
        ({"experiment": {"name": "smoke", "steps": 4}}, "experiment.steps: expected a list, got 4"),
        ({"experiment": {"name": "smoke", "steps": [2, 2]}}, "experiment.steps: needs different lengths"),
        ({"experiment": {"name": "step_slop"}}, "experiment.name: no experiment is called 'step_slop' (did you mean 'step_slope'?)"),
        ({"experiment": {"steps": [1]}}, "experiment.name: missing"),
        ({"experiment": {"name": "smoke", "timing": {"rounds": True}}}, "experiment.timing.rounds: expected int, got True"),
        ({"experiment": {"name": "step_slope", "variants": [{"label": "a", "bakend": "b"}]}}, "experiment.variants[0].bakend: unknown key (did you mean"),
        ({"experiment": {"name": "step_slope", "variants": [{"label": "a", "backend": "b"}] * 2}}, "experiment.variants: needs at least one, with different"),
        ({"head": {**HEAD, "vocab": 0}}, "head.vocab: must be at least 1; got 0"),
        ({"head": {**HEAD, "vocab": 12.0}}, "head.vocab: expected int, got 12.0"),
        ({"head": {"name": "t", "vocab": 12}}, "head.rank: missing"),
        ({"head": {**HEAD, "kind": "gru"}}, "head.kind: 'gru' is not a head"),
        ({"head": {**HEAD, "w1_std": float("nan")}}, "head.w1_std: must be finite and at least 0; got nan"),
        ({"head": {**HEAD, "w2_std": -0.5}}, "head.w2_std: must be finite and at least 0; got -0.5"),
        ({"inputs": {"base_std": float("inf")}}, "inputs.base_std: must be finite and at least 0; got inf"),
        ({"backend": {"name": "reference", "options": [1]}}, "backend.options: expected a group of keys"),
        ({"pair": {"name": "theirs", "target": "a/b", "draftr": "a/c"}}, "pair.draftr: unknown key (did you mean 'drafter'?)"),
        ({"pair": {"name": "ours", "width": "x", "layers": 2}}, "pair.vocabulary: missing"),
        ({"pair": "tiny"}, "pair: expected a group of keys, got 'tiny'"),
        ({"sed": 3}, "sed: unknown key (did you mean 'seed'?)"),
        ({"seed": None}, "seed: expected int, got None"),
    ],
)  # fmt: skip
def test_an_error_names_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config({**GOOD, **change})
    assert str(caught.value).startswith(message)


def test_an_int_serves_as_a_float_but_not_the_other_way() -> None:
    assert convert(HeadConfig, {**HEAD, "w1_std": 2}).w1_std == 2.0
    assert isinstance(convert(HeadConfig, {**HEAD, "w1_std": 2}).w1_std, float)


@given(
    steps=st.lists(st.integers(1, 99), min_size=1, max_size=5, unique=True),
    rounds=st.integers(1, 99),
    options=st.dictionaries(st.text("abc", min_size=1), st.one_of(st.integers(), st.booleans(), st.text())),
    seed=st.integers(-9, 9),
)
def test_a_config_survives_json(steps: list[int], rounds: int, options: dict[str, Any], seed: int) -> None:
    asked = StepSlope(
        (Variant("a", "reference", options), Variant("b", "reference", clocked=True)), steps=tuple(steps), timing=Timing(rounds)
    )
    before = Config(load("h200"), HeadConfig("t", 12, 4), BackendConfig("reference", options), asked, seed=seed)
    assert config(before.as_dict()) == before
    assert config(before.as_dict()).sha256 == before.sha256


def test_the_hash_is_of_the_question_not_of_where_the_answer_goes() -> None:
    assert config({**GOOD, "output": "elsewhere"}).sha256 == config(GOOD).sha256
    assert config({**GOOD, "seed": 1}).sha256 != config(GOOD).sha256
