"""Figure 16: lines are the record's medians, bands its quantiles, and the floor is that of the bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.certified import EXPERIMENT, FLAT, TRAINED, Cell, measured
from analysis.load import MissingResults, all_runs
from figures import fig16_certified_time
from figures.style import look, styled
from tests.data import make_runs
from tests.data.make_runs import CERTIFIED_ARMS, LAUNCH_US
from tests.figures.page import assert_apart_on_the_page, line_of

pytestmark = pytest.mark.usefixtures("closed")

VOCAB = 151_936
HEADS = {TRAINED: "qwen_vocab_markov", FLAT: "markov_v152k"}


def _drawn(results: Path) -> Figure:
    with styled():
        return fig16_certified_time.draw(results, "h200")


def _bars(axes: Axes, gid: str) -> np.ndarray:
    """[bars, 2 ends, x and y]."""
    (bars,) = (each for each in axes.collections if each.get_gid() == gid)
    return np.array([path.vertices for path in bars.get_paths()])


def test_every_line_has_the_medians_and_quantiles_of_its_panel(results: Path) -> None:
    figure, found = _drawn(results), measured(all_runs(results, EXPERIMENT, "h200"))
    places = [(temperature, family) for temperature in (0.0, 1.0) for family in (TRAINED, FLAT)]
    for axes, (temperature, family) in zip(figure.axes, places, strict=True):
        for arm in CERTIFIED_ARMS:
            rounds = [found[Cell(family, VOCAB, HEADS[family], steps, 1, temperature, "cold")].arms[arm] for steps in (7, 16)]
            line, bars = line_of(axes, f"median {arm}"), _bars(axes, f"bars {arm}")
            assert list(np.asarray(line.get_xdata())) == [7, 16]
            assert list(np.asarray(line.get_ydata())) == [each.median_us.value for each in rounds]
            assert (line.get_color(), line.get_marker()) == (look(arm).color, look(arm).marker)
            assert bars[:, :, 1] == pytest.approx(np.array([[each.quantiles_us[0], each.quantiles_us[-1]] for each in rounds]))
            (band,) = (each for each in axes.collections if each.get_gid() == f"band {arm}")
            ends = {tuple(place) for place in np.asarray(band.get_paths()[0].vertices)}
            assert {(steps, us) for steps, pair in zip((7, 16), bars[:, :, 1], strict=True) for us in pair} <= ends
        low, high = axes.get_ylim()
        assert low < LAUNCH_US < max(bars[:, :, 1].max(), 1) < high
    assert len({axes.get_ylim() for axes in figure.axes}) == 1


def test_the_floor_is_the_launch_and_the_base_logits(results: Path) -> None:
    for axes in _drawn(results).axes:
        line = line_of(axes, "floor")
        expected = [LAUNCH_US + 2 * VOCAB * steps / 4.8e6 for steps in np.asarray(line.get_xdata())]
        assert np.asarray(line.get_ydata()) == pytest.approx(expected)
        assert line.get_linestyle() == "--"


def test_nothing_lies_on_anything_else(results: Path) -> None:
    figure = _drawn(results)
    with styled():
        figure.set_dpi(300)  # as it is saved
        figure.canvas.draw()
        texts = [text for axes in figure.axes for text in (*axes.texts, axes.title, axes.yaxis.label)]
        below = [label for axes in figure.axes[2:] for label in axes.get_xticklabels()]
        legends = [text for legend in figure.legends for text in legend.get_texts()]
        assert_apart_on_the_page(figure, {*texts, *below, *legends, *figure.texts})


def test_what_is_missing_is_said_with_its_command(tmp_path: Path) -> None:
    make_runs.certified(tmp_path, grid=((7, 1, 0.0),), shares=False)
    figure = _drawn(tmp_path)
    words = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert words == [[], ["not measured"], ["not measured"], ["not measured"]]
    note = " ".join(" ".join(text.get_text() for text in figure.texts).split())
    assert "Not measured yet, synthetic inputs: python -m experiments.run experiment=certified device=h200" in note


def test_other_vocabularies_batches_and_a_hot_cache_are_not_drawn(tmp_path: Path) -> None:
    make_runs.certified(tmp_path, vocab=248_320, grid=((15, 1, 0.0),), shares=False)
    make_runs.certified(tmp_path, run_id="20260101T000300Z-h200-0", grid=((7, 64, 0.0),), shares=False)
    with pytest.raises(MissingResults, match="experiment=certified device=h200"):
        fig16_certified_time.draw(tmp_path, "h200")


def test_without_a_record_the_command_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingResults, match="experiment=certified device=h200"):
        fig16_certified_time.draw(tmp_path, "h200")
