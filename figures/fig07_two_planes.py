"""Figure 7: the two-plane product. Which lane of a warp holds what of one tensor-core instruction, and the numbers of one row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from analysis.load import MissingResults, Run, measure_command, newest_run
from figures.style import INK, MUTED, PAGE_IN, look, note
from figures.word import Word, color, draw_words, words

HEIGHT_IN = 4.35
BATCHES = (1, 4)  # one request in all eight columns, and a pair of columns for each of four
ACCENT = look("resident").color  # the example: one row and request 0
LABEL_PT, TEXT_PT = 5.4, 6.2
SIGNED = str.maketrans("-", "−")


@dataclass(frozen=True)
class Example:
    """One row times the latent of request 0: the codes by k, and the sums."""

    codes: pd.DataFrame
    sums: dict[str, Any]

    @property
    def row(self) -> int:
        return self.sums["row"]


def draw(results: Path, device: str) -> Figure:
    """The figure from the newest packing map, on whatever device it was made: bytes lie the same everywhere."""
    run = newest_run(results, "packing_map")
    packing, example = run.table("packing"), _example(run)
    alone = packing[packing["batch"] == BATCHES[0]]
    a, b, d = (words(alone, operand) for operand in "abd")
    figure = plt.figure(figsize=(PAGE_IN, HEIGHT_IN))
    note(figure, _foot(run, example))
    _draw_split(_panel(figure, 0.12, 2.66, 2.9, 1.6), example)
    _draw_a(_panel(figure, 0.42, 0.56, 2.72, 1.68), a, example.row)
    _draw_b(_panel(figure, 3.62, 2.56, 1.36, 1.24), b, packing)
    _draw_d(_panel(figure, 3.62, 0.56, 1.36, 1.68), d, example.row)
    _draw_bytes(_panel(figure, 5.26, 2.56, 1.7, 1.7), a, b, example)
    _draw_sums(_panel(figure, 5.26, 0.56, 1.7, 1.94), d, example)
    return figure


def _example(run: Run) -> Example:
    codes, sums, batches = run.table("plane_codes"), run.table("plane_sums"), set(run.table("packing")["batch"])
    if codes.empty or sums.empty or not batches.issuperset(BATCHES):
        what = f"has batches {sorted(batches)} and {len(codes)} codes; Figure 7 needs batches {list(BATCHES)} and an example"
        raise MissingResults(f"run {run.run_id} {what}", measure_command("packing_map", "cpu"))
    return Example(codes.set_index("k").sort_index(), {str(name): value for name, value in sums.iloc[0].items()})


def _panel(figure: Figure, x: float, y: float, width: float, height: float) -> Axes:
    """A bare panel at these inches of the page; its own units are inches too, from its top left corner down."""
    axes = figure.add_axes((x / PAGE_IN, y / HEIGHT_IN, width / PAGE_IN, height / HEIGHT_IN))
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    return axes


def _draw_a(axes: Axes, of_a: list[Word], row: int) -> None:
    draw_words(axes, of_a, (16, 32))
    for word in of_a:
        if word.row == 0:
            _label(axes, word.column + word.columns / 2, -0.25, _span(word.ks), va="bottom")
    for y in range(16):
        _label(axes, -0.4, y + 0.5, str(y), ha="right", color=ACCENT if y == row else MUTED)
    _label(axes, -0.4, -0.25, "row, k", ha="right", va="bottom")
    for half in (0, 16):
        upper, lower = (_registers(of_a, row, half) for row in (0, 8))
        _label(axes, half + 8, 16.25, f"{_names('a', upper)} above, {_names('a', lower)} below", va="top")
    _title(axes, 0, -1.7, "A", "int8 rows of W2, 16 × 32")
    _frame(axes, 0, row, 32, 1)


def _draw_b(axes: Axes, of_b: list[Word], packing: pd.DataFrame) -> None:
    draw_words(axes, of_b, (32, 8))
    for word in of_b:
        if word.column == 0:
            _label(axes, -0.2, word.row + word.rows / 2, _span(word.ks), ha="right")
        if word.row == 0:
            _label(axes, word.column + 0.5, -0.6, word.plane, va="bottom", color=INK)
    _label(axes, -0.2, -0.6, "k", ha="right", va="bottom")
    for half in (0, 16):
        _label(axes, 8.15, half + 8, _names("b", _registers(of_b, half, 0)), ha="left")
    for place, batch in enumerate(BATCHES):
        rows = packing[(packing["batch"] == batch) & (packing["operand"] == "b")]
        requests = rows.groupby("column")["request"].first()
        y = -5.0 - 3.2 * place
        _label(axes, -0.2, y, f"batch {batch}: request", ha="right", color=INK)
        for pair in range(4):
            copy = requests[2 * pair] in set(requests[: 2 * pair])
            _label(
                axes,
                2 * pair + 1,
                y,
                "copy" if copy else str(requests[2 * pair]),
                color=MUTED if copy else INK,
                gid=f"request {batch} {pair}",
            )
            axes.plot((2 * pair + 0.15, 2 * pair + 1.85), (y + 1.4, y + 1.4), color=INK, linewidth=0.5, clip_on=False)
    _title(axes, 0, -10.2, "B", "int8 planes of u, 32 × 8")
    _frame(axes, 0, 0, 2, 32)


def _draw_d(axes: Axes, of_d: list[Word], row: int) -> None:
    draw_words(axes, of_d, (16, 8))
    for word in of_d:
        if word.row in (0, 15):
            y, va = (-0.25, "bottom") if word.row == 0 else (16.25, "top")
            _label(axes, word.column + 0.5, y, f"d{word.register}", va=va)
    _title(axes, 0, -1.7, "D", "int32 sums, 16 × 8")
    _frame(axes, 0, row, 2, 1)
    axes.plot((2, 9.29), (row + 1, row + 1), color=ACCENT, linewidth=0.8, clip_on=False, zorder=5)


def _draw_split(axes: Axes, example: Example) -> None:
    """One element of the latent on the scale of plane hi, and the step around it on the scale of plane lo."""
    element, scale_lo = example.codes.iloc[0], example.sums["latent_scale"]
    hi, lo, value = int(element["hi"]), int(element["lo"]), float(element["latent"])
    left, width, u = 0.3, 2.42, f"u[{example.codes.index[0]}]"

    def at_hi(code: float) -> float:
        return left + width * (code + 127.5) / 255

    def at_lo(code: float) -> float:
        return left + width * (code + 128.5) / 257

    _heading(axes, "A latent as two int8 planes")
    for name, y, at, codes, marked in (("hi", 0.66, at_hi, range(-127, 128), hi), ("lo", 1.16, at_lo, range(-128, 128), lo)):
        axes.vlines([at(code) for code in codes], y - 0.045, y, color=INK, linewidth=0.25)
        axes.plot((at(codes[0]), at(codes[-1])), (y, y), color=INK, linewidth=0.6)
        axes.vlines(at(marked), y - 0.1, y + 0.03, color=ACCENT, linewidth=1.2, gid=f"marked {name}")
        _label(axes, left - 0.06, y - 0.02, name, ha="right", color=INK)
        for code in (codes[0], -64, 0, 64, codes[-1]):
            _label(axes, at(code), y + 0.05, _signed(code), va="top")
    zoom = [(at_hi(hi - 0.5), 0.66), (at_hi(hi + 0.5), 0.66), (at_lo(127.5), 1.11), (at_lo(-128.5), 1.11)]
    axes.add_patch(Polygon(zoom, facecolor=ACCENT, alpha=0.12, linewidth=0))
    _label(axes, left, 0.3, f"$s_{{hi}}$ = max|u| / 127 = {256 * scale_lo:.4g}", ha="left", color=INK)
    _label(axes, at_hi(hi), 0.54, f"{u} = {_signed(value, '.5f')}:  hi = {_signed(hi)}", va="bottom", color=ACCENT)
    _label(axes, at_lo(lo), 1.04, f"lo = {_signed(lo)}", va="bottom", color=ACCENT)
    back = f"{u} ≈ $s_{{lo}}$ (256 · {_signed(hi)} {_added(lo)}) = {_signed(scale_lo * (256 * hi + lo), '.5f')}"
    _label(axes, left, 1.44, f"$s_{{lo}}$ = $s_{{hi}}$ / 256:  {back}", ha="left", color=INK)


def _draw_bytes(axes: Axes, of_a: list[Word], of_b: list[Word], example: Example) -> None:
    """The bytes of the example's first words: what the lanes hold."""
    held = next(word for word in of_a if (word.row, word.column) == (example.row, 0))
    pair = [next(word for word in of_b if (word.row, word.column) == (0, column)) for column in (0, 1)]
    _heading(axes, f"Row {example.row} × request 0: first bytes")
    table = [(f"a{held.register}, lane {held.lane}", held, "code"), *((f"b{w.register}, lane {w.lane}", w, w.plane) for w in pair)]
    for place, (name, word, plane) in enumerate(table):
        y = 0.48 + 0.19 * place
        _chip(axes, 0, y, word)
        axes.text(0.13, y, name, fontsize=TEXT_PT, va="center")
        for column, k in enumerate(word.ks):
            right = 0.95 + 0.24 * column
            axes.text(right, y, _signed(int(example.codes[plane][k])), fontsize=TEXT_PT, ha="right", va="center")
            if place == 0:
                _label(axes, right, 0.29, f"k={k}", ha="right")
    steps = len(example.codes) // sum(word.columns for word in of_a if word.row == 0)
    lines = (
        "Each instruction adds 32 products",
        "to the sum of plane hi and 32 to",
        f"that of plane lo; {steps} instructions",
        f"cover r = {len(example.codes)}.",
    )
    for place, line in enumerate(lines):
        axes.text(0, 1.14 + 0.15 * place, line, fontsize=TEXT_PT, va="center")


def _draw_sums(axes: Axes, of_d: list[Word], example: Example) -> None:
    """From the two accumulators of a thread to the logit."""
    sums = example.sums
    hi, lo = (next(word for word in of_d if (word.row, word.column) == (example.row, column)) for column in (0, 1))
    exact = float((example.codes["weight"] * example.codes["latent"]).sum())
    _heading(axes, f"The sums of lane {hi.lane}")
    lines = (
        f"d{hi.register} = row · hi = {_signed(sums['hi_sum'], ',')}",
        f"d{lo.register} = row · lo = {_signed(sums['lo_sum'], ',')}",
        f"x = 256 d{hi.register} + d{lo.register} = {_signed(sums['sum'], ',')}",
        f"bias = ($s_w$ $s_{{lo}}$) x = {_signed(sums['bias'], '.4f')}",
        f"logit = bf16({_signed(sums['base'], 'g')} {_added(sums['bias'], '.4f')})",
        f"       = {_signed(sums['logit'], '.4f')}, one bf16 rounding",
    )
    for place, line in enumerate(lines):
        axes.text(0.13, 0.36 + 0.2 * place, line, fontsize=TEXT_PT, va="center")
    _chip(axes, 0, 0.36, hi)
    _chip(axes, 0, 0.56, lo)
    axes.plot((-0.06, -0.06), (0.3, 1.42), color=ACCENT, linewidth=0.8, clip_on=False)
    _label(axes, 0.13, 1.59, f"$s_w$ = {sums['weight_scale']:.4g}, $s_{{lo}}$ = {sums['latent_scale']:.4g}", ha="left")
    _label(axes, 0.13, 1.73, f"bias before int8: {_signed(exact, '.4f')}", ha="left")


def _foot(run: Run, example: Example) -> str:
    sums = example.sums
    return (
        "One mma.sync.m16n8k32 (k-step 0) as packed. Numbers are lanes, colours the threads of a quad, pale is plane lo. A and B only have to agree on the order "
        "of k: here a lane's 16-byte chunk of u serves two instructions. At batch 1 six columns are copies, so that each thread of a quad can "
        "settle another tile. "
        f"W2 of {sums['head']} (V = {sums['vocab']:,}), u = W1[{sums['previous']}]. Run {run.run_id}."
    )


def _heading(axes: Axes, text: str) -> None:
    axes.text(0, 0.09, text, fontsize=TEXT_PT, va="bottom", weight="bold")


def _chip(axes: Axes, x: float, y: float, word: Word) -> None:
    """A small square in the colour of `word`."""
    axes.add_patch(Rectangle((x, y - 0.045), 0.09, 0.09, facecolor=color(word), linewidth=0))


def _registers(of_operand: list[Word], row: int, column: int) -> set[int]:
    """The registers of the words that begin in the 8 rows, or 16 of B, and 16 columns from there on."""
    return {word.register for word in of_operand if row <= word.row < row + 8 and column <= word.column < column + 16}


def _names(operand: str, registers: set[int]) -> str:
    return ", ".join(f"{operand}{register}" for register in sorted(registers))


def _title(axes: Axes, x: float, y: float, name: str, text: str) -> None:
    axes.text(x, y, rf"$\bf{{{name}}}$  {text}", fontsize=TEXT_PT, va="bottom")


def _label(
    axes: Axes, x: float, y: float, text: str, ha: str = "center", va: str = "center", color: str = MUTED, gid: str | None = None
) -> None:
    axes.text(x, y, text, fontsize=LABEL_PT, ha=ha, va=va, color=color, gid=gid)


def _frame(axes: Axes, x: float, y: float, width: float, height: float) -> None:
    """The example's share of an operand."""
    axes.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=ACCENT, linewidth=1.1, clip_on=False, zorder=5))


def _span(ks: tuple[int, ...]) -> str:
    return f"{ks[0]}–{ks[-1]}" if ks == tuple(range(ks[0], ks[-1] + 1)) else ",".join(map(str, ks))


def _signed(value: float, form: str = "") -> str:
    return format(value, form).translate(SIGNED)


def _added(value: float, form: str = "") -> str:
    """A number as the second term of a sum."""
    return f"{'−' if value < 0 else '+'} {format(abs(value), form)}"
