"""Figure 17: lines are the record's shares, and none is not drawn as some."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.certified import EXPERIMENT, TRAINED, Share, ShareCell, shares
from analysis.load import MissingResults, all_runs
from figures import fig17_certified_share
from figures.style import styled
from tests.data import make_runs
from tests.figures.page import assert_apart_on_the_page, line_of

pytestmark = pytest.mark.usefixtures("closed")

VOCAB, HEAD = 151_936, "qwen_vocab_markov"
COUNTS, LISTS = (64, 256, 512), (64, 128)
PLACES = [(temperature, row) for temperature in (0.0, 1.0) for row in ("unproved", "lifted")]


def _drawn(results: Path) -> Figure:
    with styled():
        return fig17_certified_share.draw(results, "h200")


def _ys(line: Line2D) -> np.ndarray:
    return np.asarray(line.get_ydata(), dtype=np.float64)


def _shares(results: Path, temperature: float, listed: int, first: int) -> list[Share]:
    found = shares(all_runs(results, EXPERIMENT, "h200"))
    return [found[ShareCell(TRAINED, VOCAB, HEAD, temperature, m, listed, first)] for m in COUNTS]


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Where 512 candidates prove every greedy step, and 64 with 64 listed rows leave one of 640."""
    tables = make_runs.certified_tables(grid=((7, 1, 0.0),))
    rows = tables["certified_shares"]
    rows.loc[(rows["candidates"] == 512) & (rows["temperature"] == 0), "proved"] = True
    one = (rows["candidates"] == 64) & (rows["listed"] == 64) & (rows["temperature"] == 0)
    rows.loc[one, "proved"] = ~((rows["set"] == 0) & (rows["step"] == 9))[one]
    rows["lifted"] &= rows["proved"]
    make_runs.certified(tmp_path, tables)
    return tmp_path


def test_every_line_has_the_shares_of_its_panel(results: Path) -> None:
    figure = _drawn(results)
    for axes, (temperature, row) in zip(figure.axes, PLACES, strict=True):
        for listed in LISTS:
            for first in (7, 16):
                line = line_of(axes, f"{row} {first} {listed}")
                found = _shares(results, temperature, listed, first)
                values = [getattr(each, row).value for each in found]
                drawn = [100 * value if value or row == "lifted" else np.nan for value in values]
                assert np.array_equal(_ys(line), drawn, equal_nan=True)
                assert np.asarray(line.get_xdata()) == pytest.approx(COUNTS, rel=0.05)
                if row == "unproved" and first == 16:
                    for m, each in zip(COUNTS, found, strict=True):
                        bar = _ys(line_of(axes, f"interval 16 {listed} {m}"))
                        assert bar[1] == pytest.approx(100 * each.unproved.high)
                        assert bar[0] == pytest.approx(max(axes.get_ylim()[0], 100 * each.unproved.low))
                        assert axes.get_ylim()[1] > bar[1]


def test_a_share_of_nothing_stands_at_the_foot_with_its_bound_and_breaks_the_line(few: Path) -> None:
    figure = _drawn(few)
    axes = figure.axes[0]
    foot = axes.get_ylim()[0]
    for listed in LISTS:
        none = line_of(axes, f"none 16 {listed}")
        assert np.asarray(none.get_xdata())[-1] == pytest.approx(512, rel=0.05)
        assert set(_ys(none)) == {foot}
        assert none.get_markerfacecolor() == "white"
        assert _ys(line_of(axes, f"interval 16 {listed} 512")) == pytest.approx([foot, 100 * 3 / 640])
        assert np.isnan(_ys(line_of(axes, f"unproved 16 {listed}"))[-1])
    least = 100 / 640
    assert foot < least / 1.5, "the foot is no share that was found"
    with styled():
        figure.canvas.draw()
    labels = dict(zip(axes.get_yticks(), [label.get_text() for label in axes.get_yticklabels()], strict=True))
    assert labels[foot] == "none"
    assert not _ys(line_of(figure.axes[2], "none 16 64")).size


def test_lists_have_colours_and_markers_of_their_own(results: Path) -> None:
    axes = _drawn(results).axes[0]
    whole = [line_of(axes, f"unproved 16 {listed}") for listed in LISTS]
    assert len({line.get_color() for line in whole}) == len({str(line.get_marker()) for line in whole}) == len(LISTS)
    for listed, line in zip(LISTS, whole, strict=True):
        part = line_of(axes, f"unproved 7 {listed}")
        assert (part.get_color(), part.get_linestyle(), line.get_linestyle()) == (line.get_color(), ":", "-")


@pytest.mark.parametrize("which", ["results", "few"])
def test_nothing_lies_on_anything_else(request: pytest.FixtureRequest, which: str) -> None:
    figure = _drawn(request.getfixturevalue(which))
    with styled():
        figure.set_dpi(300)  # as it is saved
        figure.canvas.draw()
        texts = [text for axes in figure.axes for text in (*axes.texts, axes.title, axes.yaxis.label)]
        ticks = [label for axes in figure.axes[:2] for label in axes.get_yticklabels() if label.get_position()[1] < axes.get_ylim()[1]]
        below = [label for axes in (figure.axes[1], figure.axes[3]) for label in axes.get_xticklabels()]
        legends = [text for legend in figure.legends for text in legend.get_texts()]
        assert_apart_on_the_page(figure, {*texts, *ticks, *below, *legends, *figure.texts})


def test_rounds_of_seven_steps_are_drawn_whole(tmp_path: Path) -> None:
    tables = make_runs.certified_tables(grid=((7, 1, 0.0),))
    rows = tables["certified_shares"]
    tables["certified_shares"] = rows[(rows["step"] < 7) & (rows["temperature"] == 0)].assign(steps=7)
    make_runs.certified(tmp_path, tables)
    figure = _drawn(tmp_path)
    assert line_of(figure.axes[0], "unproved 7 64").get_linestyle() == "-"
    assert [text.get_text() for text in figure.axes[2].texts] == ["not measured"]
    assert "Not measured yet, T = 1: python -m experiments.run experiment=certified" in " ".join(text.get_text() for text in figure.texts)


def test_without_a_record_the_command_is_named(tmp_path: Path) -> None:
    make_runs.certified(tmp_path, shares=False, grid=((7, 1, 0.0),))
    with pytest.raises(MissingResults, match="experiment=certified device=h200"):
        fig17_certified_share.draw(tmp_path, "h200")
