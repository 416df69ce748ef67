"""Walks that do a part of every step twice, on a GPU: the oracle's tokens all the same, and steps that take longer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.heads.markov import MarkovHead
from kernels.walk import ClockedWalk, Draft
from tests.kernels.arm import H200, STAGES, Arm, compile_all, first_of, head_on_gpu, inputs_on_gpu
from tests.kernels.test_persistent_walks import special_rows

pytestmark = pytest.mark.gpu

VOCAB = 151_936
QUEUED = 60  # launches
LEAST_CYCLES = {"score": 900, "reduce": 40, "exchange": 400, "latent": 150}  # about half of what each should take


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    cases = [(arm, vocab, H200) for vocab in (1_000, 49_153, 129_280, VOCAB) for arm in STAGES]
    compile_all(cases + [(Arm.resident(clocks=True, twice=stage), VOCAB, H200) for stage in ("none", *LEAST_CYCLES)])


@pytest.mark.parametrize("arm", STAGES, ids=str)
@pytest.mark.parametrize("vocab", [1_000, 49_153, VOCAB])
def test_every_length_gives_the_oracles_tokens(arm: Arm, vocab: int) -> None:
    """Launches of different lengths, so that each meets what another left in both banks of pairs."""
    head = head_on_gpu(vocab)
    walk, longest = arm.prepare(head), inputs_on_gpu(vocab, 16, arm.temperatures, 1)
    for steps in (16, 1, 2, 7, 16, 5, 13):
        arm.assert_right(walk, head, first_of(longest, 1, steps))


@pytest.mark.parametrize("arm", [Arm.resident(steps=32, twice=stage) for stage in LEAST_CYCLES], ids=str)
def test_the_longest_walk(arm: Arm) -> None:
    """32 steps: all pairs are used, and slots of base logits again."""
    head = head_on_gpu(129_280)
    arm.assert_right(arm.prepare(head), head, inputs_on_gpu(129_280, 32, arm.temperatures))


@pytest.mark.parametrize("arm", STAGES, ids=str)
@pytest.mark.parametrize("vocab", [1_000, VOCAB])
def test_ties_nan_and_infinities(arm: Arm, vocab: int) -> None:
    """With W2 = 0 the logits are the base's."""
    head = MarkovHead(*(torch.full((vocab, 256), value, dtype=torch.bfloat16, device="cuda") for value in (1.0, 0.0)))
    rows = special_rows(vocab)
    arm.assert_right(arm.prepare(head), head, replace(inputs_on_gpu(vocab, len(rows)), base_logits=rows[None]))


@pytest.mark.parametrize("arm", STAGES, ids=str)
def test_launches_one_after_the_other_without_a_pause(arm: Arm) -> None:
    """Queued behind a sleeping GPU: what one leaves behind meets the next at once."""
    head = head_on_gpu(VOCAB)
    walk, inputs = arm.prepare(head), inputs_on_gpu(VOCAB, 4, arm.temperatures, 5)
    drafts = [Draft.like(inputs) for _ in range(QUEUED)]
    torch.cuda._sleep(100_000_000)  # cycles: 50 ms, longer than the host needs
    for draft in drafts:
        walk.launch(inputs, draft)
    torch.cuda.synchronize()
    agreement = arm.agreement(walk, head, inputs, drafts[0], 0)
    assert agreement.ok, agreement.reason
    assert all(torch.equal(draft.tokens, drafts[0].tokens) for draft in drafts)


def cycles_a_step(stage: str) -> float:
    """Median over launches and steps, hot L2, by the clock of CTA 0."""
    head, arm = head_on_gpu(VOCAB), Arm.resident(clocks=True, twice=stage)
    walk, inputs = arm.prepare(head), inputs_on_gpu(VOCAB, 16, arm.temperatures)
    assert isinstance(walk, ClockedWalk)
    passed = []
    for _ in range(20):
        arm.assert_right(walk, head, inputs)
        passed.append(walk.step_stamps()[1:, 0].diff())
    return float(torch.cat(passed).median())


def test_a_part_that_is_done_twice_takes_longer() -> None:
    plain = cycles_a_step("none")
    more = {stage: cycles_a_step(stage) - plain for stage in LEAST_CYCLES}
    assert all(more[stage] >= least for stage, least in LEAST_CYCLES.items()), f"{more} cycles more than the {plain} of a plain step"
    assert max(more.values()) < plain, f"{more}: no part is the whole step of {plain} cycles"
