"""The registers of a warp that hold one operand of a tensor-core instruction, and how they look."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

THREADS = ("#f2b950", "#8fc7ea", "#72c3a5", "#dfa7c6")  # of a quad
CELL_PT = 4.8


@dataclass(frozen=True)
class Word:
    """The elements that one register of one lane holds, as a rectangle of its operand; `ks` are the k of W2 and of the latent in it."""

    lane: int
    register: int
    row: int
    column: int
    rows: int
    columns: int
    ks: tuple[int, ...]
    plane: str


def words(packing: pd.DataFrame, operand: str) -> list[Word]:
    """The registers of all lanes at the first k-step of `operand` ("a", "b" or "d")."""
    rows = packing[(packing["operand"] == operand) & (packing["k_step"] <= 0)].sort_values(["lane", "register", "byte"])
    found = []
    for _, held in rows.groupby(["lane", "register"]):
        first, last = held.iloc[0], held.iloc[-1]
        row, column = int(first["row"]), int(first["column"])
        size = int(last["row"]) - row + 1, int(last["column"]) - column + 1
        ks = tuple(int(k) for k in held["k"])
        found.append(Word(int(first["lane"]), int(first["register"]), row, column, *size, ks, str(first["plane"])))
    return found


def draw_words(axes: Axes, of_operand: list[Word], shape: tuple[int, int]) -> None:
    """A rectangle a register: its colour says which thread of a quad holds it, its number which lane. Plane lo is paler."""
    axes.set_xlim(0, shape[1])
    axes.set_ylim(shape[0], 0)
    for word in of_operand:
        at, place = (word.column, word.row), f"{word.lane} {word.register}"
        axes.add_patch(Rectangle(at, word.columns, word.rows, facecolor=color(word), edgecolor="white", linewidth=0.6, gid=place))
        center = (word.column + word.columns / 2, word.row + word.rows / 2)
        axes.annotate(str(word.lane), center, (0, -0.3), textcoords="offset points", fontsize=CELL_PT, ha="center", va="center")
    for word in of_operand:  # a gap where the next register of the same lanes begins
        if word.row == shape[0] // 2:
            axes.plot((word.column, word.column + word.columns), (word.row, word.row), color="white", linewidth=1.8)
        if word.column == shape[1] // 2 and word.columns > 1:
            axes.plot((word.column, word.column), (word.row, word.row + word.rows), color="white", linewidth=1.8)


def color(word: Word) -> tuple[float, float, float]:
    """The thread's colour; pale in plane lo."""
    share = 0.6 if word.plane == "lo" else 0.0
    red, green, blue = (channel + (1 - channel) * share for channel in to_rgb(THREADS[word.lane % 4]))
    return red, green, blue
