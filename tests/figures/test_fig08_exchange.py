"""Figure 8: what is drawn equals what is recorded, and fits its page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from analysis.exchange import costs
from analysis.load import MissingResults, newest_run
from figures import fig08_exchange
from figures.style import PROTOCOLS, protocol_look, styled
from tests.data import make_runs
from tests.data.make_runs import EXCHANGES
from tests.figures.page import assert_apart_on_the_page


def _texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text) if isinstance(text, Text))


@pytest.fixture(scope="module")
def figure(results: Path) -> Figure:
    with styled():
        return fig08_exchange.draw(results, "h200")


def test_every_measured_slope_is_a_point_with_its_interval(figure: Figure, results: Path) -> None:
    fits = costs(newest_run(results, "exchange", "h200"))
    panel = figure.axes[1]
    drawn = {container.get_label(): container for container in panel.containers}
    assert set(drawn) == {f"{name} {ctas}" for name, ctas in fits}
    rows = dict(zip((label.get_text() for label in panel.get_yticklabels()), panel.get_yticks(), strict=True))
    for (name, ctas), fitted in fits.items():
        point, _, (bar,) = drawn[f"{name} {ctas}"]
        assert point.get_xdata() == pytest.approx([fitted.slope_us.value])
        assert point.get_ydata() == [rows[protocol_look(name).label]]
        assert np.sort(bar.get_segments()[0][:, 0]) == pytest.approx([fitted.slope_us.low, fitted.slope_us.high])
        assert (point.get_color(), point.get_marker()) == (protocol_look(name).color, protocol_look(name).marker)
        assert panel.get_xlim()[0] == 0
        assert panel.get_xlim()[1] > fitted.slope_us.high


def test_the_schematic_carries_the_chosen_protocols_numbers(figure: Figure, results: Path) -> None:
    fits = costs(newest_run(results, "exchange", "h200"))
    schematic = figure.axes[0]
    measured = {text.get_gid(): text.get_text() for text in schematic.texts if text.get_gid()}
    assert measured == {f"measured {ctas}": f"{fits['pair', ctas].slope_us.value:.2f} µs/step" for ctas in (8, 66, 132)}
    text = _texts(figure)
    for words in ("red.max key", "red.add 1", "16-byte poll", "count = 132?", "CTA 131", "128-byte", "cleared for the next launch"):
        assert words in text


def test_what_leans_on_the_hardware_stands_above_what_ptx_promises(figure: Figure) -> None:
    panel = figure.axes[1]
    rows = {label.get_text(): y for label, y in zip(panel.get_yticklabels(), panel.get_yticks(), strict=True)}
    leaning = [rows[protocol_look(name).label] for name, (promised, _) in EXCHANGES.items() if not promised]
    safe = [rows[protocol_look(name).label] for name, (promised, _) in EXCHANGES.items() if promised]
    titles = {text.get_text(): text.get_position()[1] for text in panel.texts}
    assert titles["leans on the hardware"] > max(leaning)
    assert min(leaning) > titles["promised by PTX"] > max(safe)


def test_gaps_and_the_price_are_told(figure: Figure) -> None:
    text = " ".join(_texts(figure).split())
    assert text.count("not run") == 2  # clusters of 4 and 8 among 132 CTAs
    assert "clusters of 4, then pair, 66 CTAs (unsupported: 66 CTAs are no whole number of clusters of 4" in text
    assert "the cheapest protocol that needs neither, grid.sync(), costs 0.3" in text


def test_no_text_leaves_the_page_or_lies_on_another(figure: Figure) -> None:
    with styled():
        figure.set_dpi(300)  # as it is saved
        figure.canvas.draw()
        schematic, panel = figure.axes
        legend = panel.get_legend()
        assert legend is not None
        shown = [*schematic.texts, *panel.texts, *panel.get_yticklabels(), panel.xaxis.label, *legend.get_texts(), *figure.texts]
        assert_apart_on_the_page(figure, shown)


def test_a_run_without_the_chosen_protocol_names_the_command(tmp_path: Path) -> None:
    tables = make_runs.exchange_tables({"grid_sync": (True, (1.0, 1.1, 1.2))})
    make_runs.write_run(tmp_path, "exchange", tables, run_id="20260101T000000Z-h200-0", device={"spec": "h200", "name": "NVIDIA H200"})
    with (
        styled(),
        pytest.raises(MissingResults, match=r"did not time the pair among 132 CTAs; measure it with `python -m experiments\.run"),
    ):
        fig08_exchange.draw(tmp_path, "h200")


def test_every_protocol_has_its_own_colour_and_marker() -> None:
    assert len({item.color for item in PROTOCOLS.values()}) == len({item.marker for item in PROTOCOLS.values()}) == len(PROTOCOLS)
    assert len({item.label for item in PROTOCOLS.values()}) == len(PROTOCOLS)
    with pytest.raises(KeyError, match=r"PROTOCOLS in figures/style.py"):
        protocol_look("unheard_of")
