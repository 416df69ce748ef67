"""Figure 3: sizes and capacities are the record's, the bars are the step's parts, and without a trace the other panel says how to get one."""

from __future__ import annotations

import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis.load import newest_run
from figures import fig03_step
from figures.style import styled


def _draw(root: Path) -> Figure:
    with styled():
        figure = fig03_step.draw(root, "h200")
    plt.close(figure)
    return figure


def test_sizes_and_capacities_are_drawn_to_scale(results: Path) -> None:
    axes = _draw(results).axes[0]
    sizes = {str(line.get_gid()): np.asarray(line.get_ydata()).tolist() for line in axes.lines if str(line.get_gid()).startswith("size")}
    assert sizes == {"size bf16": [pytest.approx(151_936 * 512 / 1e6)], "size int8": [pytest.approx(151_936 * 256 / 1e6)]}
    levels = {
        round(float(np.asarray(line.get_ydata())[0]), 1)
        for line in axes.lines
        if line.get_gid() is None or "size" not in str(line.get_gid())
    }
    found = fig03_step.memories_mb(newest_run(results, "capacity").table("placement"))
    assert found["h200"] == (pytest.approx(132 * (256 + 228) * 1024 / 1e6), pytest.approx(62.9, abs=0.1))
    assert levels == {round(level, 1) for of in found.values() for level in of}


def test_bars_are_the_parts_of_a_step(results: Path) -> None:
    axes = _draw(results).axes[1]
    bars = {str(bar.get_gid()).removeprefix("part "): bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)}
    assert bars == pytest.approx({"GEMM": 33.33, "_race_in_tile": 4.545, "add": 2.02, "small, 2×": 0.808, "(between kernels)": 5.555})


def test_without_a_trace_the_sizes_are_drawn_all_the_same(results: Path, tmp_path: Path) -> None:
    shutil.copytree(results / "capacity", tmp_path / "capacity")
    figure = _draw(tmp_path)
    assert any("experiment=step_anatomy" in text.get_text() for text in figure.texts)
    assert [text.get_text() for text in figure.axes[1].texts] == ["not measured"]
