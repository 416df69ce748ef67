from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from analysis.answer import Answer, all_records, answer_all
from analysis.bootstrap import Estimate
from analysis.claim import CLAIMS, Claim, InvalidClaim, Verdict, load_claims
from analysis.claims import main
from analysis.latency import BATCHES, TEMPERATURES, WALKS
from tests.data import make_runs
from tests.data.make_runs import TRUTH, grid_time

RUN = "20260101T000000Z-h200-00000000"

REQUIRED = {
    "walk.v152k.g7.bs1.greedy": 37,
    "walk.v152k.g16.bs1.greedy": 62,
    "slope.resident.v152k": 2.73,
    "slope.streaming.v152k": None,
    "slope.folded.v152k": 44.0,
    "entry.resident.v152k": 17.9,
    "speedup.v152k.g7": 8.9,
    "speedup.v152k.g16": 12.0,
    "speedup_fastest.v152k.g16": 11.6,
    "walk.v152k.g7.bs1.t1": 80.9,
    "walk.v152k.g7.bs16.greedy": 68.0,
    "walk.v152k.g7.bs64.greedy": 112.3,
    "walk.v152k.g7.bs64.t1": 179.8,
    "walk.v129k.g5.bs1.greedy": 41.8,
    "walk.v129k.g5.bs64.greedy": 77.1,
    "walk.v248k.g15.bs1.greedy": 211,
}
GOALS = {
    "walk.v152k.g7.bs1.greedy": 31,
    "walk.v152k.g16.bs1.greedy": 50,
    "slope.resident.v152k": 2.2,
    "sampling.v152k.g7.bs1": 1.25,
    "walk.v152k.g7.bs16.greedy": 50,
    "walk.v152k.g7.bs64.greedy": 95,
    "walk.v152k.g7.bs64.t1": 140,
    "walk.v129k.g5.bs1.greedy": 26,
    "walk.v129k.g5.bs64.greedy": 62,
    "walk.v248k.g15.bs1.greedy": 105,
}
HEADS = {"v129k": "markov_v129k", "v152k": "markov_v152k", "v248k": "markov_v248k"}


def _answers(root: Path) -> dict[str, Answer]:
    book = load_claims()
    return {answer.claim.id: answer for answer in answer_all(book, all_records(book, root))}


@pytest.fixture(scope="module")
def answers(results: Path) -> dict[str, Answer]:
    """What the fixture runs say of every claim."""
    return _answers(results)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of few cells that fill a block of every kind; read only. To answer every claim from `results` takes seconds."""
    root = tmp_path_factory.mktemp("few")
    make_runs.step_slope(root)
    make_runs.walk_latency(root, "markov_v152k", batches=(1,), temperatures=(0.0,))
    make_runs.walk_latency(root, "markov_v248k", run_id="20260101T000100Z-h200-00000001", batches=(1,), temperatures=(1.0,))
    return root


def _time(variant: str, steps: int) -> float:
    entry, slope = TRUTH[variant]
    return entry + slope * steps


def test_the_required_claims_state_the_papers_values() -> None:
    values = {claim.id: claim.value for claim in load_claims().claims}
    assert {name: values[name] for name in REQUIRED} == REQUIRED
    goals = {claim.id: claim.goal for claim in load_claims().claims}
    assert {name: goals[name] for name in GOALS} == GOALS


def test_every_cell_of_the_grid_is_a_claim_with_its_own_query() -> None:
    by_id = {claim.id: claim for claim in load_claims().claims}
    for head, vocab, steps in WALKS:
        for batch in BATCHES:
            for temperature in TEMPERATURES:
                short = f"v{vocab / 1e3:.0f}k.g{steps}"
                cell = f"{short}.bs{batch}.{'t1' if temperature else 'greedy'}"
                walk, ratio = by_id[f"walk.{cell}"], by_id.get(f"speedup.{cell}") or by_id[f"speedup.{short}"]
                for claim, measure, against in ((walk, "median", ()), (ratio, "ratio", ("sglang_folded",))):
                    query = claim.query
                    assert query is not None
                    assert (query.measure, query.variant, query.against) == (measure, "resident", against), claim.id
                    assert (query.head, query.steps, query.batch, query.temperature) == (head, steps, batch, temperature), claim.id
                assert ratio.goal == max(4, ratio.value or 0), cell


def test_answers_are_the_known_lines(answers: dict[str, Answer]) -> None:
    expected = {
        "walk.v152k.g7.bs1.greedy": grid_time("resident", 151_936, 7, 1, 0.0),
        "walk.v152k.g16.bs1.greedy": grid_time("resident", 151_936, 16, 1, 0.0),
        "walk.v248k.g15.bs1.greedy": grid_time("resident", 248_320, 15, 1, 0.0),
        "walk.v152k.g7.bs64.t1": grid_time("resident", 151_936, 7, 64, 1.0),
        "sampling.v152k.g7.bs1": grid_time("resident", 151_936, 7, 1, 1.0) / grid_time("resident", 151_936, 7, 1, 0.0),
        "speedup.v129k.g5.bs64.greedy": grid_time("sglang_folded", 129_280, 5, 64, 0.0) / grid_time("resident", 129_280, 5, 64, 0.0),
        "speedup.v248k.g15.bs8.t1": grid_time("sglang_folded", 248_320, 15, 8, 1.0) / grid_time("resident", 248_320, 15, 8, 1.0),
        "slope.resident.v152k": TRUTH["resident"][1],
        "slope.streaming.v152k": TRUTH["streaming_int8"][1],
        "slope.folded.v152k": TRUTH["sglang_folded"][1],
        "entry.resident.v152k": TRUTH["resident"][0],
        "speedup.v152k.g7": _time("sglang_folded", 7) / _time("resident", 7),
        "speedup.v152k.g16": _time("sglang_folded", 16) / _time("resident", 16),
        "speedup_fastest.v152k.g16": _time("vllm_addmm", 16) / _time("resident", 16),
    }
    for name, value in expected.items():
        answer = answers[name]
        assert answer.ours is not None
        assert answer.ours.value == pytest.approx(value, rel=0.02), name
        assert answer.ours.low <= answer.ours.value <= answer.ours.high
        assert (answer.hardware, answer.claim.hardware) == ("NVIDIA H200", "H100")
        assert answer.run is not None
        assert answer.run.experiment == ("step_slope" if name.startswith(("slope", "entry")) else "walk_latency"), name
        assert answer.run_id == {"v152k": RUN, "v248k": RUN[:11] + "0100Z-h200-00000001"}.get(name.split(".")[1], answer.run_id), name
    fast = answers["walk.v152k.g7.bs1.greedy"]
    assert fast.ours is not None
    assert fast.ratio == pytest.approx(fast.ours.value / 37)
    assert fast.verdict == Verdict.BETTER
    assert fast.as_json()["goal_met"] is True
    for name in ("walk.v152k.g16.bs64.t1", "walk.v129k.g5.bs1.t1", "speedup.v129k.g5.bs2.t1"):  # refused there, never measured
        assert (answers[name].ours, answers[name].verdict) == (None, Verdict.NOT_MEASURED)


def test_a_cell_that_no_source_states_has_our_value_and_its_goal_but_no_verdict(answers: dict[str, Answer]) -> None:
    answer = answers["speedup.v152k.g16.bs8.greedy"]
    found = answer.as_json()
    assert (answer.verdict, found["paper"], found["ratio"], found["goal"], found["goal_met"]) == (Verdict.NOT_STATED, None, None, 4, True)
    assert found["ours"] > 12


def test_a_cell_is_answered_by_the_newest_run_that_has_it(tmp_path: Path) -> None:
    make_runs.step_slope(tmp_path)
    line = _answers(tmp_path)["walk.v152k.g7.bs1.greedy"]
    assert line.ours is not None
    assert line.ours.value == pytest.approx(_time("resident", 7), rel=0.02)  # the lines have this cell too
    make_runs.walk_latency(tmp_path, "markov_v152k", steps=(7,), batches=(1, 16, 64))
    again = make_runs.walk_latency(
        tmp_path, "markov_v152k", run_id="20260102T000000Z-h200-0", steps=(7,), batches=(1, 16), temperatures=(1.0,), factor=2.0
    )
    answers = _answers(tmp_path)
    for name, batch, temperature, path in (
        ("walk.v152k.g7.bs1.t1", 1, 1.0, again),
        ("walk.v152k.g7.bs16.t1", 16, 1.0, again),
        ("walk.v152k.g7.bs64.t1", 64, 1.0, None),
        ("walk.v152k.g7.bs1.greedy", 1, 0.0, None),
    ):
        answer = answers[name]
        assert answer.ours is not None
        assert answer.run is not None
        expected = (2.0 if path else 1.0) * grid_time("resident", 151_936, 7, batch, temperature)
        assert answer.ours.value == pytest.approx(expected, rel=0.02), name
        assert (answer.run.path == again) == bool(path), name
    # a ratio of two cells needs both from one run
    cost = answers["sampling.v152k.g7.bs1"]
    assert cost.ours is not None
    assert cost.ours.value == pytest.approx(1.11, abs=0.02)


def test_a_step_slope_run_of_another_head_takes_no_claim_away(tmp_path: Path) -> None:
    make_runs.step_slope(tmp_path)
    tables = make_runs.step_slope_tables()
    for name in ("samples", "cells"):
        tables[name]["head"] = "markov_v248k"
    make_runs.write_run(tmp_path, "step_slope", tables, run_id="20260102T000000Z-h200-0", device={"spec": "h200", "name": "NVIDIA H200"})
    assert _answers(tmp_path)["slope.resident.v152k"].run_id == RUN


def test_a_slow_walk_falls_short_and_misses_its_goal(tmp_path: Path) -> None:
    make_runs.step_slope(tmp_path, TRUTH | {"resident": (20.0, 9.5)})
    answers = _answers(tmp_path)
    for name in (
        "walk.v152k.g7.bs1.greedy",
        "slope.resident.v152k",
        "entry.resident.v152k",
        "speedup.v152k.g16",
        "speedup_fastest.v152k.g16",
    ):
        assert answers[name].verdict == Verdict.SHORT, name
        assert answers[name].as_json()["goal_met"] is False
    # streaming is now faster than "resident", so the claim that residency saves something falls too
    assert answers["slope.streaming.v152k"].verdict == Verdict.SHORT
    assert answers["slope.streaming_bf16.v152k"].verdict == Verdict.REPRODUCED


@pytest.mark.parametrize(
    ("better", "ours", "verdict"),
    [
        ("lower", (90, 89, 91), Verdict.BETTER),
        ("lower", (94, 90, 101), Verdict.REPRODUCED),  # the interval reaches past the paper's value
        ("lower", (97, 96, 98), Verdict.REPRODUCED),
        ("lower", (104, 103, 105), Verdict.REPRODUCED),
        ("lower", (106, 105, 107), Verdict.SHORT),
        ("higher", (110, 109, 111), Verdict.BETTER),
        ("higher", (106, 99, 112), Verdict.REPRODUCED),
        ("higher", (96, 95, 97), Verdict.REPRODUCED),
        ("higher", (94, 93, 95), Verdict.SHORT),
        ("higher", (110, float("nan"), float("nan")), Verdict.BETTER),
    ],
)
def test_the_verdict_follows_the_tolerance(better: str, ours: tuple[float, float, float], verdict: Verdict) -> None:
    claim = Claim("a", "S0", "", 100.0, "us", "H100", better=better, tolerance=0.05)
    assert claim.judge(Estimate(*ours)) == verdict


def test_without_records_nothing_is_claimed(tmp_path: Path) -> None:
    answers = _answers(tmp_path)
    assert {answer.verdict for answer in answers.values()} == {Verdict.NOT_MEASURED, Verdict.OTHER_HARDWARE}
    assert all(answer.ours is None for answer in answers.values())
    assert answers["slope.resident_bf16.v152k.b200"].verdict == Verdict.OTHER_HARDWARE
    assert answers["walk.v248k.g15.bs1.greedy"].verdict == Verdict.NOT_MEASURED
    assert "device=h200" in answers["walk.v152k.g7.bs1.greedy"].reason


def test_records_of_another_gpu_do_not_answer(tmp_path: Path) -> None:
    make_runs.write_run(
        tmp_path,
        "step_slope",
        make_runs.step_slope_tables(),
        run_id="20260101T000000Z-b200-0",
        device={"spec": "b200", "name": "NVIDIA B200"},
    )
    assert _answers(tmp_path)["walk.v152k.g7.bs1.greedy"].verdict == Verdict.NOT_MEASURED


def test_a_missing_arm_leaves_its_ratio_unmeasured(tmp_path: Path) -> None:
    make_runs.step_slope(tmp_path, {name: line for name, line in TRUTH.items() if name != "vllm_addmm"})
    answers = _answers(tmp_path)
    assert answers["speedup_fastest.v152k.g16"].verdict == Verdict.NOT_MEASURED
    assert answers["speedup.v152k.g16"].ours is not None


def test_json_has_every_claim_with_its_keys(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--results", str(results)]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [answer["id"] for answer in answers] == [claim.id for claim in load_claims().claims]
    assert all({"id", "source", "paper", "ours", "unit", "ratio", "verdict", "run_id", "interval"} <= set(answer) for answer in answers)


def test_the_table_shows_both_gpus_and_the_second_estimate(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--results", str(few)]) == 0
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if line.startswith("slope.resident.v152k"))
    for part in ("2.73 µs/step", "H100", "NVIDIA H200", "≤ 2.2, missed", "better"):
        assert part in row
    line = next(line for line in text.splitlines() if line.startswith("resident: "))
    assert re.fullmatch(
        r"resident: 2\.4\d \[\S+, \S+\] µs/step fitted over lengths, 2\.\d\d \[\S+, \S+\] by the clocks in the kernel: "
        r"they agree: they differ by \d %, and 10 % is allowed",
        line,
    )


def test_clocks_that_disagree_are_said_and_fail_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = make_runs.step_slope_tables()
    tables["step_clocks"]["time_us"] = 0.8 * TRUTH["resident"][1]
    make_runs.write_run(tmp_path, "step_slope", tables, run_id="20260101T000000Z-h200-0", device={"spec": "h200", "name": "NVIDIA H200"})
    assert main(["--results", str(tmp_path)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("resident: "))
    start, _, end = line.partition(" by the clocks in the kernel: ")
    assert start.endswith("µs/step fitted over lengths, 1.96 [1.96, 1.96]")
    assert re.fullmatch(r"they differ by (19|20|21) %, more than the 10 % allowed", end)
    assert main(["--results", str(tmp_path), "--verify", "--documents"]) == 1
    assert line in capsys.readouterr().err


README = """# Title
A call takes <!-- claims:walk.v152k.g7.bs1.greedy --><!-- /claims -->; the paper says 37 µs and 8.9×.
<!-- claims:summary --><!-- /claims -->
<!-- claims:slopes --><!-- /claims -->
<!-- claims:latency --><!-- /claims -->
From <!-- claims:record --><!-- /claims -->.
"""
REPORT = "A call takes /* claims:walk.v152k.g16.bs1.greedy *//* /claims */.\n"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, few: Path) -> Path:
    """A folder with a README and a report rendered from the fixture runs; read only."""
    folder = tmp_path_factory.mktemp("written")
    (folder / "README.md").write_text(README)
    (folder / "report.typ").write_text(REPORT)
    assert main(["--write", "--results", str(few), "--documents", *map(str, sorted(folder.iterdir()))]) == 0
    return folder


@pytest.fixture
def documents(tmp_path: Path, few: Path, written: Path) -> tuple[list[str], Path]:
    """Copies of the written README and report, and the arguments that check them."""
    readme, report = (Path(shutil.copy(written / name, tmp_path)) for name in ("README.md", "report.typ"))
    return ["--results", str(few), "--documents", str(readme), str(report)], readme


def test_written_documents_hold_our_numbers_and_verify(documents: tuple[list[str], Path]) -> None:
    arguments, readme = documents
    text = readme.read_text()
    assert "takes <!-- claims:walk.v152k.g7.bs1.greedy -->30.3 µs<!-- /claims -->" in text
    assert "| resident slope | 2.73 µs/step |" in text
    assert "| resident | 2.4" in text
    assert f"walk_latency/{RUN} (NVIDIA H200), step_slope/{RUN} (NVIDIA H200)" in text
    assert "| 248,320, 15, 1 | 91." in text
    assert "51.4 µs" in readme.with_name("report.typ").read_text()
    assert main(["--verify", *arguments]) == 0
    assert main(["--write", *arguments]) == 0
    assert readme.read_text() == text


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ("-->30.3 µs<", "-->21.7 µs<", "block walk.v152k.g7.bs1.greedy says '21.7 µs' but the records say '30.3 µs'"),
        ("| 248,320, 15, 1 | 91.", "| 248,320, 15, 1 | 61.", "block latency says"),
        ("2.73 µs/step | 2.4", "2.73 µs/step | 1.4", "block summary says"),
        ("# Title", "# A walk in 20.1 µs", "'20.1 µs' stands outside a claims block"),
        ("and 8.9×", "and 19.9×", "'19.9×' stands outside a claims block"),
    ],
)
def test_a_planted_wrong_number_turns_verify_red(
    documents: tuple[list[str], Path], capsys: pytest.CaptureFixture[str], right: str, wrong: str, words: str
) -> None:
    arguments, readme = documents
    assert readme.read_text().count(right) == 1
    readme.write_text(readme.read_text().replace(right, wrong))
    assert main(["--verify", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_records_that_changed_turn_verify_red(
    documents: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, _ = documents
    other = tmp_path / "other"
    make_runs.step_slope(other, TRUTH | {"resident": (16.0, 2.6)})
    assert main(["--verify", "--results", str(other), *arguments[2:]]) == 1
    assert "but the records say '34." in capsys.readouterr().err
    (tmp_path / "none").mkdir()
    assert main(["--verify", "--results", str(tmp_path / "none"), *arguments[2:]]) == 1


def test_a_corrupt_record_and_an_unknown_block_stop_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_runs.step_slope(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text("<!-- claims:no.such.claim --><!-- /claims -->")
    assert main(["--verify", "--results", str(tmp_path), "--documents", str(readme)]) == 1
    assert "no.such.claim" in capsys.readouterr().err
    (path / "samples.parquet").write_bytes(b"")
    assert main(["--verify", "--results", str(tmp_path), "--documents"]) == 1
    assert "was altered" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "null", '{"schema_version": 1}'])
def test_a_corrupt_manifest_stops_the_check_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    file = make_runs.step_slope(tmp_path) / "run.json"
    file.write_text(text)
    assert main(["--verify", "--results", str(tmp_path), "--documents"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith(f"{file} ")) == ("", 1, True)


@pytest.mark.parametrize("option", ["--results", "--claims"])
def test_a_path_that_is_not_there_is_one_sentence(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    paths = {"--results": str(results), "--claims": str(CLAIMS)} | {option: str(tmp_path / "missing")}
    assert main([part for pair in paths.items() for part in pair]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"{tmp_path / 'missing'}: No such file or directory; give --results")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("claims: [a\nb: }", "is not YAML (while parsing"),
        ("[]", "has no list `claims`"),
        ("claims: 3", "has no list `claims`"),
        ("claims: [3]", "the claim 3 is not a mapping"),
    ],
)
def test_a_malformed_claims_file_is_one_sentence(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    file = tmp_path / "claims.yaml"
    file.write_text(text)
    assert main(["--results", str(results), "--claims", str(file)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vlaue": 3}, "unknown key 'vlaue'"),
        ({"better": "faster"}, "better='faster'"),
        ({"source": "S9"}, "source 'S9'"),
        ({"value": None}, "states no value"),
        ({"value": None, "above": "no.such.claim", "stated": "more"}, "lies above 'no.such.claim', which is no claim"),
        ({"query": {"measure": "mean", "variant": "resident"}}, "measure='mean'; it is one of median, slope"),
        ({"query": {"variant": "resident"}}, "incomplete"),
    ],
)
def test_a_wrong_claims_file_is_refused_by_key(tmp_path: Path, change: dict[str, object], words: str) -> None:
    data = yaml.safe_load(CLAIMS.read_text())
    data["claims"] = [data["claims"][0] | change]
    file = tmp_path / "claims.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(InvalidClaim) as error:
        load_claims(file)
    assert words in str(error.value)


def test_an_id_used_twice_is_refused(tmp_path: Path) -> None:
    data = yaml.safe_load(CLAIMS.read_text())
    data["claims"] = [data["claims"][0], data["claims"][0]]
    file = tmp_path / "claims.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(InvalidClaim, match="2 claims called"):
        load_claims(file)
