"""Parts of a step, from walks with known lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from analysis.answer import all_records, answer_all
from analysis.breakdown import PARTS, PLAIN, breakdown, breakdown_table, part_cost
from analysis.claim import CLAIMS, InvalidClaim, Verdict, load_claims
from analysis.claims import main
from analysis.load import Run, newest_run
from analysis.slope import fit, medians, slopes
from tests.data.make_runs import write_run

STEP_US = 2.0
COSTS = {"latent_twice": 0.3, "score_twice": 0.9, "reduce_twice": 0.2, "exchange_twice": 0.7}  # us a step: 0.1 more than the step
STEPS = (1, 4, 7, 10, 13, 16)


def tables(costs: Mapping[str, float] = COSTS, spread: float = 0.1, replicas: int = 6) -> dict[str, pd.DataFrame]:
    """Cells and samples whose cold calls lie on lines. `spread`: by what share a process is slower or faster, in all its walks."""
    rng = np.random.default_rng(0)
    named = {
        "device": "h200", "head": "markov_v152k", "backend": "resident_sm90", "vocab": 151_936, "rank": 256, "batch": 1, "temperature": 0.0,
        "inputs": "synthetic",
    }  # fmt: skip
    found = {"status": "ok", "reason": "", "rounding": "int8", "near_ties": 0, "floor_us": 8.0}
    cells, samples = [], []
    for replica in range(replicas):
        process = 1 + rng.normal(0, spread)
        for variant, extra in {PLAIN: 0.0, **costs}.items():
            for steps in STEPS:
                of = named | {"variant": variant, "steps": steps, "replica": replica}
                cells.append(of | found | {"tokens": steps})
                for order, (l2, scope) in enumerate((l2, scope) for l2 in ("cold", "hot") for scope in ("call", "kernel")):
                    slope = (STEP_US + extra) * process if (l2, scope) == ("cold", "call") else 9.9
                    for number in range(3):
                        at = {"l2": l2, "scope": scope, "round": number, "order": order, "clock_mhz": 1975.0, "valid": True}
                        samples.append(of | at | {"time_us": 14 + slope * steps + rng.normal(0, 0.01)})
    return {"samples": pd.DataFrame(samples), "cells": pd.DataFrame(cells)}


def run_of(root: Path, made: Mapping[str, pd.DataFrame]) -> Run:
    device = {"spec": "h200", "name": "NVIDIA H200"}
    write_run(root, "step_breakdown", made, run_id="20260101T000000Z-h200-00000000", device=device)
    return newest_run(root, "step_breakdown", "h200")


def test_every_known_part_and_the_rest_are_given_back(tmp_path: Path) -> None:
    """The rest is negative: the parts overlap."""
    found = breakdown(run_of(tmp_path, tables()))
    assert found.step_us is not None
    assert found.step_us.value == pytest.approx(STEP_US, rel=0.1)
    assert [part.name for part in found.parts] == ["latent fetch", "scoring", "reduce", "exchange"]
    truth = [*COSTS.values(), STEP_US - sum(COSTS.values())]
    for part, cost in zip((*found.parts, found.rest), truth, strict=True):
        assert part.cost_us is not None
        assert part.share is not None
        assert part.gap == ""
        assert part.cost_us.value == pytest.approx(cost * found.step_us.value / STEP_US, abs=0.005), part.name
        assert part.cost_us.low <= part.cost_us.value <= part.cost_us.high
        assert part.share.value == pytest.approx(cost / STEP_US, abs=0.003), part.name
    costs = [part.cost_us.value for part in (*found.parts, found.rest) if part.cost_us]
    assert sum(costs) == pytest.approx(found.step_us.value)


def test_a_part_is_compared_within_a_process(tmp_path: Path) -> None:
    """Processes differ by a tenth, which is more than the reduction itself; within one the difference is certain to a hundredth of a us."""
    found = breakdown(run_of(tmp_path, tables()))
    assert found.step_us is not None
    assert found.step_us.high - found.step_us.low > 0.1
    reduce = found.parts[2]
    assert reduce.cost_us is not None
    assert reduce.share is not None
    assert reduce.cost_us.high - reduce.cost_us.low < 0.04
    assert reduce.share.high - reduce.share.low < 0.005


def test_the_slopes_of_replicas_have_the_fits_as_their_mean(tmp_path: Path) -> None:
    times = medians(tables()["samples"], variant=PLAIN, l2="cold", scope="call")
    assert len(slopes(times)) == 6
    assert slopes(times).mean() == pytest.approx(fit(times).slope_us.value)
    assert slopes(times[[4]]).empty


def test_a_replica_that_lacks_a_walk_says_nothing_of_its_part(tmp_path: Path) -> None:
    made = tables(spread=0.0)
    samples = made["samples"]
    wild = (samples["variant"] == "score_twice") & (samples["replica"] > 0)
    made["samples"] = samples[~wild].assign(time_us=lambda rows: rows["time_us"] + 5.0 * rows["steps"] * (rows["replica"] > 0))
    found = breakdown(run_of(tmp_path, made))
    scoring, rest = found.parts[1].cost_us, found.rest.cost_us
    assert scoring is not None
    assert rest is not None
    assert scoring.value == pytest.approx(COSTS["score_twice"], abs=0.005), "of replica 0 alone; the others' plain walks are 5 us slower"
    assert np.isnan(scoring.low)
    assert np.isnan(rest.low)


def test_flagged_samples_are_counted_and_in_no_part(tmp_path: Path) -> None:
    made = tables(spread=0.0)
    samples = made["samples"]
    throttled = (samples["variant"] == "reduce_twice") & (samples["round"] == 1) & (samples["l2"] == "cold") & (samples["scope"] == "call")
    made["samples"] = samples.assign(valid=~throttled, time_us=samples["time_us"] * (1 + 3 * throttled))
    part = breakdown(run_of(tmp_path, made)).parts[2]
    assert part.cost_us is not None
    assert part.cost_us.value == pytest.approx(COSTS["reduce_twice"], abs=0.005)
    assert part.flagged == 6 * len(STEPS)


def test_a_walk_that_failed_is_a_gap_and_leaves_no_rest(tmp_path: Path) -> None:
    made = tables()
    lost = made["cells"]["variant"] == "score_twice"
    made["cells"].loc[lost, ["status", "reason"]] = ["build_error", "walk_resident spills 40 bytes"]
    made["samples"] = made["samples"][made["samples"]["variant"] != "score_twice"]
    found = breakdown(run_of(tmp_path, made))
    assert (found.parts[1].cost_us, found.parts[1].gap) == (None, "build_error: walk_resident spills 40 bytes")
    assert (found.rest.cost_us, found.rest.gap) == (None, "not measured: scoring")
    assert found.parts[0].cost_us is not None
    lines = breakdown_table(found).splitlines()
    assert lines[3] == "| scoring | build_error: walk_resident spills 40 bytes |  | 0 |"
    assert lines[6] == "| rest | not measured: scoring |  |  |"


def test_without_the_plain_walk_nothing_is_known(tmp_path: Path) -> None:
    made = {name: table[table["variant"] != PLAIN] for name, table in tables().items()}
    found = breakdown(run_of(tmp_path, made))
    assert found.step_us is None
    assert {part.gap for part in found.parts} == {"not asked for"}
    assert found.rest.gap == "not measured: the plain walk"
    assert breakdown_table(found).splitlines()[7] == "| whole step | not measured | | |"


def test_one_length_is_no_slope(tmp_path: Path) -> None:
    made = {name: table[table["steps"] == 4] for name, table in tables().items()}
    found = breakdown(run_of(tmp_path, made))
    assert found.parts[0].gap == "fewer than two lengths were timed"


def test_the_table_shows_parts_rest_and_step(tmp_path: Path) -> None:
    lines = breakdown_table(breakdown(run_of(tmp_path, tables(spread=0.0)))).splitlines()[:8]
    assert [line.split("|")[1].strip() for line in lines[2:]] == [*PARTS.values(), "rest", "whole step"]
    assert len({line.count("|") for line in lines}) == 1
    assert lines[3].startswith("| scoring | 0.90 [0.90, 0.90] | 45 % | 0 |")
    assert lines[6].startswith("| rest | -0.10 [-0.10, -0.10] | -5 % |")
    assert lines[7].startswith("| whole step | 2.00 [")


def test_claims_are_answered_from_a_breakdown_and_are_not_measured_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = load_claims()
    of = {claim.id: claim for claim in book.claims if claim.id.startswith("breakdown.")}
    assert len(of) == len(PARTS)
    assert {claim.query.variant for claim in of.values() if claim.query} == set(PARTS)
    before = {answer.claim.id: answer for answer in answer_all(book, all_records(book, tmp_path)) if answer.claim.id in of}
    assert {(answer.verdict, answer.reason) for answer in before.values()} == {
        (Verdict.NOT_MEASURED, "no run of experiment=step_breakdown on device=h200 has this cell")
    }
    run = run_of(tmp_path, tables(spread=0.0))
    after = {answer.claim.id: answer for answer in answer_all(book, all_records(book, tmp_path)) if answer.claim.id in of}
    for name, answer in after.items():
        query = of[name].query
        assert query is not None
        assert answer.ours is not None
        assert answer.ours.value == pytest.approx(COSTS[query.variant], abs=0.005)
        assert (answer.verdict, answer.run_id) == (Verdict.NOT_STATED, run.run_id)
    assert main(["--results", str(tmp_path), "--documents", "--json"]) == 0
    shown = {entry["id"]: entry["ours"] for entry in json.loads(capsys.readouterr().out)}
    assert shown["breakdown.exchange.v152k"] == pytest.approx(COSTS["exchange_twice"], abs=0.005)


def test_what_was_not_timed_has_no_cost() -> None:
    samples = tables()["samples"]
    assert part_cost(samples, "score_twice", PLAIN, l2="cold", scope="call") is not None
    assert part_cost(samples, "score_thrice", PLAIN, l2="cold", scope="call") is None


def test_a_part_is_more_than_exactly_one_walk(tmp_path: Path) -> None:
    data = yaml.safe_load(CLAIMS.read_text())
    data["claims"] = [claim for claim in data["claims"] if claim["id"] == "breakdown.score.v152k"]
    data["claims"][0]["query"]["against"] = [PLAIN, "latent_twice"]
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(InvalidClaim, match=r"breakdown.score.v152k asks for measure='part' against \['resident', 'latent_twice'\]; name"):
        load_claims(path)
