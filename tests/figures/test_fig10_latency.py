"""Figure 10: what is drawn equals what is recorded, gaps are gaps with their reason, and all of it fits its page."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from analysis.latency import BATCHES, TEMPERATURES, WALKS, Cell, latencies
from analysis.load import MissingResults, all_runs
from figures import fig10_latency
from figures.style import look, styled
from tests.data import make_runs
from tests.data.make_runs import GRID, grid_time

PANELS = [(head, vocab, steps, temperature) for temperature in TEMPERATURES for head, vocab, steps in WALKS]
HEAD = "markov_v152k"


def _draw(root: Path) -> Figure:
    with styled():
        figure = fig10_latency.draw(root, "h200")
    plt.close(figure)
    return figure


def _panels(figure: Figure) -> dict[tuple[str, int, float], Axes]:
    return {(head, steps, temperature): axes for (head, _, steps, temperature), axes in zip(PANELS, figure.axes, strict=True)}


def _texts(figure: Figure) -> str:
    return " ".join(" ".join(text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)).split())


def _points(axes: Axes) -> dict[str, dict[int, float]]:
    """Drawn times by arm and batch."""
    drawn = {}
    for container in axes.containers:
        line = container[0]
        pairs = zip(np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata(), dtype=np.float64).tolist(), strict=True)
        drawn[str(container.get_label()).removeprefix("points ")] = {int(batch): time for batch, time in pairs if np.isfinite(time)}
    return drawn


def _labels(axes: Axes) -> dict[int, str]:
    gids = {str(text.get_gid()): text for text in axes.texts if isinstance(text, Annotation)}
    return {int(gid.split()[1]): text.get_text() for gid, text in gids.items() if gid.startswith("speedup")}


def _gaps(axes: Axes) -> list[int]:
    return sorted(int(str(patch.get_gid()).split()[1]) for patch in axes.patches if str(patch.get_gid()).startswith("gap"))


@pytest.fixture(scope="module")
def figure(results: Path) -> Figure:
    return _draw(results)


def test_every_timed_cell_is_a_point_of_its_arm_and_nothing_else_is(figure: Figure, results: Path) -> None:
    found = latencies(all_runs(results, "walk_latency", "h200"))
    for (head, steps, temperature), axes in _panels(figure).items():
        expected: dict[str, dict[int, Any]] = {}
        for batch in BATCHES:
            for arm, time in found[cell].times.items() if (cell := Cell(head, steps, batch, temperature)) in found else ():
                expected.setdefault(arm, {})[batch] = pytest.approx(time.value)
        assert _points(axes) == expected, (head, steps, temperature)
        assert axes.get_yscale() == "log"
    assert len(_points(figure.axes[1])) == 4
    assert len(_points(figure.axes[5])) == 2


def test_labels_are_the_speed_up_over_the_fastest_stock_arm_of_the_cell(figure: Figure) -> None:
    for (_, vocab, steps, temperature), axes in zip(PANELS, figure.axes, strict=True):
        stock = ("sglang_folded",) if temperature else ("sglang_folded", "sglang_greedy", "vllm_addmm")
        for batch, label in _labels(axes).items():
            ours = grid_time("resident", vocab, steps, batch, temperature)
            fastest = min(grid_time(arm, vocab, steps, batch, temperature) for arm in stock)
            assert label.endswith("×")
            assert float(label[:-1]) == pytest.approx(fastest / ours, abs=0.15)
    assert list(_labels(figure.axes[0])) == list(BATCHES)


def test_what_is_missing_is_a_visible_gap_with_its_reason(figure: Figure) -> None:
    panels, text = _panels(figure), _texts(figure)
    refused = panels[HEAD, 16, 1.0]
    assert _gaps(refused) == [64]
    assert list(_labels(refused)) == list(BATCHES[:-1])
    assert "one launch, resident int8, V = 151,936, 16 steps, T = 1, batch 64: unsupported: no room for 64 requests of 16 steps." in text
    assert "vLLM, addmm, T = 1: unsupported: vllm_addmm is greedy only" in text
    never = panels["markov_v129k", 5, 1.0]
    assert (never.texts[0].get_text(), never.containers) == ("not measured", [])
    command = "python -m experiments.run experiment=walk_latency device=h200 head=markov_v129k 'experiment.steps=[5]'"
    assert f"Not measured, V = 129,280, 5 steps, T = 1: {command}" in text
    assert _gaps(panels[HEAD, 7, 0.0]) == []


def test_a_line_breaks_where_a_batch_was_not_measured(tmp_path: Path) -> None:
    make_runs.walk_latency(tmp_path, HEAD, batches=(1, 2, 8), temperatures=(0.0,))
    figure = _draw(tmp_path)
    axes = _panels(figure)[HEAD, 7, 0.0]
    assert set(_points(axes)["resident"]) == {1, 2, 8}
    line = next(container for container in axes.containers if container.get_label() == "points resident")[0]
    assert np.isnan(np.asarray(line.get_ydata(), dtype=np.float64)[BATCHES.index(4)])
    assert _gaps(axes) == [4, 16, 32, 64]
    spans = {str(patch.get_gid()): patch.get_extents() for patch in axes.patches}
    left, right = axes.transData.inverted().transform([(spans["gap 4"].x0, 0), (spans["gap 4"].x1, 0)])[:, 0]
    assert (left, right) == pytest.approx((4 / sqrt(2), 4 * sqrt(2)), rel=0.01)
    assert "V = 151,936, 7 steps, T = 0, batch 4, 16, 32, 64" in _texts(figure)


def test_a_newer_run_of_a_part_replaces_that_part_and_both_runs_are_named(tmp_path: Path) -> None:
    make_runs.walk_latency(tmp_path, HEAD)
    make_runs.walk_latency(tmp_path, HEAD, run_id="20260102T000000Z-h200-0", steps=(7,), batches=(4,), temperatures=(0.0,), factor=1.5)
    figure = _draw(tmp_path)
    ours = _points(_panels(figure)[HEAD, 7, 0.0])["resident"]
    truth = {batch: (1.5 if batch == 4 else 1.0) * grid_time("resident", GRID[HEAD][0], 7, batch, 0.0) for batch in BATCHES}
    assert ours == pytest.approx(truth, rel=0.02)
    assert "2 runs: 20260101T000000Z-h200-00000000, 20260102T000000Z-h200-0" in _texts(figure)


def test_many_reasons_leave_room_for_the_panels(tmp_path: Path) -> None:
    refused = {("resident", 7, batch, t): f"reason {batch} at {t}" for batch in BATCHES for t in TEMPERATURES if batch > 1}
    make_runs.walk_latency(tmp_path, HEAD, steps=(7,), refused=refused)
    figure = _draw(tmp_path)
    assert "more reasons stand in the tables" in _texts(figure)
    assert min(axes.get_position().height for axes in figure.axes) > 0.15


def test_without_any_timed_cell_the_command_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        MissingResults, match=r"measure it with `python -m experiments\.run experiment=walk_latency device=h200 head=markov"
    ):
        _draw(tmp_path)
    tables = make_runs.walk_latency_tables(HEAD, (3,), (1,), (0.0,))  # a length that the figure does not show
    make_runs.write_run(tmp_path, "walk_latency", tables, run_id="20260101T000000Z-h200-0", device={"spec": "h200", "name": "NVIDIA H200"})
    with pytest.raises(MissingResults, match="no timed cell"):
        _draw(tmp_path)


def test_arms_look_as_in_every_figure(figure: Figure) -> None:
    for axes in figure.axes:
        for container in axes.containers:
            style = look(str(container.get_label()).removeprefix("points "))
            assert (container[0].get_color(), container[0].get_marker()) == (style.color, style.marker)


def test_nothing_is_cut_off_and_no_label_touches_its_neighbour(results: Path) -> None:
    with styled():
        figure = fig10_latency.draw(results, "h200")
        figure.set_dpi(300)  # as it is saved
        figure.canvas.draw()
        texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text().strip() and text.get_visible()]
        for box, words in ((text.get_window_extent(), text.get_text()) for text in texts):
            page = figure.bbox
            assert page.x0 <= box.x0 <= box.x1 <= page.x1, words
            assert page.y0 <= box.y0 <= box.y1 <= page.y1, words
        for axes in figure.axes:
            boxes = [text.get_window_extent() for text in axes.texts if isinstance(text, Annotation)]
            assert not any(one.overlaps(other) for one, other in pairwise(boxes))
            assert all(axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 and axes.bbox.y0 <= box.y0 for box in boxes)
        plt.close(figure)
