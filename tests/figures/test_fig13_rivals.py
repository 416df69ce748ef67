"""Figure 13: the dots are the record's times, in the row of their batch."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes

from analysis.latency import BATCHES, TEMPERATURES, WALKS, Cell, latencies
from analysis.load import MissingResults, all_runs
from figures import fig13_rivals
from figures.style import styled


def _points(axes: Axes) -> dict[tuple[str, int], float]:
    """Drawn times by arm and batch."""
    drawn = {}
    for container in axes.containers:
        arm = str(container.get_label()).removeprefix("points ")
        for time, place in zip(np.asarray(container[0].get_xdata()), np.asarray(container[0].get_ydata()), strict=True):
            drawn[arm, BATCHES[round(float(place))]] = float(time)
    return drawn


def test_every_dot_is_a_time_of_the_record(results: Path) -> None:
    with styled():
        figure = fig13_rivals.draw(results, "h200")
    plt.close(figure)
    found = latencies(all_runs(results, "rivals", "h200"))
    places = [(head, steps, temperature) for temperature in TEMPERATURES for head, _, steps in WALKS]
    drawn = {}
    for (head, steps, temperature), axes in zip(places, figure.axes, strict=True):
        drawn |= {(Cell(head, steps, batch, temperature), arm): time for (arm, batch), time in _points(axes).items()}
    note = " ".join(" ".join(text.get_text() for text in figure.texts).split())
    assert "Not measured yet: python -m experiments.run experiment=rivals device=h200 head=markov_v248k" in note
    assert drawn == {(cell, arm): time.value for cell, latency in found.items() for arm, time in latency.times.items()}


def test_without_a_record_the_command_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingResults, match="experiment=rivals"):
        fig13_rivals.draw(tmp_path, "h200")
