"""What is drawn equals what is recorded: the artists' own data against the tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation, Text

from analysis.fits import fit_run
from analysis.load import MissingResults, newest_run
from figures import fig01_tiers, fig02_recurrence, fig04_timeline, fig07_two_planes, fig11_slopes
from figures.style import LOOKS, look, styled
from tests.data import make_runs
from tests.data.make_runs import TRUTH


def _texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text) if isinstance(text, Text))


def _panel_texts(axes: Axes) -> str:
    return "\n".join(text.get_text() for text in axes.texts)


def _bars(axes: Axes, gid: str) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_gid() == gid]


def test_figure_11_plots_the_medians_of_the_table(results: Path) -> None:
    with styled():
        figure = fig11_slopes.draw(results, "h200")
    samples = newest_run(results, "step_slope", "h200").table("samples")
    samples = samples[(samples["l2"] == "cold") & (samples["scope"] == "call")]
    for variant in TRUTH:
        rows = samples[samples["variant"] == variant]
        expected = rows.groupby(["steps", "replica"])["time_us"].median().groupby("steps").median()
        for axes in figure.axes:
            container = next(item for item in axes.containers if item.get_label() == f"points {variant}")
            line = container[0]
            assert np.array_equal(line.get_xdata(), expected.index)
            assert line.get_ydata() == pytest.approx(expected.to_numpy())
            fit_line = next(item for item in axes.lines if item.get_gid() == f"fit {variant}")
            entry, slope = TRUTH[variant]
            assert fit_line.get_ydata() == pytest.approx([entry, entry + 16 * slope], abs=1.0)
        assert look(variant).label in _texts(figure)


def test_figure_11_breaks_where_no_point_lies(results: Path) -> None:
    with styled():
        figure = fig11_slopes.draw(results, "h200")
    lower, upper = figure.axes
    points = [
        estimate.value
        for of in fig11_slopes.point_estimates(newest_run(results, "step_slope", "h200")).values()
        for estimate in of.values()
    ]
    start, end = lower.get_ylim()[1], upper.get_ylim()[0]
    assert start < end
    assert not [value for value in points if start <= value <= end]
    assert lower.get_ylim()[0] == 0
    assert upper.get_ylim()[1] > max(points)
    assert "compressed" in _texts(figure)


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=30), st.floats(0, 500))
def test_a_break_never_hides_a_point(values: list[float], least: float) -> None:
    gap = fig11_slopes.choose_break(values, least)
    if gap:
        assert least <= gap[0] < gap[1]
        assert not [value for value in values if gap[0] <= value <= gap[1]]


def test_figure_11_without_slow_arms_needs_no_break(tmp_path: Path) -> None:
    make_runs.step_slope(tmp_path, {name: TRUTH[name] for name in ("streaming_int8", "resident")})
    with styled():
        assert len(fig11_slopes.draw(tmp_path, "h200").axes) == 1


def test_figure_11_shows_a_failed_arm_with_its_reason(tmp_path: Path) -> None:
    tables = make_runs.step_slope_tables()
    lost = {name: frame["variant"] == "vllm_addmm" for name, frame in tables.items()}
    tables["samples"] = tables["samples"][~lost["samples"]]
    tables["cells"].loc[lost["cells"], ["status", "reason"]] = ["unsupported", "needs Triton"]
    make_runs.write_run(tmp_path, "step_slope", tables, run_id="20260101T000000Z-h200-0", device={"spec": "h200", "name": "NVIDIA H200"})
    with styled():
        text = " ".join(_texts(fig11_slopes.draw(tmp_path, "h200")).split())
    assert "vLLM, addmm: not drawn (unsupported: needs Triton)" in text


def test_figure_4_is_drawn_from_the_fits(results: Path) -> None:
    with styled():
        figure = fig04_timeline.draw(results, "h200")
    fits = fit_run(newest_run(results, "step_slope", "h200"))
    axes = figure.axes[0]
    for variant, steps in (("streaming_int8", 7), ("resident", 7), ("sglang_folded", 1)):
        bars = _bars(axes, variant)
        assert sum(bar.get_width() for bar in bars) == pytest.approx(fits[variant].at(steps))
        ends = [bar.get_x() + bar.get_width() for bar in bars]
        assert [bar.get_x() for bar in bars[1:]] == pytest.approx(ends[:-1])
    excess = fits["resident"].entry_us.value - fits["streaming_int8"].entry_us.value
    assert _bars(axes, "resident")[1].get_width() == pytest.approx(excess)
    text = _texts(figure)
    assert "cut after step 1 of 7" in text
    assert "illustrative" in text
    assert f"{fits['sglang_folded'].at(7):.0f} µs" in text


def test_figure_4_draws_no_shard_load_where_there_is_none(tmp_path: Path) -> None:
    make_runs.step_slope(tmp_path, TRUTH | {"streaming_int8": (20.0, 8.9)})
    rows = fig04_timeline.segments(fit_run(newest_run(tmp_path, "step_slope", "h200")))
    assert [segment.kind for segment in rows["resident"]] == ["entry"] + ["pick"] * 7


def test_figure_4_without_an_arm_names_the_command(tmp_path: Path) -> None:
    make_runs.step_slope(tmp_path, {"resident": TRUTH["resident"]})
    with (
        styled(),
        pytest.raises(MissingResults, match=r"no timed walks of sglang_folded, streaming_int8; measure it with `python -m experiments.run"),
    ):
        fig04_timeline.draw(tmp_path, "h200")


def test_figure_1_draws_capacities_and_uses_of_the_planner(results: Path) -> None:
    with styled():
        figure = fig01_tiers.draw(results, "h200")
    placement = newest_run(results, "capacity").table("placement")
    for axes, device in zip(figure.axes, fig01_tiers.DEVICES, strict=True):
        rows = placement[placement["device"] == device].set_index("tier")
        for tier in rows.index[rows["capacity_bytes"] > 0]:
            (used,) = _bars(axes, f"used {tier}")
            assert used.get_width() == pytest.approx(rows["used_bytes"][tier] / 1e6)
            (outline,) = _bars(axes, f"capacity {tier}")
            if tier != "hbm":
                assert outline.get_width() == pytest.approx(rows["capacity_bytes"][tier] / 1e6)
    text = _texts(figure)
    assert "H200: int8 W2, 38.9 of 65.4 MB on chip" in text
    assert "B200, not run: bf16 W2, 77.8 of 112.1 MB on chip" in text
    assert "B200: resident_sm90 needs sm_90a" in text


def test_figure_1_without_a_device_names_the_command(tmp_path: Path) -> None:
    rows = [{"device": "h200", "head": "markov_v152k", "backend": "", "variant": "", "vocab": 151_936, "rank": 256, "reason": ""}]
    frame = pd.DataFrame(rows).assign(tier="l2", capacity_bytes=1, used_bytes=0)
    make_runs.write_run(tmp_path, "capacity", {"placement": frame}, run_id="20260101T000000Z-cpu-0", device={"spec": "cpu", "name": ""})
    with styled(), pytest.raises(MissingResults, match="plans no markov_v152k on b200; measure it with"):
        fig01_tiers.draw(tmp_path, "h200")


def test_figure_2_shows_the_recorded_numbers_and_tokens(results: Path) -> None:
    with styled():
        figure = fig02_recurrence.draw(results, "h200")
    walk = newest_run(results, "toy_walk").table("walk_steps")
    for step in range(3):
        rows = walk[walk["step"] == step].sort_values("row")
        axes = figure.axes[step]
        assert np.asarray(axes.images[0].get_array()) == pytest.approx(rows[["base", "bias", "logit"]].to_numpy())
        frame = next(patch for patch in axes.patches if isinstance(patch, Rectangle))
        token = int(rows["token"].iloc[0])
        assert frame.get_y() + 0.5 == token == rows["logit"].to_numpy().argmax()
        assert f"u = W1[{rows['previous'].iloc[0]}]" in axes.get_title()
        if step < 2:
            assert f"token {token}" in _texts(figure)


def test_figure_7_shows_every_register_where_the_map_has_it(results: Path) -> None:
    with styled():
        figure = fig07_two_planes.draw(results, "h200")
    packing = newest_run(results, "packing_map").table("packing")
    panels = {name: next(axes for axes in figure.axes if f"$\\bf{{{name.upper()}}}$" in _panel_texts(axes)) for name in "abd"}
    for operand, axes in panels.items():
        rows = packing[(packing["batch"] == 1) & (packing["operand"] == operand) & (packing["k_step"] <= 0)]
        numbers = {text.xy: text.get_text() for text in axes.texts if isinstance(text, Annotation)}
        drawn = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_gid()]
        held = {f"{lane} {register}": of for (lane, register), of in rows.groupby(["lane", "register"])}
        assert sorted(str(patch.get_gid()) for patch in drawn) == sorted(held)
        for patch in drawn:
            of = held[str(patch.get_gid())]
            low, high = of[["column", "row"]].min().tolist(), (of[["column", "row"]].max() + 1).tolist()
            (left, top), (right, bottom) = patch.get_xy(), (patch.get_x() + patch.get_width(), patch.get_y() + patch.get_height())
            assert ([left, top], [right, bottom]) == (low, high)
            assert numbers[(left + right) / 2, (top + bottom) / 2] == str(of["lane"].iloc[0])
    words = ["0–3", "16–19", "32–35", "48–51", "4–7", "20–23", "36–39", "52–55"]  # chunk after chunk, first halves
    for operand in "ab":
        labels = [text for text in panels[operand].texts if "–" in text.get_text()]
        assert [label.get_text() for label in sorted(labels, key=lambda label: sum(label.get_position()))] == words
    requests = {text.get_gid(): text.get_text() for text in panels["b"].texts if str(text.get_gid()).startswith("request")}
    assert [requests[f"request 4 {pair}"] for pair in range(4)] == ["0", "1", "2", "3"]
    assert [requests[f"request 1 {pair}"] for pair in range(4)] == ["0", "copy", "copy", "copy"]


def test_figure_7_prints_the_recorded_example(results: Path) -> None:
    with styled():
        figure = fig07_two_planes.draw(results, "h200")
    run, text = newest_run(results, "packing_map"), _texts(figure).replace("−", "-")
    codes, sums = run.table("plane_codes"), run.table("plane_sums").iloc[0]
    for shown in (
        f"d0 = row · hi = {sums['hi_sum']:,}",
        f"d1 = row · lo = {sums['lo_sum']:,}",
        f"x = 256 d0 + d1 = {256 * sums['hi_sum'] + sums['lo_sum']:,}",
        f"x = {sums['bias']:.4f}",
        f"= {sums['logit']:.4f}, one bf16 rounding",
        f"hi = {codes['hi'][0]}",
        f"lo = {codes['lo'][0]}",
        "\na0, lane 20\n" + "\n".join(f"{code}\nk={k}" for k, code in enumerate(codes["code"][:4])) + "\n",
        "\nb0, lane 0\n" + "\n".join(str(code) for code in codes["hi"][:4]) + "\n",
        "\nb0, lane 4\n" + "\n".join(str(code) for code in codes["lo"][:4]) + "\n",
        "The sums of lane 20",
    ):
        assert shown in text


def test_figure_7_without_batch_4_names_the_command(results: Path, tmp_path: Path) -> None:
    tables = {name: frame.drop(columns="run_id") for name, frame in newest_run(results, "packing_map").tables.items()}
    tables["packing"] = tables["packing"][tables["packing"]["batch"] == 1]
    make_runs.write_run(tmp_path, "packing_map", tables, run_id="20260101T000000Z-cpu-0", device={"spec": "cpu", "name": ""})
    with (
        styled(),
        pytest.raises(MissingResults, match=r"batches \[1\] .* measure it with `python -m experiments.run experiment=packing_map"),
    ):
        fig07_two_planes.draw(tmp_path, "h200")


def test_every_variant_has_its_own_colour_and_marker() -> None:
    assert len({item.color for item in LOOKS.values()}) == len({item.marker for item in LOOKS.values()}) == len(LOOKS)
    with pytest.raises(KeyError, match=r"LOOKS in figures/style.py"):
        look("unheard_of")
