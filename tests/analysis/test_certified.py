from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.answer import Answer, all_records, answer_all, run_for
from analysis.certified import (
    CERTIFIED,
    EXPERIMENT,
    FLAT,
    TRAINED,
    Cell,
    Measured,
    Share,
    ShareCell,
    certified_table,
    floor,
    measured,
    share_table,
    shares,
)  # fmt: skip
from analysis.claim import Query, Verdict, load_claims
from analysis.document import render
from analysis.load import InvalidRun, Run, all_runs, load_run
from tests.data import make_runs
from tests.data.make_runs import CERTIFIED_ARMS, CERTIFIED_GRID, CERTIFIED_SETS, LAUNCH_US, grid_time, unproved

HEAD, VOCAB = "qwen_vocab_markov", 151_936
LATER = "20260102T000000Z-h200-0"
GOALS = {
    "certified.g7.bs1.trained": 19,
    "certified.g16.bs1.trained": 24,
    "certified.v248k.g15": 29,
    "certified.g7.bs64": 75,
    "certified.g16.t1": 50,
    "certified.adverse_ratio": 1.1,
}


@pytest.fixture(scope="module")
def runs(results: Path) -> list[Run]:
    return all_runs(results, EXPERIMENT, "h200")


@pytest.fixture(scope="module")
def found(runs: list[Run]) -> dict[Cell, Measured]:
    return measured(runs)


@pytest.fixture(scope="module")
def proved(runs: list[Run]) -> dict[ShareCell, Share]:
    return shares(runs)


def _answers(root: Path) -> dict[str, Answer]:
    book = load_claims()
    return {answer.claim.id: answer for answer in answer_all(book, all_records(book, root)) if answer.claim.id.startswith("certified.")}


def _trained(steps: int = 7, batch: int = 1, temperature: float = 0.0, l2: str = "cold") -> Cell:
    return Cell(TRAINED, VOCAB, HEAD, steps, batch, temperature, l2)


def _edited(root: Path, change: Callable[[dict[str, pd.DataFrame]], None], **shape: object) -> Run:
    tables = make_runs.certified_tables(**shape)  # pyright: ignore[reportArgumentType]
    change(tables)
    return load_run(make_runs.certified(root, tables, run_id=LATER))


def test_every_cell_has_every_arms_quantiles_over_sets(runs: list[Run], found: dict[Cell, Measured]) -> None:
    heads = {TRAINED: HEAD, FLAT: "markov_v152k"}
    assert set(found) == {
        Cell(family, VOCAB, heads[family], *place, l2) for family in heads for place in CERTIFIED_GRID for l2 in ("cold", "hot")
    }
    trained = next(run for run in runs if run.manifest["config"]["inputs"]["family"] == TRAINED)
    rows = trained.table("certified_rounds").to_dict("records")
    each = found[_trained(16, temperature=1.0)]
    assert list(each.arms) == list(CERTIFIED_ARMS)
    for arm in CERTIFIED_ARMS:
        times = sorted(
            row["time_us"] for row in rows if (row["variant"], row["steps"], row["temperature"], row["l2"]) == (arm, 16, 1.0, "cold")
        )  # fmt: skip
        ours = each.arms[arm]
        assert ours.sets == len(times) == CERTIFIED_SETS
        assert ours.quantiles_us == pytest.approx([np.percentile(times, level) for level in (10, 25, 50, 75, 90)])
        assert ours.median_us.value == ours.quantiles_us[2]
        assert ours.median_us.low < ours.median_us.value < ours.median_us.high
    counts = [
        row["searched"] for row in rows if (row["variant"], row["steps"], row["temperature"], row["l2"]) == (CERTIFIED, 16, 1.0, "cold")
    ]
    assert each.arms[CERTIFIED].searched == pytest.approx([np.mean([n == 0 for n in counts]), np.mean([n == 1 for n in counts]), np.mean([n > 1 for n in counts])])  # fmt: skip
    assert each.arms["resident"].again is each.arms["resident"].searched is None
    assert each.fastest_serial == "resident"


def test_flat_inputs_search_everything(found: dict[Cell, Measured]) -> None:
    each = found[Cell(FLAT, VOCAB, "markov_v152k", 7, 1, 0.0, "cold")]
    assert each.arms[CERTIFIED].again == each.arms[CERTIFIED].searched == (0.0, 0.0, 1.0)
    replay = each.dispatches[CERTIFIED]
    serial, certified = grid_time("resident", VOCAB, 7, 1, 0.0), 13.0 + 7 * (0.4 + 1.6 + 7.5)
    assert (replay.serial, replay.share, replay.rounds) == ("resident", 0.1, CERTIFIED_SETS)
    assert replay.mean_us == pytest.approx(0.9 * serial + 0.1 * certified, rel=0.01)
    assert replay.regret_us == pytest.approx(0.1 * (certified - serial), rel=0.02)
    assert replay.best_us == pytest.approx(serial, rel=0.01)
    assert replay.over_serial.value == pytest.approx(0.9 + 0.1 * certified / serial, rel=0.01)
    assert replay.over_serial.low < replay.over_serial.value < replay.over_serial.high


def test_the_better_walk_in_hindsight_may_be_beaten_by_the_better_one_of_every_round(found: dict[Cell, Measured]) -> None:
    replay = found[_trained(7, temperature=1.0)].dispatches[CERTIFIED]
    assert replay.regret_us == pytest.approx(0)
    assert replay.best_us < replay.mean_us == pytest.approx(replay.certified_us)


def test_a_cell_is_taken_whole_from_the_newest_run(tmp_path: Path) -> None:
    old = load_run(make_runs.certified(tmp_path))
    new = load_run(make_runs.certified(tmp_path, run_id=LATER, grid=((7, 1, 0.0),), shares=False))
    found = measured([new, old])
    assert (found[_trained()].run.run_id, found[_trained(16)].run.run_id) == (new.run_id, old.run_id)
    assert {each.run.run_id for each in shares([new, old]).values()} == {old.run_id}


def test_a_stray_clock_takes_the_time_and_not_the_counts(tmp_path: Path) -> None:
    def change(tables: dict[str, pd.DataFrame]) -> None:
        rows = tables["certified_rounds"]
        stray = (rows["set"] > 9) & (rows["variant"] == CERTIFIED) | (rows["variant"] == "resident")
        rows.loc[stray, ["valid", "time_us"]] = [False, 1e6]

    run = _edited(tmp_path, change)
    arms, before = measured([run])[_trained()].arms, measured([load_run(make_runs.certified(tmp_path))])[_trained()].arms
    assert arms[CERTIFIED].sets == 10
    assert arms[CERTIFIED].quantiles_us[-1] < 100
    assert arms[CERTIFIED].again == before[CERTIFIED].again
    assert "resident" not in arms


def test_the_floor_is_a_launch_and_the_base_logits(runs: list[Run], found: dict[Cell, Measured]) -> None:
    assert floor(runs[0], VOCAB, 7) == pytest.approx(LAUNCH_US + 7 * VOCAB * 2 / 4.8e6)
    assert found[_trained(7, 64)].floor_us == pytest.approx(LAUNCH_US + 64 * 7 * VOCAB * 2 / 4.8e6)


def test_shares_are_those_of_the_first_steps(runs: list[Run], proved: dict[ShareCell, Share]) -> None:
    rows = next(run for run in runs if "certified_shares" in run.tables).table("certified_shares")
    assert len(proved) == 3 * 2 * 2 * 2
    for cell, each in proved.items():
        inside = rows[
            (rows["candidates"] == cell.candidates) & (rows["listed"] == cell.listed) & (rows["temperature"] == cell.temperature) & (rows["step"] < cell.first)
        ]  # fmt: skip
        assert (each.steps, each.sets) == (cell.first * CERTIFIED_SETS, CERTIFIED_SETS)
        assert each.unproved.value == pytest.approx(1 - inside["proved"].mean())
        assert each.lifted.value == pytest.approx(inside["lifted"].mean())
        assert each.unproved.low <= each.unproved.value <= each.unproved.high
    many = proved[ShareCell(TRAINED, VOCAB, HEAD, 1.0, 64, 64, 16)]
    assert many.unproved.value == pytest.approx(unproved(64, 64, 1.0), abs=0.04)


def test_without_an_unproved_step_three_in_all_are_the_bound(tmp_path: Path, proved: dict[ShareCell, Share]) -> None:
    def change(tables: dict[str, pd.DataFrame]) -> None:
        tables["certified_shares"]["proved"] = True

    of = shares([_edited(tmp_path, change)])[ShareCell(TRAINED, VOCAB, HEAD, 0.0, 256, 64, 7)]
    assert (of.unproved.value, of.unproved.low, of.unproved.high) == (0, 0, pytest.approx(3 / (7 * CERTIFIED_SETS)))
    book = load_claims()
    answer = {each.claim.id: each for each in answer_all(book, all_records(book, tmp_path))}["certified.share.m256j64"]
    assert answer.ours is not None
    assert (answer.ours.value, answer.ours.high) == (1, 1)
    assert answer.ours.low == pytest.approx(1 - 3 / (16 * CERTIFIED_SETS))


def test_a_newer_run_of_shorter_rounds_does_not_answer_for_longer_ones(tmp_path: Path) -> None:
    def change(tables: dict[str, pd.DataFrame]) -> None:
        rows = tables["certified_shares"]
        tables["certified_shares"] = rows[rows["step"] < 7].assign(steps=7)

    old = make_runs.certified(tmp_path)
    _edited(tmp_path, change)
    book = load_claims()
    answer = {each.claim.id: each for each in answer_all(book, all_records(book, tmp_path))}["certified.share.m256j64"]
    assert answer.run_id == old.name


def test_of_several_lengths_the_longest_gives_the_shares(tmp_path: Path) -> None:
    def change(tables: dict[str, pd.DataFrame]) -> None:
        rows = tables["certified_shares"]
        tables["certified_shares"] = pd.concat([rows, rows[rows["step"] < 7].assign(steps=7, proved=False, lifted=False)])

    cell = ShareCell(TRAINED, VOCAB, HEAD, 0.0, 256, 64, 7)
    assert shares([_edited(tmp_path, change)])[cell].unproved.value < 0.1


def test_claims_are_answered_by_their_own_inputs(results: Path, found: dict[Cell, Measured], proved: dict[ShareCell, Share]) -> None:
    answers = _answers(results)
    assert {name: answers[name].claim.goal for name in GOALS} == GOALS
    for name, cell in {
        "certified.g7.bs1.trained": _trained(),
        "certified.g16.bs1.trained": _trained(16),
        "certified.g7.bs64": _trained(7, 64),
        "certified.g16.t1": _trained(16, temperature=1.0),
    }.items():
        assert (answers[name].ours, answers[name].verdict) == (found[cell].arms[CERTIFIED].median_us, Verdict.NOT_STATED), name
        assert answers[name].run_id == found[cell].run.run_id
        assert answers[name].hardware == "NVIDIA H200"
    flat = found[Cell(FLAT, VOCAB, "markov_v152k", 7, 1, 0.0, "cold")]
    assert answers["certified.adverse_ratio"].ours == flat.dispatches[CERTIFIED].over_serial
    assert answers["certified.adverse_ratio"].run_id == flat.run.run_id
    share = answers["certified.share.m256j64"]
    assert share.ours is not None
    assert share.ours.value == pytest.approx(1 - proved[ShareCell(TRAINED, VOCAB, HEAD, 0.0, 256, 64, 16)].unproved.value)
    assert share.verdict == Verdict.REPRODUCED
    assert answers["certified.v248k.g15"].verdict == Verdict.NOT_MEASURED


def test_the_large_vocabulary_is_answered_by_any_inputs(tmp_path: Path) -> None:
    make_runs.certified(tmp_path, flat=True, vocab=248_320, grid=((15, 1, 0.0),), shares=False)
    answers = _answers(tmp_path)
    assert answers["certified.v248k.g15"].ours is not None
    assert answers["certified.v248k.g15"].as_json()["goal_met"] is False
    others = [answer for name, answer in answers.items() if name != "certified.v248k.g15"]
    assert {answer.verdict for answer in others} == {Verdict.NOT_MEASURED}


def test_a_run_of_other_tables_answers_nothing_and_stops_nothing(tmp_path: Path) -> None:
    tables = make_runs.certified_tables()
    make_runs.certified(tmp_path, {"certified_shares": tables["certified_shares"]}, run_id=LATER)
    query = Query("round_median", CERTIFIED, steps=7, vocab=VOCAB, inputs=TRAINED)
    records = {EXPERIMENT: all_runs(tmp_path, EXPERIMENT, "h200")}
    assert run_for(query, records) is None
    assert measured(records[EXPERIMENT]) == {}
    older = load_run(make_runs.certified(tmp_path, shares=False))
    assert run_for(query, {EXPERIMENT: [*records[EXPERIMENT], older]}) is older


def test_the_tables_say_what_was_found(found: dict[Cell, Measured], proved: dict[ShareCell, Share], results: Path) -> None:
    lines, each = certified_table(found).splitlines(), found[_trained(16, temperature=1.0)]
    line = next(line for line in lines if line.startswith("| trained, 151,936, 16, 1, 1 |"))
    ours, replay = each.arms[CERTIFIED], each.dispatches[CERTIFIED]
    for part in (
        f"| {ours.quantiles_us[0]:.1f} | {ours.median_us:.1f} | {ours.quantiles_us[4]:.1f} | {each.floor_us:.1f} |",
        f"`resident` {each.arms['resident'].median_us.value:.1f} | {replay.mean_us:.1f} | {replay.over_serial.value:.2f}×",
    ):
        assert part in line
    assert len(lines) == 2 + len(found) / 2, "cold L2 only"
    assert {line.count("|") for line in lines} == {12}
    of = proved[ShareCell(TRAINED, VOCAB, HEAD, 0.0, 64, 128, 16)]
    assert f"| trained, 151,936, 0 | 64 | 128 | 16 | {100 * (1 - of.unproved.value):.2f} [" in share_table(proved)
    assert certified_table({}) == share_table({}) == "Not measured yet."
    records = {EXPERIMENT: all_runs(results, EXPERIMENT, "h200")}
    for name, table in (("certified", certified_table(found)), ("proved", share_table(proved))):
        assert table in render(f"<!-- claims:{name} --><!-- /claims -->", [], records)
        assert "Not measured yet." in render(f"<!-- claims:{name} --><!-- /claims -->", [], {})


def _double(table: str) -> Callable[[dict[str, pd.DataFrame]], None]:
    def change(tables: dict[str, pd.DataFrame]) -> None:
        tables[table] = pd.concat([tables[table], tables[table].iloc[:1]])

    return change


def _set(table: str, **values: Any) -> Callable[[dict[str, pd.DataFrame]], None]:
    """One row of the certified arm."""

    def change(tables: dict[str, pd.DataFrame]) -> None:
        rows = tables[table]
        place = rows.index[rows["variant"] == CERTIFIED][3] if "variant" in rows else rows.index[3]
        for column, value in values.items():
            rows.loc[place, column] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_double("certified_rounds"), "certified_rounds states a row twice"),
        (_double("certified_shares"), "certified_shares states a row twice"),
        (_double("certified_dispatch"), "certified_dispatch states a row twice"),
        (_set("certified_rounds", again=2, searched=3), "1 rows of certified_rounds cannot be counts"),
        (_set("certified_rounds", again=9, searched=0), "1 rows of certified_rounds cannot be counts"),
        (_set("certified_rounds", again=0, searched=-1), "1 rows of certified_rounds cannot be counts"),
        (_set("certified_shares", proved=False, lifted=True), "1 rows of certified_shares are no steps"),
        (_set("certified_shares", step=16), "1 rows of certified_shares are no steps"),
        (_set("certified_dispatch", time_us=1.0), "another time than their choice"),
        (_set("certified_dispatch", choice="either"), "another time than their choice"),
        (_set("certified_rounds", time_us=0.0), "are no times"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(tmp_path: Path, change: Callable[[dict[str, pd.DataFrame]], None], words: str) -> None:
    def read() -> None:
        run = [_edited(tmp_path, change, grid=((7, 1, 0.0),), sets=5)]
        measured(run)
        shares(run)

    with pytest.raises(InvalidRun, match=words):
        read()


@pytest.mark.parametrize(("config", "words"), [({"device": {"hbm_gb_s": 4800.0}}, "config.inputs.family"), ({"device": {}, "inputs": {"family": TRAINED}}, "no memory rate")])  # fmt: skip
def test_a_run_that_does_not_say_what_it_ran_on_is_refused(tmp_path: Path, config: dict, words: str) -> None:
    path = make_runs.write_run(
        tmp_path, EXPERIMENT, make_runs.certified_tables(), run_id=LATER, device={"spec": "h200", "name": "NVIDIA H200"}, config=config
    )
    with pytest.raises(InvalidRun, match=words):
        measured([load_run(path)])
