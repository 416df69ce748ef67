from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.acceptance import (
    EXPERIMENT,
    POOLED,
    Cell,
    Comparison,
    acceptance_table,
    comparisons,
    fewest_identical,
    positions,
    positions_table,
)  # fmt: skip
from analysis.answer import Answer, all_records, answer_all
from analysis.claim import InvalidClaim, Verdict, load_claims
from analysis.document import render
from analysis.equivalence import Equivalence
from analysis.load import InvalidRun, Run, all_runs, load_run
from tests.data import make_runs
from tests.data.make_runs import ACCEPTANCE, ACCEPTANCE_BATCHES, OTHER_TEXTS

PROMPTS = 45
LATER = "20260102T000000Z-h200-0"


@pytest.fixture(scope="module")
def run(results: Path) -> Run:
    return all_runs(results, EXPERIMENT, "h200")[0]


@pytest.fixture(scope="module")
def found(run: Run) -> dict[Cell, Comparison]:
    return {cell: arms["resident"] for cell, arms in comparisons([run]).items()}


def _length(rows: list[dict]) -> float:
    return sum(row["tokens"] for row in rows) / sum(row["rounds"] for row in rows)


def test_every_cell_and_all_its_batches_together_are_compared(run: Run, found: dict[Cell, Comparison]) -> None:
    rows = run.table("acceptance").to_dict("records")
    assert set(found) == {
        Cell("tiny", steps, temperature, batch) for steps, temperature in ACCEPTANCE for batch in (*ACCEPTANCE_BATCHES, POOLED)
    }
    for cell, each in found.items():
        inside = [
            row for row in rows if (row["steps"], row["temperature"]) == (cell.steps, cell.temperature) and row["batch"] in (cell.batch or row["batch"],)
        ]  # fmt: skip
        default, ours = (_length([row for row in inside if row["variant"] == arm]) for arm in ("sglang_folded", "resident"))
        assert each.lengths == pytest.approx((default, ours))
        assert each.change.value == pytest.approx(100 * (ours / default - 1))
        assert (each.change.clusters, each.identity.prompts, each.sources) == (PROMPTS, PROMPTS, 9)
        assert each.batches == ((cell.batch,) if cell.batch else ACCEPTANCE_BATCHES)


def test_the_verdicts_are_the_truths_of_the_fixture(found: dict[Cell, Comparison]) -> None:
    by_place = {(cell.steps, cell.temperature): each for cell, each in found.items() if cell.batch == POOLED}
    verdicts = {place: each.verdict for place, each in by_place.items()}
    assert verdicts == {
        (7, 0.0): Equivalence.EQUIVALENT,
        (7, 1.0): Equivalence.UNDECIDED,
        (16, 0.0): Equivalence.DIFFERENT,
        (16, 1.0): Equivalence.UNDECIDED,
    }
    # 8 % of the rounds that accepted a token lose one, of about 4.27 tokens a round; 7 of 10 accept one
    assert by_place[16, 0.0].change.value == pytest.approx(-100 * 0.08 * 0.72 / 4.27, rel=0.1)
    assert (by_place[16, 0.0].needed_words, by_place[7, 0.0].needed) == ("no number", 1)
    assert by_place[7, 1.0].needed > PROMPTS


def test_a_text_must_be_the_same_in_both_arms_and_in_every_pass(run: Run, found: dict[Cell, Comparison]) -> None:
    assert found[Cell("tiny", 7, 0.0, 1)].identity.same == PROMPTS
    assert found[Cell("tiny", 16, 0.0, 64)].identity.same == PROMPTS - OTHER_TEXTS
    assert found[Cell("tiny", 7, 1.0, 1)].identity.same == 0
    fewest = fewest_identical([run], "resident")
    assert fewest is not None
    assert (fewest.identity.same, fewest.identity.prompts) == (PROMPTS - OTHER_TEXTS, PROMPTS)
    assert fewest_identical([run], "another") is None
    assert fewest_identical([run], "resident", pair="another") is None
    assert fewest_identical([], "resident") is None


def test_arms_that_agree_with_each_other_must_agree_with_themselves(tmp_path: Path) -> None:
    """Both change a text in the second pass."""

    def change(tables: dict[str, pd.DataFrame]) -> None:
        rows = tables["acceptance"]
        again = (rows["pass"] == 1) & (rows["prompt"] < 5) & (rows["steps"] == 7) & (rows["temperature"] == 0)
        rows.loc[again, "text_sha256"] = "another"

    fewest = fewest_identical([_edited(tmp_path, change)], "resident")
    assert fewest is not None
    assert fewest.identity.same == PROMPTS - 5


def test_positions_are_accepted_over_offered(run: Run) -> None:
    cell = Cell("tiny", 16, 1.0, 16)
    shares = positions(run, cell)
    rows = run.table("acceptance_positions").to_dict("records")
    for arm in ("resident", "sglang_folded"):
        for position in (0, 1, 9, 15):
            here = [
                row for row in rows
                if (row["steps"], row["temperature"], row["batch"], row["variant"], row["position"]) == (16, 1.0, 16, arm, position)
            ]  # fmt: skip
            assert shares[arm][position] == pytest.approx(sum(row["accepted"] for row in here) / sum(row["offered"] for row in here))
    # a prompt accepts every position with one rate, and only prompts with high ones reach the later positions
    assert shares["resident"][0] == pytest.approx(0.72, abs=0.04)
    assert np.mean(shares["resident"][8:]) > shares["resident"][0] + 0.05
    pooled = positions(run, Cell("tiny", 16, 1.0, POOLED))
    assert pooled["resident"][0] == pytest.approx(np.mean([positions(run, Cell("tiny", 16, 1.0, batch))["resident"][0] for batch in ACCEPTANCE_BATCHES]))  # fmt: skip
    line = next(line for line in positions_table(run, cell).splitlines() if "`resident`" in line)
    assert line.startswith(f"| `resident` | {100 * shares['resident'][0]:.1f} | ")


def test_the_table_says_what_was_found(found: dict[Cell, Comparison], results: Path) -> None:
    lines = acceptance_table(comparisons(all_runs(results, EXPERIMENT, "h200"))).splitlines()
    line = next(line for line in lines if line.startswith("| tiny, 16, 0, all |"))
    each = found[Cell("tiny", 16, 0.0, POOLED)]
    for part in (
        f"{each.lengths[1]:.3f}",
        f"{each.change.wide:+.2f}",
        f"[{each.change.narrow.low:+.2f}, ",
        "different",
        "no number",
        "43 of 45",
    ):
        assert part in line
    assert any(line.startswith("| tiny, 7, 1, 16 |") and line.endswith("|  |") for line in lines)  # texts of draws are nobody's
    assert "±0.5 %" in lines[-1]
    assert acceptance_table({}) == "Not measured yet."
    book = load_claims()
    records = all_records(book, results)
    assert "\n".join(lines) in render("<!-- claims:acceptance --><!-- /claims -->", [], {EXPERIMENT: records[EXPERIMENT]})


def _edited(root: Path, change: Callable[[dict[str, pd.DataFrame]], None], **shape: object) -> Run:
    tables = make_runs.acceptance_tables(batches=(1,), **shape)  # pyright: ignore[reportArgumentType]
    change(tables)
    return load_run(make_runs.acceptance(root, tables, run_id=LATER))


def _lose_a_prompt(tables: dict[str, pd.DataFrame]) -> None:
    tables["acceptance"] = tables["acceptance"].query("variant != 'resident' or prompt != 3 or steps != 7")


def _swap_a_pass(tables: dict[str, pd.DataFrame]) -> None:
    rows = tables["acceptance"]
    rows.loc[(rows["variant"] == "resident") & (rows["pass"] == 1), "pass"] = 2


def _state_twice(tables: dict[str, pd.DataFrame]) -> None:
    tables["acceptance"] = pd.concat([tables["acceptance"], tables["acceptance"].iloc[:1]])


def _add(column: str) -> Callable[[dict[str, pd.DataFrame]], None]:
    def change(tables: dict[str, pd.DataFrame]) -> None:
        rows = tables["acceptance"]
        rows[column] += rows.index == 5

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_lose_a_prompt, "not of the same batches, passes and prompts"),
        (_swap_a_pass, "not of the same batches, passes and prompts"),
        (_state_twice, "states a prompt of an arm twice"),
        (_add("tokens"), "1 rows of acceptance cannot be counts of whole rounds"),
        (_add("drafted"), "cannot be counts of whole rounds"),
        (_add("rounds"), "cannot be counts of whole rounds"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(tmp_path: Path, change: Callable[[dict[str, pd.DataFrame]], None], words: str) -> None:
    with pytest.raises(InvalidRun, match=words):
        comparisons([_edited(tmp_path, change)])


@pytest.mark.parametrize("column", ["offered", "accepted"])
def test_positions_must_add_up_to_the_prompts(tmp_path: Path, column: str) -> None:
    def change(tables: dict[str, pd.DataFrame]) -> None:
        rows = tables["acceptance_positions"]
        rows[column] += rows.index == 3

    with pytest.raises(InvalidRun, match="do not follow from one another"):
        positions(_edited(tmp_path, change), Cell("tiny", 7, 0.0, 1))


def test_a_cell_is_taken_from_the_newest_run_that_has_it(tmp_path: Path) -> None:
    make_runs.acceptance(tmp_path)
    make_runs.acceptance(tmp_path, run_id=LATER, truth={(7, 0.0): 0.2}, batches=(1,), prompts=20)
    found = comparisons(all_runs(tmp_path, EXPERIMENT, "h200"))
    runs = {cell: arms["resident"].run.run_id == LATER for cell, arms in found.items()}
    assert [cell for cell, new in runs.items() if new] == [Cell("tiny", 7, 0.0, POOLED), Cell("tiny", 7, 0.0, 1)]


def _expecting(tables: dict[str, pd.DataFrame]) -> None:
    """Half of the default's tokens were expected to pass, and all of the other arm's."""
    rows = tables["acceptance"]
    share = rows["variant"].map({"sglang_folded": 0.5, "resident": 1.0})
    tables["acceptance_expected"] = rows.assign(expected=share * rows["accepted"])[rows["temperature"] > 0]


def test_expected_tokens_count_where_they_are_recorded(tmp_path: Path) -> None:
    plain, expecting = (comparisons([_edited(tmp_path / name, change)]) for name, change in (("a", lambda _: None), ("b", _expecting)))
    greedy, sampled = Cell("tiny", 7, 0.0, 1), Cell("tiny", 7, 1.0, 1)
    assert expecting[greedy]["resident"].change == plain[greedy]["resident"].change
    before, after = (found[sampled]["resident"].lengths for found in (plain, expecting))
    assert after[1] == before[1]
    assert after[0] - 1 == pytest.approx((before[0] - 1) / 2)


@pytest.mark.parametrize("wrong", ["lost", "twice", "too many"])
def test_expected_tokens_that_cannot_be(wrong: str, tmp_path: Path) -> None:
    def change(tables: dict[str, pd.DataFrame]) -> None:
        _expecting(tables)
        rows = tables["acceptance_expected"]
        edited = {"lost": rows.iloc[1:], "twice": pd.concat([rows, rows.iloc[:1]]), "too many": rows.assign(expected=1e6)}
        tables["acceptance_expected"] = edited[wrong]

    with pytest.raises(InvalidRun, match=r"expected .*measure it again"):
        comparisons([_edited(tmp_path, change)])


def _drafting_beside(tables: dict[str, pd.DataFrame]) -> None:
    """Of every draft 0.7 tokens are expected to pass, and of the resident walk's in the default's rounds a thousandth more."""
    rows = tables["acceptance"].query("temperature > 0")
    tables["acceptance_expected"] = rows.assign(expected=0.7 * rows["rounds"])
    other = rows["variant"].map({"sglang_folded": "resident", "resident": "sglang_folded"})
    longer = 1 + 0.001 * (other == "resident")
    tables["acceptance_beside"] = rows.assign(text=rows["variant"], variant=other, expected=0.7 * longer * rows["rounds"])


def test_arms_that_draft_in_the_same_rounds_are_compared_there(tmp_path: Path) -> None:
    """Half of the rounds an arm has in the other's text; greedy cells are as they were."""
    found, plain = (comparisons([_edited(tmp_path / name, change)]) for name, change in (("a", _drafting_beside), ("b", lambda _: None)))
    greedy, sampled = Cell("tiny", 7, 0.0, 1), Cell("tiny", 7, 1.0, 1)
    assert found[greedy]["resident"].change == plain[greedy]["resident"].change
    each = found[sampled]["resident"]
    assert each.lengths[0] == pytest.approx(1.7)
    assert 1.7 < each.lengths[1] < 1.7007
    wide, before = each.change.wide, plain[sampled]["resident"].change.wide
    assert wide.high - wide.low < (before.high - before.low) / 20
    assert each.verdict == Equivalence.EQUIVALENT


@pytest.mark.parametrize("wrong", ["lost", "twice", "rounds", "too many"])
def test_drafts_beside_others_that_cannot_be(wrong: str, tmp_path: Path) -> None:
    def change(tables: dict[str, pd.DataFrame]) -> None:
        _drafting_beside(tables)
        rows = tables["acceptance_beside"]
        edited = {
            "lost": rows.iloc[1:],
            "twice": pd.concat([rows, rows.iloc[:1]]),
            "rounds": rows.assign(rounds=rows["rounds"] + 1),
            "too many": rows.assign(expected=1e6),
        }
        tables["acceptance_beside"] = edited[wrong]

    with pytest.raises(InvalidRun, match=r"acceptance_beside has not one draft of .*measure it again"):
        comparisons([_edited(tmp_path, change)])


def test_a_later_run_of_other_arms_hides_none(tmp_path: Path) -> None:
    make_runs.acceptance(tmp_path)
    tables = make_runs.acceptance_tables()
    for table in tables.values():
        table["variant"] = table["variant"].replace("resident", "e4m3")
    make_runs.acceptance(tmp_path, tables, run_id=LATER)
    found = comparisons(all_runs(tmp_path, EXPERIMENT, "h200"))
    assert {(arm, each.run.run_id == LATER) for arms in found.values() for arm, each in arms.items()} == {
        ("resident", False),
        ("e4m3", True),
    }
    answers = _answers(tmp_path)
    assert answers["accept.g16.t1"].run_id != LATER
    assert answers["accept.g16.t1"].ours is not None


def test_a_cell_without_the_default_has_no_comparison(tmp_path: Path) -> None:
    def change(tables: dict[str, pd.DataFrame]) -> None:
        tables["acceptance"] = tables["acceptance"].query("variant == 'resident'")

    assert set(map(len, comparisons([_edited(tmp_path, change)]).values())) == {0}


def _answers(root: Path) -> dict[str, Answer]:
    book = load_claims()
    records = {name: runs for name, runs in all_records(book, root).items() if name == EXPERIMENT}
    return {answer.claim.id: answer for answer in answer_all(book, records) if answer.claim.id.startswith("accept.")}


def test_the_claims_state_the_papers_changes() -> None:
    claims = {claim.id: claim for claim in load_claims().claims if claim.id.startswith("accept.")}
    assert {name: claim.paper for name, claim in claims.items()} == {
        "accept.g7.t0": "-0.09 [-0.36, 0.17]",
        "accept.g7.t1": "0.11 [-0.39, 0.62]",
        "accept.g16.t0": "0.09 [-0.34, 0.50]",
        "accept.g16.t1": "0.47 [-0.20, 1.07]",
        "accept.greedy_identity": "605",
    }


def test_the_claims_are_answered_by_the_pooled_change_and_its_verdict(results: Path, found: dict[Cell, Comparison]) -> None:
    answers = _answers(results)
    expected = {"g7.t0": Verdict.REPRODUCED, "g7.t1": Verdict.UNDECIDED, "g16.t0": Verdict.SHORT, "g16.t1": Verdict.UNDECIDED}
    for (name, verdict), (steps, temperature) in zip(expected.items(), ACCEPTANCE, strict=True):
        answer, each = answers[f"accept.{name}"], found[Cell("tiny", steps, temperature, POOLED)]
        assert (answer.verdict, answer.ours, answer.ratio) == (verdict, each.change.wide, None), name
        assert (f"45 prompts; {each.needed_words} would show" in answer.reason) == (verdict == Verdict.UNDECIDED)
    identity = answers["accept.greedy_identity"]
    assert (identity.ours, identity.verdict) == (None, Verdict.NOT_MEASURED)
    assert "43 of 45 prompts, not of 605" in identity.reason


@pytest.mark.parametrize(("lost", "verdict"), [(0.0, Verdict.REPRODUCED), (0.1, Verdict.SHORT), (-0.1, Verdict.BETTER)])
def test_a_change_that_is_no_tie_is_short_or_better_by_its_sign(tmp_path: Path, lost: float, verdict: Verdict) -> None:
    def swap(tables: dict[str, pd.DataFrame]) -> None:
        if lost < 0:
            tables["acceptance"]["variant"] = tables["acceptance"]["variant"].map(
                {"resident": "sglang_folded", "sglang_folded": "resident"}
            )

    _edited(tmp_path, swap, truth={(7, 0.0): abs(lost)})
    assert _answers(tmp_path)["accept.g7.t0"].verdict == verdict


def test_all_605_texts_or_the_claim_falls_short(tmp_path: Path) -> None:
    make_runs.acceptance(tmp_path, truth={(7, 0.0): 0.0}, prompts=605, batches=(1, 16))
    same = _answers(tmp_path)["accept.greedy_identity"]
    assert (same.verdict, getattr(same.ours, "value", None)) == (Verdict.REPRODUCED, 605)
    make_runs.acceptance(tmp_path, run_id=LATER, truth={(7, 0.0): 0.0, (16, 0.0): 0.0}, prompts=605, batches=(1,))
    other = _answers(tmp_path)["accept.greedy_identity"]
    assert (other.verdict, getattr(other.ours, "value", None)) == (Verdict.SHORT, 605 - OTHER_TEXTS)


def test_two_pairs_are_not_pooled(tmp_path: Path) -> None:
    both = [make_runs.acceptance_tables(batches=(1,), truth={(7, 0.0): 0.0}, pair=pair) for pair in ("tiny", "other")]
    make_runs.acceptance(tmp_path, {name: pd.concat([each[name] for each in both]) for name in both[0]})
    assert "has the pairs other, tiny; name one in the query" in _answers(tmp_path)["accept.g7.t0"].reason
    assert {cell.pair for cell in comparisons(all_runs(tmp_path, EXPERIMENT, "h200"))} == {"tiny", "other"}


HEADER = "device: h200\nmeasurable: [H100]\nsources: {S0: blog}\nclaims:\n  - {id: a, source: S0, where: here, unit: '%', hardware: H100, "


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("value: 0.1, query: {measure: acceptance_change, variant: resident}", "name the one arm that it is compared with"),
        ("value: 0.1, interval: [0.2, 0.3]", r"interval=\[0.2, 0.3\] around 0.1"),
        ("value: 0.1, interval: [0.1]", r"interval=\[0.1\] around 0.1"),
    ],
)
def test_a_claim_that_cannot_be_asked_is_refused(tmp_path: Path, entry: str, words: str) -> None:
    (tmp_path / "claims.yaml").write_text(f"{HEADER}{entry}}}\n")
    with pytest.raises(InvalidClaim, match=words):
        load_claims(tmp_path / "claims.yaml")
