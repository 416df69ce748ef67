from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from experiments.convert import ConfigError
from experiments.schema import Config, HeadConfig, Smoke
from experiments.workload import Arm, Workload, create
from kernels.device import load
from kernels.walk import Rounding, Unsupported


@pytest.fixture
def workload(config: Config) -> Workload:
    return Workload(config, max_steps=5, batch=1)


def _arm(workload: Workload, **options: str) -> Arm:
    return workload.prepare("oracle", "reference", options)


def test_the_input_sets_differ_in_their_first_token_so_at_every_length(workload: Workload) -> None:
    arm = _arm(workload)
    answers = []
    for which in (0, 1):
        subject = workload.subject(arm, 1)
        subject.load(which)
        subject.launch()
        answers.append(int(subject.tokens[0, 0]))
        assert subject.verify(which, subject.tokens).ok
        assert not subject.verify(1 - which, subject.tokens).ok
    assert answers[0] != answers[1]


def test_a_shorter_walk_is_a_prefix_of_a_longer_one(workload: Workload) -> None:
    arm = _arm(workload)
    tokens = {}
    for steps in (2, 5):
        subject = workload.subject(arm, steps)
        subject.load(1)
        subject.launch()
        tokens[steps] = subject.tokens
    assert torch.equal(tokens[2], tokens[5][:, :2])


def test_arms_of_one_length_share_their_inputs_and_not_their_drafts(workload: Workload) -> None:
    first, second = (workload.subject(_arm(workload), 3) for _ in range(2))
    first.load(1)
    second.launch()  # reads what `first` loaded
    assert second.verify(1, second.tokens).ok
    assert (first.tokens == -1).all()


def test_every_rounding_has_its_own_oracle(workload: Workload) -> None:
    for rounding in (Rounding.TWICE, Rounding.NEVER, Rounding.INT8):
        subject = workload.subject(_arm(workload, rounding=str(rounding)), 5)
        subject.load(0)
        subject.launch()
        assert subject.rounding == rounding
        agreement = subject.verify(0, subject.tokens)
        assert (agreement.ok, agreement.tokens, agreement.near_ties) == (True, 5, 0)
        subject.tokens[0, 2] = (subject.tokens[0, 2] + 1) % 64
        assert "step 2" in subject.verify(0, subject.tokens).reason


def test_batches_are_walked_too(config: Config) -> None:
    workload = Workload(config, max_steps=4, batch=3)
    subject = workload.subject(_arm(workload), 2)
    subject.load(1)
    subject.launch()
    assert subject.tokens.shape == (3, 2)
    assert subject.verify(1, subject.tokens).ok


def test_a_floor_comes_from_resources_and_base_logits(workload: Workload) -> None:
    object.__setattr__(workload.config, "device", load("h200"))
    floor = workload.subject(_arm_on_cpu(workload), 5).floor_us
    assert floor["cold"] == pytest.approx(5 * 64 * 2 / 4800e3)
    assert floor["hot"] == 0.0


def _arm_on_cpu(workload: Workload) -> Arm:
    backend = create("reference", {})
    return Arm("oracle", backend, backend.prepare(workload.head, workload.limits, load("cpu")))


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("referense", {}, "backend: no backend is called 'referense'; did you mean 'reference'"),
        ("reference", {"roundin": 1}, "backend.options.roundin: unknown key (did you mean 'rounding'?); backend.options has: rounding"),
        ("reference", {"rounding": "thrice"}, "backend: backend reference has no rounding 'thrice'"),
        ("reference", {"rounding": 2}, "backend.options.rounding: expected str, got 2"),
        ("vllm_addmm", {"depth": 2}, "backend.options.depth: unknown key; backend.options has: none"),
        ("streaming_sm90", {"depth": "3"}, "backend.options.depth: expected int, got '3'"),
        ("streaming_sm90", {"depth": True}, "backend.options.depth: expected int, got True"),
        ("streaming_sm90", {"clocks": 1}, "backend.options.clocks: expected bool, got 1"),
        ("streaming_sm90", {"warps": 8.0}, "backend.options.warps: expected int, got 8.0; null is accepted too"),
        ("streaming_sm90", {"weights": "fp8"}, "backend.options"),
    ],
)
def test_a_backend_or_option_that_does_not_exist_is_a_config_error(backend: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create(backend, options)
    assert str(caught.value).startswith(message)
    assert create("streaming_sm90", {"warps": None, "depth": 2})


def test_what_cannot_run_here_says_so(config: Config, workload: Workload) -> None:
    with pytest.raises(
        Unsupported, match="backend=resident_sm90 runs on sm_90a; device=cpu is cpu; choose device=h100 or h200 .* backend=reference"
    ):
        workload.prepare("resident", "resident_sm90", {})
    with pytest.raises(
        Unsupported, match=r"head=huge with vocab 1000000000 and rank 4096 needs 32768\.0 GB .* choose a smaller head\.vocab"
    ):
        Workload(replace(config, head=HeadConfig("huge", 10**9, 4096)), 1, 1)
    with pytest.raises(Unsupported, match="device=h200 needs a CUDA GPU"):
        Workload(replace(config, device=load("h200")), 1, 1)
    with pytest.raises(Unsupported, match=r"base logits at batch 2 and up to 1000000000 steps 768\.0 GB.* or experiment\.steps"):
        Workload(replace(config, experiment=Smoke(steps=(10**9,), batch=2)), 10**9, 2)


def test_a_head_that_gives_one_answer_to_everything_cannot_be_checked(config: Config) -> None:
    with pytest.raises(ConfigError, match="same first token"):
        Workload(replace(config, head=HeadConfig("one", 1, 4)), 1, 1)
