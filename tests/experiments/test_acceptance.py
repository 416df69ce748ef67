"""Arms decode the same prompts, and what is counted adds up; arms that are the same show no change, and greedy text is the target's."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from analysis.acceptance import acceptance_rows, comparisons, positions
from analysis.load import Run, load_run
from experiments import acceptance
from experiments.convert import ConfigError
from experiments.drafter.checkpoint import Pair
from experiments.drafter.decode import decode_plainly, markov_head
from experiments.drafter.text import HeldOut
from experiments.drafter.verify import Rule
from experiments.execute import execute
from experiments.plan import Plan
from experiments.schema import RULES, Acceptance, DecodingArm, Load
from experiments.train_pair import Learnt
from kernels.walk import Unsupported
from tests.experiments.drafter.conftest import config, small_pair, small_vocabulary
from tests.experiments.drafter.test_target import tokens

ARMS = (("sglang_folded", "twice"), ("again", "twice"), ("resident", "int8"))
LOADS = (Load(1, 3), Load(3, 6))


@pytest.fixture(scope="module")
def pair() -> Pair:
    """Logits tame enough for drafts to pass now and then."""
    made = small_pair(small_vocabulary())
    for weight in (made.target.lm_head.weight, made.drafter.markov_head.markov_w1.weight, made.drafter.markov_head.markov_w2.weight):
        weight.mul_(0.1)
    return made


@pytest.fixture
def documents() -> list[HeldOut]:
    return [HeldOut(f"source{number:02}", "file", row) for number, row in enumerate(tokens(9, 6, 3))]


@pytest.fixture
def asked(plan: Plan, pair: Pair, documents: list[HeldOut], monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(acceptance, "trained", lambda *_: Learnt(pair, tuple(documents), []))
    arms = tuple(DecodingArm(label, "reference", {"rounding": rounding}) for label, rounding in ARMS)
    ask = Acceptance(arms, LOADS, steps=(3,), prompts=9, prompt_tokens=6)
    return replace(plan, config=replace(plan.config, experiment=ask, pair=pair.config))


def _ask(asked: Plan) -> Acceptance:
    return cast(Acceptance, asked.config.experiment)


def _with(asked: Plan, ask: Acceptance) -> Plan:
    return replace(asked, config=replace(asked.config, experiment=ask))


@pytest.fixture
def recorded(asked: Plan) -> Run:
    return load_run(execute(asked).folder)


def test_a_record_is_what_the_analysis_reads(recorded: Run) -> None:
    rows = acceptance_rows(recorded)
    assert len(rows) == 3 * 2 * 2 * 2 * 9, "arms, passes, temperatures, loads, prompts"
    seen = rows[["variant", "pass", "order"]].drop_duplicates().itertuples(index=False)
    orders = {(arm, passed, 2 - place if passed else place) for place, (arm, _) in enumerate(ARMS) for passed in (0, 1)}
    assert set(map(tuple, seen)) == orders, "the second pass has the arms in the opposite order"
    compared = comparisons([recorded])
    assert len(compared) == 2 * 3, "temperatures, and two loads beside both together"
    for cell, arms in compared.items():
        assert all(0 <= share <= 1 for shares in positions(recorded, cell).values() for share in shares if share == share)
        if cell.temperature == 0:
            assert arms["again"].change.wide.value == 0
            assert arms["resident"].identity.same == arms["resident"].identity.prompts == 9
    assert rows["accepted"].sum() > 0
    sampled = rows[rows["temperature"] > 0]
    assert not sampled["length"].eq(sampled["tokens"]).all(), "what is expected counts"
    assert abs(sampled["length"].sum() / sampled["tokens"].sum() - 1) < 0.1
    assert rows["length"].eq(rows["tokens"])[rows["temperature"] == 0].all()


def test_in_sampled_cells_every_arm_drafts_beside_every_other(recorded: Run) -> None:
    beside = recorded.table("acceptance_beside")
    assert len(beside) == 3 * 2 * 2 * 2 * 9, "texts, others, passes, loads, prompts"
    assert (beside["temperature"] > 0).all()
    assert (beside["variant"] != beside["text"]).all()
    assert beside.groupby(["variant", "text"]).ngroups == 6


def test_greedy_text_is_the_targets(recorded: Run, pair: Pair, documents: list[HeldOut]) -> None:
    rows, prompts = acceptance_rows(recorded), torch.stack([document.tokens for document in documents])
    for load in LOADS:
        plain = [text for group in prompts.split(load.batch) for text in decode_plainly(pair, group, load.tokens)]
        expected = {prompt: {hashlib.sha256(repr(text).encode()).hexdigest()} for prompt, text in enumerate(plain)}
        some = rows[(rows["temperature"] == 0) & (rows["batch"] == load.batch)]
        assert some.groupby("prompt")["text_sha256"].agg(set).to_dict() == expected


def test_sampled_passes_differ(recorded: Run) -> None:
    rows = acceptance_rows(recorded)
    sampled = rows[(rows["temperature"] > 0) & (rows["variant"] == "resident") & (rows["batch"] == 3)]
    assert (sampled.groupby(["steps", "prompt"])["text_sha256"].nunique() == 2).mean() > 0.9


def test_what_cannot_be_asked_is_told_in_a_sentence(asked: Plan, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs one; take pair=tiny or pair=qwen_vocab"):
        acceptance.run(replace(asked, config=replace(asked.config, pair=None)))
    with pytest.raises(ConfigError, match="pair small drafts up to 2 tokens at once; got 3"):
        acceptance.run(replace(asked, config=replace(asked.config, pair=config(block=2))))
    with pytest.raises(ConfigError, match="8 are from 8 sources and at least 9 are needed"):
        acceptance.run(_with(asked, replace(_ask(asked), prompts=8)))
    with pytest.raises(ConfigError, match=r"variants\[0\].weights: 'int4' is none of int8, e4m3"):
        acceptance.run(_with(asked, replace(_ask(asked), variants=(DecodingArm("a", "reference", weights="int4"),))))
    monkeypatch.setattr(acceptance, "trained", lambda *_: pytest.fail("a pair is trained for an arm that cannot run"))
    with pytest.raises(ConfigError, match="walk markov heads only; small has head gated"):
        acceptance.run(replace(asked, config=replace(asked.config, pair=config(head="gated"))))
    with pytest.raises(Unsupported, match="backend=resident_sm90 runs on"):
        acceptance.run(_with(asked, replace(_ask(asked), variants=(DecodingArm("a", "resident_sm90"),))))
    gated = small_pair(small_vocabulary())
    gated.drafter.markov_head.register_parameter("gate", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(Unsupported, match="pair small: .*markov_head.gate"):
        markov_head(gated)


def test_an_arm_may_have_its_weights_through_eight_bits(asked: Plan, documents: list[HeldOut], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the first arm all others draw with the same noise, so that only other weights are expected to pass otherwise. The head is a strong one, whose
    errors count."""
    strong = small_pair(small_vocabulary())
    strong.target.lm_head.weight.mul_(0.1)
    monkeypatch.setattr(acceptance, "trained", lambda *_: Learnt(strong, tuple(documents), []))
    arms = (*(DecodingArm(label, "reference") for label in ("sglang_folded", "again")), DecodingArm("e5m2", "reference", weights="e5m2"))
    ask = replace(_ask(asked), variants=arms, loads=(Load(9, 40, passes=1),), temperatures=(1.0,))
    run = load_run(execute(_with(asked, ask)).folder)
    own = run.table("acceptance_expected").query("variant == 'sglang_folded'").sort_values("prompt")["expected"].tolist()
    beside = run.table("acceptance_beside").query("text == 'sglang_folded'").sort_values("prompt").groupby("variant")["expected"].agg(list)
    assert beside["again"] == pytest.approx(own)
    assert beside["e5m2"] != pytest.approx(own)


def test_rules_have_their_names() -> None:
    assert tuple(Rule) == RULES
