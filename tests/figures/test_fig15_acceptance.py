"""Figure 15: the marks are the record's changes and the claims' intervals, the lines its positions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from analysis.acceptance import EXPERIMENT, MARGIN, POOLED, Cell, Comparison, comparisons, positions
from analysis.claim import load_claims
from analysis.load import MissingResults, all_runs
from figures import fig15_acceptance
from figures.style import look, styled
from tests.data import make_runs
from tests.figures.page import assert_apart_on_the_page, line_of

pytestmark = pytest.mark.usefixtures("closed")


def _drawn(results: Path) -> Figure:
    with styled():
        return fig15_acceptance.draw(results, "h200")


def _found(results: Path) -> dict[Cell, Comparison]:
    return {cell: arms["resident"] for cell, arms in comparisons(all_runs(results, EXPERIMENT, "h200")).items()}


def _xs(line: Line2D) -> list[float]:
    return [float(x) for x in np.asarray(line.get_xdata())]


def _y(line: Line2D) -> float:
    return float(np.asarray(line.get_ydata())[0])


def test_every_mark_is_a_change_of_the_record_on_its_own_line(results: Path) -> None:
    axes = _drawn(results).axes[0]
    verdicts = {text.get_position()[1]: text.get_text() for text in axes.texts if text.get_position()[0] > 1}
    found, places = _found(results), []
    for cell, each in found.items():
        gid = f"{cell.steps} {cell.temperature:g} {cell.batch}"
        mark, wide, narrow = line_of(axes, f"ours {gid}"), line_of(axes, f"95 {gid}"), line_of(axes, f"90 {gid}")
        assert _xs(mark) == [each.change.value]
        assert _xs(wide) == [each.change.wide.low, each.change.wide.high]
        assert _xs(narrow) == [each.change.narrow.low, each.change.narrow.high]
        assert narrow.get_linewidth() > 2 * wide.get_linewidth()
        assert (mark.get_color(), mark.get_marker()) == (look("resident").color, look("resident").marker)
        assert (mark.get_alpha() == 1.0) == (cell.batch in (1, POOLED))
        assert _y(mark) == _y(wide) == _y(narrow)
        assert verdicts[_y(mark)].startswith(each.verdict)
        places.append(_y(mark))
        low, high = axes.get_xlim()
        assert low < each.change.wide.low <= each.change.wide.high < high
    assert len(set(places)) == len(found)


def test_the_papers_intervals_stand_below_ours_and_are_hollow(results: Path) -> None:
    axes = _drawn(results).axes[0]
    claims = [claim for claim in load_claims().claims if claim.interval and claim.query]
    stated = sorted(
        (claim.query.steps, claim.query.temperature, claim.value, *claim.interval) for claim in claims if claim.query and claim.interval
    )
    marks = sorted((line for line in axes.lines if line.get_gid() == "paper"), key=_y)
    bars = sorted((line for line in axes.lines if line.get_gid() == "95 paper"), key=_y)
    assert [(_xs(mark)[0], *_xs(bar)) for mark, bar in zip(marks, bars, strict=True)] == [row[2:] for row in stated]
    assert {mark.get_markerfacecolor() for mark in marks} == {"white"}
    for (steps, temperature, *_), mark in zip(stated, marks, strict=True):
        assert _y(mark) == _y(line_of(axes, f"ours {steps} {temperature:g} {POOLED}")) + 1
    (margin,) = (patch for patch in axes.patches if patch.get_gid() == "margin")
    assert isinstance(margin, Rectangle)
    assert (margin.get_x(), margin.get_x() + margin.get_width()) == (-MARGIN, MARGIN)


def test_the_lines_are_the_positions_at_concurrency_1(results: Path) -> None:
    figure = _drawn(results)
    run = all_runs(results, EXPERIMENT, "h200")[0]
    for axes, steps in zip(figure.axes[1:], (7, 16), strict=True):
        for temperature in (0.0, 1.0):
            shares = positions(run, Cell("tiny", steps, temperature, 1))
            for arm in ("resident", "sglang_folded"):
                line = line_of(axes, f"positions {arm} {steps} {temperature:g}")
                assert _xs(line) == list(range(1, steps + 1))
                assert np.asarray(line.get_ydata()) == pytest.approx(100 * shares[arm])
                assert line.get_color() == look(arm).color


def test_nothing_lies_on_anything_else(results: Path) -> None:
    figure = _drawn(results)
    with styled():
        figure.set_dpi(300)  # as it is saved
        figure.canvas.draw()
        texts = [text for axes in figure.axes for text in (*axes.texts, axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels())]
        titles = [each for axes in figure.axes for each in axes.findobj(Text) if isinstance(each, Text) and each.get_text()[:3] == "γ ="]
        legends = [text for legend in figure.legends for text in legend.get_texts()]
        assert_apart_on_the_page(figure, {*texts, *titles, *legends, *figure.texts})


def test_what_is_missing_is_said_with_its_command(tmp_path: Path) -> None:
    make_runs.acceptance(tmp_path, truth={(7, 0.0): 0.0}, batches=(16,))
    figure = _drawn(tmp_path)
    note = " ".join(text.get_text() for text in figure.texts)
    assert "Not measured yet: python -m experiments.run experiment=acceptance device=h200" in note
    assert [text.get_text() for text in figure.axes[0].texts].count("not measured") == 3
    assert not [line for line in figure.axes[0].lines if line.get_gid() == f"ours 7 0 {POOLED}"], "one batch is not pooled"
    assert len(figure.axes) == 2
    assert "Not measured yet" not in " ".join(text.get_text() for text in _drawn(_whole(tmp_path / "whole")).texts)


def _whole(root: Path) -> Path:
    make_runs.acceptance(root)
    return root


def test_one_prompt_has_a_value_and_no_interval(tmp_path: Path) -> None:
    make_runs.acceptance(tmp_path, truth={(7, 1.0): None}, batches=(1,), prompts=1)
    axes = _drawn(tmp_path).axes[0]
    assert np.isfinite(_xs(line_of(axes, "ours 7 1 1"))).all()
    assert "undecided (∞)" in [text.get_text() for text in axes.texts]


def test_without_a_record_the_command_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingResults, match="experiment=acceptance device=h200"):
        fig15_acceptance.draw(tmp_path, "h200")
