"""Figure 6: what is drawn equals what is recorded and what the formats have, and fits its page."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from analysis.levels import LEVELS
from analysis.load import MissingResults, newest_run
from figures import fig06_levels
from figures.style import FORMATS, styled
from tests.data import make_runs
from tests.figures.page import assert_apart_on_the_page, line_of


@pytest.fixture(scope="module")
def figure(results: Path) -> Figure:
    with styled():
        return fig06_levels.draw(results, "h200")


def _texts(figure: Figure) -> str:
    return " ".join(" ".join(text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)).split())


def test_the_weights_are_the_median_and_the_band_of_the_heads(figure: Figure, results: Path) -> None:
    table = newest_run(results, "quantization").table("magnitudes").pivot(index="magnitude", columns="head", values="share")
    line = line_of(figure.axes[0], "weights")
    assert np.asarray(line.get_xdata()) == pytest.approx(table.index.to_numpy())
    assert np.asarray(line.get_ydata()) == pytest.approx(table.median(axis=1).to_numpy())
    (band,) = (each for each in figure.axes[0].collections if each.get_label() == "band")
    corners = np.asarray(band.get_paths()[0].vertices)
    for magnitude in table.index[::56]:
        drawn = corners[np.isclose(corners[:, 0], magnitude), 1]
        assert (drawn.min(), drawn.max()) == pytest.approx((table.loc[magnitude].min(), table.loc[magnitude].max()))


def test_levels_rise_by_one_share_at_each_value(figure: Figure) -> None:
    for name in FORMATS:
        line, positive = line_of(figure.axes[0], f"levels {name}"), LEVELS[name].positive
        assert np.asarray(line.get_xdata())[1:] == pytest.approx(positive)
        assert np.asarray(line.get_ydata())[1:] == pytest.approx(np.arange(1, len(positive) + 1) / len(positive))
        assert line.get_drawstyle() == "steps-post"


@pytest.mark.parametrize(("name", "at", "levels"), [("e4m3", 1 / 14, 95 / 126), ("e5m2", 1 / 28, 103 / 123)])
def test_the_crossing_is_marked_with_both_shares(figure: Figure, name: str, at: float, levels: float) -> None:
    weights = [math.erf(reach * at / math.sqrt(2)) / math.erf(reach / math.sqrt(2)) for reach in (3.0, 3.8)]
    assert line_of(figure.axes[0], f"crossing {name}").get_xdata() == pytest.approx([at, at])
    marked = line_of(figure.axes[0], f"levels left of {name}"), line_of(figure.axes[0], f"weights left of {name}")
    assert marked[0].get_xydata() == pytest.approx(np.array([[at, levels]]))
    assert marked[1].get_ydata() == pytest.approx(weights)
    words = f"left of {at:.3f}: {100 * levels:.0f} % of its levels, {100 * weights[0]:.0f}–{100 * weights[1]:.0f} % of the weights"
    assert f"{name}'s steps are finer than int8's {words}" in _texts(figure)


def test_random_weights_are_called_synthetic_and_one_head_has_no_span(tmp_path: Path) -> None:
    make_runs.quantization(tmp_path, make_runs.quantization_tables("synthetic", ("trained_a",)))
    with styled():
        text = _texts(fig06_levels.draw(tmp_path, "h200"))
    assert "W2 (synthetic)" in text
    assert "of trained_a (synthetic, normally distributed)" in text
    assert "17 % of the weights" in text


def test_without_a_run_or_its_magnitudes_the_command_is_named(tmp_path: Path) -> None:
    with styled(), pytest.raises(MissingResults, match="measure it with `python -m experiments.run experiment=quantization device=cpu`"):
        fig06_levels.draw(tmp_path, "h200")
    tables = make_runs.quantization_tables()
    make_runs.quantization(tmp_path, tables | {"magnitudes": tables["magnitudes"].iloc[:0]})
    with styled(), pytest.raises(MissingResults, match="has no magnitudes"):
        fig06_levels.draw(tmp_path, "h200")


def test_nothing_lies_on_anything_else(results: Path) -> None:
    with styled():
        figure = fig06_levels.draw(results, "h200")
        figure.set_dpi(300)  # as it is saved
        figure.canvas.draw()
        axes = figure.axes[0]
        assert_apart_on_the_page(figure, [*figure.texts, *axes.texts, axes.xaxis.label, axes.yaxis.label])
        curves = [line_of(figure.axes[0], gid) for gid in ("weights", *(f"levels {name}" for name in FORMATS))]
        for text in axes.texts:
            box = Text.get_window_extent(text)  # of an annotation without its arrow
            for curve in curves:
                points = axes.transData.transform(np.column_stack([curve.get_xdata(), curve.get_ydata()]))
                assert not any(box.contains(*point) for point in points), f"{text.get_text()!r} lies on a curve"
