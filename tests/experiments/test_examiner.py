"""Walks that sample: honest ones pass, and every planted cheat is caught, before timing or under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from experiments import record
from experiments.examiner import Oracle, Repeating, Unrepeatable
from experiments.measure import measure
from experiments.outcome import Incorrect, Row
from experiments.schema import Config, Timing
from experiments.stopwatch import CpuStopwatch, Reading, Shot
from experiments.workload import Arm, Workload, create
from kernels.agreement import Agreement
from kernels.backends.candidate_walk import CandidateWalk
from kernels.reference import walk
from kernels.walk import Draft, NanRule, NoiseRule, Resources, Rounding, WalkInputs

TIMING = Timing(rounds=4, warmup=1, kernel_replays=0)
STEPS, BATCH, TEMPERATURE = 4, 3, 1.5
LIBRARY = NoiseRule.LIBRARY


class Replaying(CpuStopwatch):
    def time_calls(self, shots: Sequence[Shot]) -> list[Reading]:
        for shot in shots:
            shot.replay()
        return [Reading(10.0) for _ in shots]


@dataclass
class Drawing:
    """An honest walk: the host's own draws by the rule `drawn`, a round for every launch. `noise` is the rule that it tells."""

    workload: Workload
    noise: NoiseRule = NoiseRule.GROUPS
    drawn: NoiseRule = NoiseRule.GROUPS
    resources: Resources = field(default_factory=Resources)
    launches: int = 0

    def round(self) -> int:
        return self.launches

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        self.draw(inputs, out, self.launches)
        self.launches += 1

    def draw(self, inputs: WalkInputs, out: Draft, round: int) -> None:
        found = walk(self.workload.head, inputs, Rounding.INT8, noise=self.drawn, round=round, keep_logits=True)
        out.tokens.copy_(found.tokens)
        _logits(out).copy_(_logits(found))


def _logits(of: Draft | object) -> torch.Tensor:
    logits = getattr(of, "logits", None)
    assert isinstance(logits, torch.Tensor)
    return logits


class SameNoise(Drawing):
    """Counts its launches, and draws with the noise of the first one for ever."""

    def draw(self, inputs: WalkInputs, out: Draft, round: int) -> None:
        super().draw(inputs, out, 0)


class StoppedCounter(Drawing):
    """The same, and says so: its tokens are those of the round that it names."""

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        self.launches = 1
        self.draw(inputs, out, 0)


class OtherLogits(Drawing):
    """Samples from one set of logits and writes another."""

    def draw(self, inputs: WalkInputs, out: Draft, round: int) -> None:
        super().draw(inputs, out, round)
        _logits(out)[1, 2, 5] += 0.5


class Colder(Drawing):
    """Samples at half the temperature, where the verifier expects likely tokens less often, and writes the right logits."""

    def draw(self, inputs: WalkInputs, out: Draft, round: int) -> None:
        super().draw(replace(inputs, temperature=inputs.temperature / 2), out, round)


class Greedy(Drawing):
    """Takes the largest logit."""

    def draw(self, inputs: WalkInputs, out: Draft, round: int) -> None:
        super().draw(replace(inputs, temperature=0 * inputs.temperature), out, round)


class NoLogitsUnderTiming(Drawing):
    """Writes its logits while it is being checked, and saves that once it is being timed."""

    def draw(self, inputs: WalkInputs, out: Draft, round: int) -> None:
        kept = _logits(out).clone()
        super().draw(inputs, out, round)
        if round > 3:
            _logits(out).copy_(kept)


class OutOfRange(Drawing):
    def draw(self, inputs: WalkInputs, out: Draft, round: int) -> None:
        super().draw(inputs, out, round)
        out.tokens[0, -1] = inputs.vocab


@pytest.fixture
def workload(config: Config) -> Workload:
    return Workload(config, max_steps=STEPS, batch=BATCH)


def _cells(workload: Workload, *walks: Drawing) -> list[Row]:
    backend = create("reference", {"rounding": "int8"})
    arms = [Arm(type(prepared).__name__, backend, prepared) for prepared in walks]
    return measure([workload.subject(arm, STEPS, temperature=TEMPERATURE) for arm in arms], Replaying(), TIMING, 0).cells


@pytest.mark.parametrize("noise", NoiseRule)
def test_an_honest_walk_passes_before_under_and_after_timing(workload: Workload, noise: NoiseRule) -> None:
    drawing = Drawing(workload, noise, noise if noise is not LIBRARY else NoiseRule.GUMBEL)
    (cell,) = _cells(workload, drawing)
    assert (cell["status"], cell["reason"]) == ("ok", "")
    assert (cell["tokens"], cell["near_ties"], cell["temperature"], cell["batch"]) == (2 * STEPS * BATCH, 0, TEMPERATURE, BATCH)
    assert drawing.launches == 1 + 2 + 4 * 2 + 1  # warm-up, questions, a cold and a hot replay every round, the last question


@pytest.mark.parametrize(
    ("cheat", "noise", "reason"),
    [
        (SameNoise, NoiseRule.GROUPS, "input set 0: request"),
        (SameNoise, LIBRARY, "input set 0: all tokens are those of an earlier replay, so its noise repeats"),
        (StoppedCounter, NoiseRule.GROUPS, "input set 1: round 0 came twice, so its noise repeats"),
        (OtherLogits, NoiseRule.GROUPS, "input set 0: 1 of 768 corrected logits are not those of its own tokens (int8 rule)"),
        (OtherLogits, LIBRARY, "input set 0: 1 of 768 corrected logits are not those of its own tokens (int8 rule)"),
        (Colder, NoiseRule.GROUPS, "input set 0: request"),
        (Greedy, NoiseRule.GROUPS, "input set 0: request"),
        (Greedy, LIBRARY, "input set 0: all tokens are those of an earlier replay"),
        (NoLogitsUnderTiming, NoiseRule.GROUPS, "768 of 768 corrected logits are not finite"),
        (NoLogitsUnderTiming, LIBRARY, "768 of 768 corrected logits are not finite"),
        (OutOfRange, NoiseRule.GROUPS, "token 64 is outside [0, 64)"),
        (OutOfRange, LIBRARY, "token 64 is outside [0, 64)"),
    ],
)
def test_a_planted_cheat_is_caught_and_its_honest_neighbour_is_not(
    workload: Workload, cheat: type[Drawing], noise: NoiseRule, reason: str
) -> None:
    dishonest, honest = _cells(workload, cheat(workload, noise), Drawing(workload))
    assert dishonest["status"] == "incorrect"
    assert reason in dishonest["reason"]
    assert honest["status"] == "ok"


def test_logits_that_change_after_the_stream_is_done_are_late(workload: Workload) -> None:
    class WritesLater(Replaying):
        def drain(self) -> None:
            _logits(subject.draft)[0, 0, 0] += 1

    backend = create("reference", {"rounding": "int8"})
    subject = workload.subject(Arm("late", backend, Drawing(workload)), STEPS, temperature=TEMPERATURE)
    (cell,) = measure([subject], WritesLater(), TIMING, 0).cells
    assert (cell["status"], cell["reason"].split(":")[0]) == ("incorrect", "the draft changed after its stream was done")


def test_a_sampling_walk_without_its_logits_cannot_be_examined(workload: Workload) -> None:
    subject = workload.subject(Arm("a", create("reference", {"rounding": "int8"}), Drawing(workload)), STEPS, temperature=TEMPERATURE)
    subject.load(0)
    subject.launch()
    with pytest.raises(ValueError, match=r"examined with its corrected logits; pass Draft\.like\(inputs, logits=True\)"):
        subject.examiner.glance(0, Draft(subject.tokens))


def test_a_greedy_walk_that_gives_one_answer_to_both_sets_could_be_stale() -> None:
    examiner = Repeating(lambda which, tokens: Agreement(tokens.numel(), 0, 0, 0.0))
    draft = Draft(torch.tensor([[4, 2]]))
    assert examiner.examine(0, draft).tokens == 2
    with pytest.raises(RuntimeError, match="both input sets have the same answer"):
        examiner.examine(1, draft)


def test_a_greedy_walk_must_repeat_itself_even_where_two_answers_are_right() -> None:
    examiner = Repeating(lambda which, tokens: Agreement(tokens.numel(), 0, near_ties=1, worst_gap=0.0))
    examiner.examine(0, Draft(torch.tensor([[4, 2], [1, 1]])))
    with pytest.raises(Incorrect, match="input set 0, request 1 step 0: token 3; the checked answer is 1"):
        examiner.examine(0, Draft(torch.tensor([[4, 2], [3, 1]])))


def _sure(workload: Workload, logit: float) -> tuple[Oracle, Draft]:
    """A draft of token 3 everywhere, whose logit is so much above all others, which are equal."""
    inputs = replace(workload.sets[0], temperature=torch.ones(BATCH))
    logits = torch.zeros(inputs.base_logits.shape, dtype=torch.bfloat16).index_fill_(2, torch.tensor([3]), logit)
    return Oracle(workload.head, Rounding.TWICE, NanRule.LOSES, lambda which: inputs), Draft(torch.full((BATCH, STEPS), 3), logits)


@pytest.mark.parametrize(("logit", "chance", "repeats"), [(12.0, 1e-6, True), (0.0, 1e-6, False), (12.0, 1.0, False)])
def test_only_a_draw_that_is_likely_may_come_again_and_only_where_that_is_asked_for(
    workload: Workload, logit: float, chance: float, repeats: bool
) -> None:
    oracle, draft = _sure(workload, logit)
    examiner = Unrepeatable(oracle, chance)
    examiner.glance(0, draft)
    if repeats:
        examiner.glance(0, draft)
        return
    with pytest.raises(Incorrect, match="so its noise repeats"):
        examiner.glance(0, draft)


def test_a_greedy_walk_may_have_one_answer_to_sets_that_do_not_follow_each_other() -> None:
    examiner = Repeating(lambda which, tokens: Agreement(tokens.numel(), 0, 0, 0.0))
    for which, token in ((0, 4), (1, 2), (2, 4)):
        assert examiner.examine(which, Draft(torch.tensor([[token]]))).tokens == 1


@dataclass
class Pruned:
    """The host's own walk over two base candidates and one by bias."""

    workload: Workload
    backend: CandidateWalk
    resources: Resources = field(default_factory=Resources)
    noise: NoiseRule = NoiseRule.HASH
    launches: int = 0

    def round(self) -> int:
        return self.launches

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        sampled = bool((inputs.temperature > 0).any())
        out.tokens.copy_(self.tokens(inputs, self.noise if sampled else None))
        self.launches += 1

    def tokens(self, inputs: WalkInputs, noise: NoiseRule | None) -> torch.Tensor:
        return walk(self.backend.restricted(self.workload.head), inputs, Rounding.NEVER, noise=noise, round=self.launches).tokens


class Unpruned(Pruned):
    """Exact, where a walk over candidates was promised."""

    def tokens(self, inputs: WalkInputs, noise: NoiseRule | None) -> torch.Tensor:
        return walk(self.workload.head, inputs, Rounding.NEVER, noise=noise, round=self.launches).tokens


class SamePrunedNoise(Pruned):
    def round(self) -> int:
        return min(self.launches, 1)


@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE])
def test_an_approximate_walk_is_held_to_its_promise_and_its_distance_is_recorded(workload: Workload, temperature: float) -> None:
    backend = create("candidate_walk", {"base_candidates": 2, "bias_candidates": 1})
    assert isinstance(backend, CandidateWalk)
    arms = [Arm(type(each).__name__, backend, each) for each in (Pruned(workload, backend), Unpruned(workload, backend))]
    measured = measure([workload.subject(arm, STEPS, temperature=temperature) for arm in arms], Replaying(), TIMING, 0)
    honest, other = measured.cells
    assert (honest["status"], honest["rounding"], honest["reason"]) == ("ok", "approximate", "")
    assert other["status"] == "incorrect", "exact tokens are not what it promises"
    (row,) = measured.approximations
    assert (row["variant"], row["tokens"], row["temperature"]) == ("Pruned", 2 * STEPS * BATCH, temperature)
    record.table("approximations", measured.approximations, "a-run")

    astray = 0  # counted again, by hand
    for which in (0, 1):
        subject = workload.subject(arms[0], STEPS, temperature=temperature)
        subject.load(which)
        inputs = replace(workload.sets[which], temperature=torch.full((BATCH,), temperature))
        noise, round = (NoiseRule.HASH, which + 1) if temperature else (None, 0)
        tokens = walk(backend.restricted(workload.head), inputs, Rounding.NEVER, noise=noise, round=round).tokens
        astray += int((walk(workload.head, inputs, Rounding.NEVER, teacher=tokens, noise=noise, round=round).tokens != tokens).sum())
    assert 0 < astray < 2 * STEPS * BATCH
    assert row["astray"] == astray


def test_an_approximate_walk_that_repeats_its_noise_is_caught(workload: Workload) -> None:
    backend = create("candidate_walk", {"base_candidates": 2, "bias_candidates": 1})
    assert isinstance(backend, CandidateWalk)
    arm = Arm("same", backend, SamePrunedNoise(workload, backend))
    (cell,) = measure([workload.subject(arm, STEPS, temperature=TEMPERATURE)], Replaying(), TIMING, 0).cells
    assert cell["status"] == "incorrect"


def test_an_exact_walk_has_no_row_among_approximations(workload: Workload) -> None:
    subject = workload.subject(Arm("exact", create("reference", {"rounding": "int8"}), Drawing(workload)), STEPS, temperature=TEMPERATURE)
    assert measure([subject], Replaying(), TIMING, 0).approximations == []
