from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from figures.draw import draw, known_figures, main
from figures.style import styled
from tests.data import make_runs

RESULTS = Path(__file__).resolve().parent.parent.parent / "results"


def test_every_figure_of_the_folder_is_known_by_its_number() -> None:
    assert {
        1: "fig01_tiers",
        2: "fig02_recurrence",
        4: "fig04_timeline",
        6: "fig06_levels",
        7: "fig07_two_planes",
        8: "fig08_exchange",
        10: "fig10_latency",
        11: "fig11_slopes",
        12: "fig12_placement",
    }.items() <= known_figures().items()


def test_all_figures_are_drawn_as_pdf_and_png(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--results", str(results), "--output", str(tmp_path)]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(path.name for path in paths) == sorted(f"{name}.{kind}" for name in known_figures().values() for kind in ("pdf", "png"))
    for path in paths:
        assert path.read_bytes()[:4] in (b"%PDF", b"\x89PNG")
        assert path.stat().st_size > 5000


def test_a_redrawn_figure_has_the_same_bytes(results: Path, tmp_path: Path) -> None:
    first, second = (draw("fig04_timeline", results, tmp_path / name) for name in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.parametrize("name", known_figures().values())
def test_no_text_of_the_committed_figures_is_cut_off(name: str) -> None:
    """On the records in results/, not on fixtures: a label that fits other numbers may run off the page."""
    with styled():
        figure = import_module(f"figures.{name}").draw(RESULTS, "h200")
        figure.set_dpi(300)  # as it is saved
        figure.canvas.draw()
        placed = [text for axes in figure.axes for text in (*axes.texts, axes.title, axes.xaxis.label, axes.yaxis.label)]
        placed += [text for legend in figure.legends for text in legend.get_texts()]
        for text in (*figure.texts, *placed):
            if text.get_text().strip():
                box, page = text.get_window_extent(), figure.bbox
                inside = page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
                assert inside, f"{text.get_text()!r} at {box.extents} on a page of {page.extents}"


def test_missing_data_names_its_command_after_the_others_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_runs.toy_walk(tmp_path / "results")
    assert main(["--results", str(tmp_path / "results"), "--output", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert [Path(line).name for line in out.splitlines()] == ["fig02_recurrence.pdf", "fig02_recurrence.png"]
    assert "figure 1: " in err
    assert "`python -m experiments.run experiment=capacity device=cpu`" in err
    assert "figure 6: " in err
    assert "`python -m experiments.run experiment=quantization device=cpu`" in err
    assert "figure 7: " in err
    assert "`python -m experiments.run experiment=packing_map device=cpu`" in err
    assert "figure 8: " in err
    assert "`python -m experiments.run experiment=exchange device=h200`" in err
    for number in (4, 11):
        assert f"figure {number}: " in err
    assert "figure 12: " in err
    assert "`python -m experiments.run experiment=placement device=h200`" in err
    assert "figure 10: " in err
    assert "`python -m experiments.run experiment=walk_latency device=h200 head=markov_v129k" in err
    assert err.count("`python -m experiments.run experiment=step_slope device=h200`") == 2


def test_a_corrupt_run_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_runs.step_slope(tmp_path / "results")
    (path / "samples.parquet").write_bytes(b"PAR1")
    assert main(["11", "--results", str(tmp_path / "results"), "--output", str(tmp_path)]) == 1
    assert "samples.parquet was altered" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.p*"))


@pytest.mark.parametrize("text", ["[]", "null", '{"schema_version": 1}'])
def test_a_corrupt_manifest_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    file = make_runs.step_slope(tmp_path / "results") / "run.json"
    file.write_text(text)
    assert main(["11", "--results", str(tmp_path / "results"), "--output", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert (err.count("\n"), err.startswith(f"figure 11: {file} ")) == (1, True)


def test_a_place_that_cannot_be_written_is_one_sentence(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "fig04_timeline.pdf").mkdir(parents=True)
    for output, reason in (("file", "File exists"), ("file/inside", "Not a directory"), ("taken", "Is a directory")):
        assert main(["4", "--results", str(results), "--output", str(tmp_path / output)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert err.startswith(f"{tmp_path / output}")
        assert f": {reason}; give --results that may be read and an --output" in err


def test_results_that_are_not_there_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--results", str(tmp_path / "missing"), "--output", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith(f"{tmp_path / 'missing'}: No such file or directory; ")
    assert not (tmp_path / "out").exists()


def test_an_unknown_device_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--device", "h999"])
    assert stop.value.code == 2
    assert "no device h999; there are b200, b300, cpu, h100, h200\n" in capsys.readouterr().err


def test_an_unknown_number_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["99"])
    assert "no figure 99; there are 1, 2, " in capsys.readouterr().err
