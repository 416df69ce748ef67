from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from experiments.convert import ConfigError
from experiments.outcome import Incorrect
from experiments.schema import Config, HeadConfig, Smoke
from experiments.workload import Arm, Workload, create
from kernels.device import load
from kernels.synthetic import synthetic_inputs
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
        assert workload.verify(arm.backend, which, subject.tokens).ok
        assert not workload.verify(arm.backend, 1 - which, subject.tokens).ok
    assert answers[0] != answers[1]


def test_of_many_sets_each_has_another_answer_than_the_one_before(config: Config) -> None:
    workload = Workload(config, max_steps=4, batch=2, sets=30, least_steps=1)
    arm, answers = _arm(workload), []
    assert len(workload.sets) == 30
    for which in range(30):
        subject = workload.subject(arm, 1, 1)
        subject.load(which)
        subject.launch()
        answers.append(int(subject.tokens[0, 0]))
    assert all(one != other for one, other in pairwise(answers))
    longer = Workload(config, max_steps=4, batch=2, sets=30, least_steps=4)
    assert torch.equal(longer.sets[1].base_logits, synthetic_inputs(64, 4, 2, 1).base_logits)


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
    assert second.examiner.examine(1, second.draft).ok
    assert (first.tokens == -1).all()


def test_every_rounding_has_its_own_oracle(workload: Workload) -> None:
    for rounding in (Rounding.TWICE, Rounding.NEVER, Rounding.INT8):
        subject = workload.subject(_arm(workload, rounding=str(rounding)), 5)
        subject.load(0)
        subject.launch()
        assert subject.rounding == rounding
        agreement = subject.examiner.examine(0, subject.draft)
        assert (agreement.ok, agreement.tokens, agreement.near_ties) == (True, 5, 0)
        subject.tokens[0, 2] = (subject.tokens[0, 2] + 1) % 64
        with pytest.raises(Incorrect, match="input set 0: request 0 step 2"):
            subject.examiner.examine(0, subject.draft)


def test_batches_are_walked_too(config: Config) -> None:
    workload = Workload(config, max_steps=4, batch=3)
    arm, tokens = _arm(workload), {}
    for batch in (None, 1, 2):
        subject = workload.subject(arm, 2, batch)
        subject.load(1)
        subject.launch()
        assert subject.tokens.shape == (batch or 3, 2)
        assert subject.cell["batch"] == (batch or 3)
        assert subject.examiner.examine(1, subject.draft).tokens == (batch or 3) * 2
        tokens[batch] = subject.tokens
    assert torch.equal(tokens[1], tokens[None][:1])  # a smaller batch is the first requests of a larger one
    assert torch.equal(tokens[2], tokens[None][:2])


def test_a_walk_with_a_temperature_keeps_its_logits(workload: Workload) -> None:
    subject = workload.subject(_arm(workload), 3, temperature=0.5)
    assert subject.cell["temperature"] == 0.5
    assert subject.draft.logits is not None
    assert subject.draft.logits.shape == (1, 3, 64)
    assert workload.subject(_arm(workload), 3).draft.logits is None
    subject.draft.tokens.zero_()
    subject.draft.logits.zero_()
    subject.poison()
    assert (subject.draft.tokens == -1).all()
    assert subject.draft.logits.isnan().all()


def test_a_floor_comes_from_resources_and_the_base_logits_of_all_requests(config: Config) -> None:
    workload = Workload(config, max_steps=5, batch=3)
    object.__setattr__(workload.config, "device", load("h200"))
    arm = _arm_on_cpu(workload)
    for batch in (1, 3):
        floor = workload.subject(arm, 5, batch).floor_us
        assert floor["cold"] == pytest.approx(batch * 5 * 64 * 2 / 4800e3)
        assert floor["hot"] == 0.0
    small_l2 = replace(load("h200"), l2_bytes=1000)
    object.__setattr__(workload.config, "device", small_l2)
    moved = 3 * 5 * 64 * 2  # read, and written at T > 0
    greedy, sampled = (workload.subject(arm, 5, temperature=t).floor_us for t in (0.0, 1.0))
    assert greedy == pytest.approx({"cold": moved / 4800e3, "hot": (moved - 1000) / 4800e3})
    assert sampled == pytest.approx({"cold": (2 * moved - 1000) / 4800e3, "hot": 2 * (moved - 1000) / 4800e3})


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
    with pytest.raises(
        Unsupported, match=r"base logits at batch 2 and up to 4 steps 102400000\.0 GB.* choose a smaller experiment\.sets, head\.vocab"
    ):
        Workload(config, 4, 2, sets=10**14 - 1)


def test_a_head_that_gives_one_answer_to_everything_cannot_be_checked(config: Config) -> None:
    with pytest.raises(ConfigError, match="same first token"):
        Workload(replace(config, head=HeadConfig("one", 1, 4)), 1, 1)
