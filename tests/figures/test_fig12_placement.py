"""Figure 12: what is drawn equals what is recorded, and fits its page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from analysis.load import MissingResults, newest_run
from analysis.placement import splits
from figures import fig12_placement
from figures.style import styled
from tests.data import make_runs
from tests.data.make_runs import SPLITS
from tests.figures.page import assert_apart_on_the_page


def _texts(figure: Figure) -> str:
    return " ".join(" ".join(text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)).split())


@pytest.fixture(scope="module")
def figure(results: Path) -> Figure:
    with styled():
        return fig12_placement.draw(results, "h200")


def test_every_measured_cost_is_a_point_with_its_interval_and_its_number(figure: Figure, results: Path) -> None:
    timed = [split for split in splits(newest_run(results, "placement", "h200")) if split.measured]
    assert len(timed) == 9
    for axes, name, digits in ((figure.axes[1], "slope_us", 2), (figure.axes[2], "entry_us", 1)):
        costs = [getattr(split.measured, name) for split in timed]
        point, _, (bars,) = next(item for item in axes.containers if item.get_label() == "measured")
        assert point.get_xdata() == pytest.approx([split.register_tiles for split in timed])
        assert point.get_ydata() == pytest.approx([cost.value for cost in costs])
        ends = [np.sort(segment[:, 1]) for segment in bars.get_segments()]
        assert np.array(ends) == pytest.approx(np.array([(cost.low, cost.high) for cost in costs]))
        assert [f"{cost.value:.{digits}f}" for cost in costs] == [text.get_text() for text in axes.texts][: len(costs)]
        assert axes.get_ylim()[0] == 0
        assert axes.get_ylim()[1] > max(cost.high for cost in costs)


def test_the_expected_line_is_the_planners_and_dotted_where_registers_spill(figure: Figure) -> None:
    for axes, place in ((figure.axes[1], 1), (figure.axes[2], 0)):
        lines = {line.get_gid(): line for line in axes.lines if line.get_gid()}
        held = [(8 * tiles[0], expected[place]) for tiles, spilled, _, expected in SPLITS if not spilled]
        spilling = [(8 * tiles[0], expected[place]) for tiles, spilled, _, expected in SPLITS if spilled]
        assert lines["expected"].get_xydata() == pytest.approx(np.array(held))
        assert lines["expected, spills unknown"].get_xydata() == pytest.approx(np.array([held[-1], *spilling]))
        assert (lines["expected"].get_linestyle(), lines["expected, spills unknown"].get_linestyle()) == ("-", ":")


def test_the_shading_separates_what_spills(figure: Figure) -> None:
    for axes in figure.axes:
        (shade,) = (patch for patch in axes.patches if patch.get_gid() == "spills")
        box = shade.get_extents().transformed(axes.transData.inverted())
        assert 48 < box.x0 < 56
        assert box.x1 > 72
    assert "registers spill" in _texts(figure)


def test_the_bars_hold_all_tiles_of_every_split(figure: Figure) -> None:
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in figure.axes[0].containers}
    assert list(heights) == ["registers", "shared memory", "L2, every step"]
    for place, name in enumerate(heights):
        assert heights[name] == [8 * tiles[place] for tiles, *_ in SPLITS]
    above = [text.get_text() for text in figure.axes[0].texts]
    assert above[0] == "78"
    assert above[-1] == "255\n+440"


def test_a_split_that_failed_is_told(figure: Figure) -> None:
    text = _texts(figure)
    assert text.count("not timed") == 2
    assert "72 tiles in registers: 15 of 15 walks failed (runtime_error: RuntimeError: cuLaunchKernelEx: out of resources)" in text
    assert "1, 7 and 16 steps" in text


def test_no_text_leaves_the_page_or_lies_on_another(figure: Figure) -> None:
    with styled():
        figure.set_dpi(300)  # as it is saved
        figure.canvas.draw()
        shown = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
        for axes in figure.axes:
            legend = axes.get_legend()
            ticks = [label for label in axes.get_yticklabels() if label.get_position()[1] <= axes.get_ylim()[1]]
            shown += [*axes.texts, *ticks, axes.yaxis.label, axes.xaxis.label, *(legend.get_texts() if legend else ())]
        shown += figure.axes[-1].get_xticklabels()
        assert_apart_on_the_page(figure, shown)


def test_without_a_price_or_spills_there_is_no_line_and_no_shading(tmp_path: Path) -> None:
    tables = make_runs.placement_tables()
    tables["plans"] = tables["plans"][tables["plans"]["spill_bytes"] == 0].assign(unpriced="no rates", entry_us=0.0, step_us=0.0)
    kept = set(tables["plans"]["variant"])
    tables |= {name: tables[name][tables[name]["variant"].isin(kept)] for name in ("samples", "cells")}
    make_runs.placement(tmp_path, tables)
    with styled():
        figure = fig12_placement.draw(tmp_path, "h200")
    text = _texts(figure)
    assert "expected by the planner" not in text
    assert "registers spill" not in text
    assert "no expected cost: no rates" in text


def test_a_run_without_times_and_no_run_name_the_command(tmp_path: Path) -> None:
    command = r"measure it with `python -m experiments\.run experiment=placement device=h200`"
    with styled(), pytest.raises(MissingResults, match=command):
        fig12_placement.draw(tmp_path, "h200")
    tables = make_runs.placement_tables()
    tables["samples"] = tables["samples"].iloc[:1]
    make_runs.placement(tmp_path, tables)
    with styled(), pytest.raises(MissingResults, match=f"timed no split at two lengths; {command}"):
        fig12_placement.draw(tmp_path, "h200")
