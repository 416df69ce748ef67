"""Errors, ratios and flips of the fixture heads are given back; random weights answer no claim."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from analysis.answer import Answer, all_records, answer_all
from analysis.bootstrap import Estimate
from analysis.claim import CLAIMS, InvalidClaim, Verdict, load_claims
from analysis.document import render
from analysis.load import Run, all_runs, newest_run
from analysis.quantization import error_table, flip_table, magnitude_band, relative_error, run_of
from tests.data import make_runs
from tests.data.make_runs import QUANTIZED

LATER = "20260102T000000Z-cpu-00000000"


@pytest.fixture
def run(results: Path) -> Run:
    return newest_run(results, "quantization")


def _answers(root: Path) -> dict[str, Answer]:
    book = load_claims()
    return {answer.claim.id: answer for answer in answer_all(book, all_records(book, root))}


def _ends(estimate: Estimate | None) -> tuple[float, float, float]:
    assert estimate is not None
    return estimate.value, estimate.low, estimate.high


def test_an_error_is_the_mean_over_heads_between_its_ends(run: Run) -> None:
    assert _ends(relative_error(run, matrix="w2", form="int8")) == pytest.approx((0.60, 0.58, 0.62))
    assert _ends(relative_error(run, matrix="bias", form="e4m3", tokens="random")) == pytest.approx((2.71, 2.70, 2.72))
    assert _ends(relative_error(run, matrix="bias", form="e4m3", tokens="used")) == pytest.approx((2.981, 2.97, 2.992))
    ratios = [QUANTIZED[head][0][1] / QUANTIZED[head][0][0] for head in ("trained_b", "trained_a")]  # of each head, then the mean
    assert _ends(relative_error(run, matrix="w2", form="e4m3", over="int8")) == pytest.approx((sum(ratios) / 2, *ratios))


def test_one_head_has_no_interval_and_no_head_no_error(tmp_path: Path) -> None:
    run = newest_run(make_runs.quantization(tmp_path, make_runs.quantization_tables(heads=("trained_a",))).parent.parent, "quantization")
    found = relative_error(run, matrix="w2", form="e5m2")
    assert found is not None
    assert found.value == pytest.approx(5.28)
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    for wrong in ({"form": "fp4"}, {"form": "int8", "tokens": "used"}, {"form": "int8", "over": "fp4"}):
        assert relative_error(run, matrix="w2", **wrong) is None


def test_claims_are_answered_by_trained_heads_on_any_device(results: Path) -> None:
    answers = _answers(results)
    int8 = answers["quant.w2.int8"]
    assert int8.ours is not None
    assert (int8.ours.value, int8.ratio) == (pytest.approx(0.60), pytest.approx(0.60 / 0.58))
    assert (int8.verdict, int8.run_id) == (Verdict.REPRODUCED, "20260101T000000Z-cpu-00000000")
    assert answers["quant.w2.e4m3_over_int8"].verdict == Verdict.REPRODUCED
    for place, form in enumerate(("int8", "e4m3", "e5m2")):
        for matrix in (0, 1):
            answer = answers[f"quant.{('w2', 'bias')[matrix]}.{form}"]
            assert answer.ours is not None
            assert answer.ours.value == pytest.approx(sum((w2, bias)[matrix][place] for w2, bias, *_ in QUANTIZED.values()) / 2)


def test_random_weights_answer_nothing(tmp_path: Path) -> None:
    make_runs.quantization(tmp_path, make_runs.quantization_tables("synthetic"))
    answer = _answers(tmp_path)["quant.w2.int8"]
    assert (answer.verdict, answer.ours) == (Verdict.NOT_MEASURED, None)
    assert relative_error(newest_run(tmp_path, "quantization"), matrix="w2", form="int8") is None
    assert answer.reason == "no run of experiment=quantization on device=any has this cell"


def test_a_newer_run_of_random_weights_takes_nothing_away(tmp_path: Path) -> None:
    trained = make_runs.quantization(tmp_path)
    make_runs.quantization(tmp_path, make_runs.quantization_tables("synthetic"), run_id=LATER)
    assert _answers(tmp_path)["quant.w2.int8"].run_id == trained.name
    chosen = run_of(all_runs(tmp_path, "quantization", None))
    assert chosen is not None
    assert chosen.path == trained
    assert run_of([]) is None


def test_the_tables_show_every_head(run: Run) -> None:
    lines = error_table(run).splitlines()
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    assert "| `trained_a` | W2 | 0.58 | 2.64 | 5.28 |  |  | 4.55 |" in lines
    assert "| `trained_b` | bias, 512 used tokens | 0.704 | 2.99 | 5.94 |  |  | 4.25 |" in lines
    assert "| `trained_a` | latents, 512 random tokens |  |  |  | 0.56 | 0.002 |  |" in lines
    flips = flip_table(run).splitlines()
    assert flips[2:] == [
        "| `trained_a` | rounds | 640 | 0.62 | 1.88 | 3.75 |  |  |",
        "| `trained_b` | rounds | 640 | 0.00 | 2.50 | 3.12 |  |  |",
    ]
    assert error_table(None) == flip_table(None) == "Not measured yet."


def test_random_weights_are_called_so(tmp_path: Path) -> None:
    make_runs.quantization(tmp_path, make_runs.quantization_tables("synthetic", ("trained_a",)))
    assert "| `trained_a` (random weights) | W2 |" in error_table(newest_run(tmp_path, "quantization"))


def test_a_document_may_hold_both_tables(results: Path) -> None:
    book = load_claims()
    records = all_records(book, results)
    text = "<!-- claims:errors --><!-- /claims --><!-- claims:flips --><!-- /claims --><!-- claims:quant.w2.int8 --><!-- /claims -->"
    found = render(text, answer_all(book, records), records)
    assert "| `trained_a` | W2 | 0.58 |" in found
    assert "| `trained_a` | rounds | 640 |" in found
    assert "-->0.60 %<!--" in found


def test_the_band_spans_the_heads(run: Run) -> None:
    band = magnitude_band(run)
    assert list(band.columns) == ["low", "median", "high"]
    row = [float(band[name][32 / 448]) for name in band.columns]
    expected = [math.erf(reach / 14 / math.sqrt(2)) / math.erf(reach / math.sqrt(2)) for reach in (3.0, 3.8)]
    assert row == pytest.approx([expected[0], sum(expected) / 2, expected[1]])
    assert list(band.index) == sorted(band.index)


def test_an_error_against_two_formats_is_refused(tmp_path: Path) -> None:
    text = CLAIMS.read_text()
    query = "{measure: relative_error, variant: e4m3, against: [int8]}"
    assert text.count(query) == 1
    (tmp_path / "claims.yaml").write_text(text.replace(query, query.replace("[int8]", "[int8, e5m2]")))
    with pytest.raises(InvalidClaim, match=r"quant.w2.e4m3_over_int8 asks .* name one format, or none"):
        load_claims(tmp_path / "claims.yaml")
