"""What 8-bit formats lose of a head, from the runs of `quantization`: errors of weights and bias, tokens that change, magnitudes of weights."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.bootstrap import Estimate
from analysis.load import Run

EXPERIMENT = "quantization"
TRAINED = "checkpoint"  # what the column `weights` says of a head that was trained; the other word is `synthetic`
_MATRICES = {"w2": "W2", "w1": "W1", "latent": "latents", "bias": "bias"}
_COLUMNS = {"int8": "int8", "e4m3": "e4m3", "e5m2": "e5m2", "int8_one_plane": "int8, one plane", "int8_two_planes": "int8, two planes"}


def run_of(runs: Sequence[Run]) -> Run | None:
    """The first of `runs`, which come newest first, whose heads are trained; the newest where none is; None where there is no run."""
    return next((run for run in runs if (run.table("quantization")["weights"] == TRAINED).any()), next(iter(runs), None))


def relative_error(run: Run, *, matrix: str, form: str, tokens: str = "", over: str = "") -> Estimate | None:
    """The relative error of trained heads in per cent, or with `over` its ratio to that of the format `over`, in the same head.

    The value is the mean over the heads of the run. Its interval is no confidence interval: it ends at the least and the greatest head's
    value, and does not exist for one head. None where the run has no such error.
    """
    found = _by_head(run, matrix, form, tokens)
    values = found / _by_head(run, matrix, over, tokens) if over else 100 * found
    values = values.dropna()
    if values.empty:
        return None
    ends = (float(values.min()), float(values.max())) if len(values) > 1 else (float("nan"), float("nan"))
    return Estimate(float(values.mean()), *ends)


def error_table(run: Run | None) -> str:
    """A Markdown table: a row for every head, matrix and kind of tokens, with the error of every format and e4m3's over int8's."""
    if run is None:
        return "Not measured yet."
    table = run.table("quantization")
    rows = [f"| head | of | {', % | '.join(_COLUMNS.values())}, % | e4m3 / int8 |", "|---|---|" + "---|" * (len(_COLUMNS) + 1)]
    for (head, weights, matrix, tokens), of in table.groupby(["head", "weights", "matrix", "tokens"], sort=False):
        error = of.set_index("format")["relative_error"]
        what = f"{_MATRICES[str(matrix)]}, {of['count'].iloc[0]:,} {tokens} tokens" if tokens else _MATRICES[str(matrix)]
        name = f"`{head}`" if weights == TRAINED else f"`{head}` (random weights)"
        shown = [f"{100 * error[form]:.3g}" if form in error else "" for form in _COLUMNS]
        ratio = f"{error['e4m3'] / error['int8']:.2f}" if {"e4m3", "int8"} <= set(error.index) else ""
        rows.append(f"| {name} | {what} | {' | '.join(shown)} | {ratio} |")
    return "\n".join(rows)


def flip_table(run: Run | None) -> str:
    """A Markdown table: of all steps of every head, how many choose another token under each format."""
    if run is None:
        return "Not measured yet."
    rows = [f"| head | inputs | steps | {', % | '.join(_COLUMNS.values())}, % |", "|---|---|---|" + "---|" * len(_COLUMNS)]
    for (head, inputs), of in run.table("argmax_flips").groupby(["head", "inputs"], sort=False):
        sums = of.groupby("format")[["walks", "flips"]].sum()
        shown = [f"{100 * sums['flips'][form] / sums['walks'][form]:.2f}" if form in sums.index else "" for form in _COLUMNS]
        rows.append(f"| `{head}` | {inputs} | {sums['walks'].max():,} | {' | '.join(shown)} |")
    return "\n".join(rows)


def magnitude_band(run: Run) -> pd.DataFrame:
    """By magnitude |w| / row's largest: columns low, median and high, over heads, of the share of W2's elements at or below it."""
    shares = run.table("magnitudes").groupby("magnitude")["share"]
    return pd.DataFrame({"low": shares.min(), "median": shares.median(), "high": shares.max()}).sort_index()


def _by_head(run: Run, matrix: str, form: str, tokens: str) -> pd.Series:
    table = run.table("quantization")
    chosen = (table["weights"] == TRAINED) & (table["matrix"] == matrix) & (table["format"] == form) & (table["tokens"] == tokens)
    return table[chosen].set_index("head")["relative_error"]
