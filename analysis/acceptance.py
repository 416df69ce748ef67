"""How many tokens a target takes of a draft: every arm against the default, from the runs of `acceptance`.

Acceptance length is tokens a round: what the target accepted and the one that it adds. An arm's is sum(tokens) / sum(rounds) over prompts and
passes. Of sampled rounds a record may also say how many tokens were expected to pass, given the draft; they count then, for their mean is the same and
their variance a fifth. It may say so too of drafts that the other arms made in the rounds of an arm's text: then two arms are compared over the rounds of both
texts, each round with a draft of either, since texts differ more than arms. A prompt is drawn whole by the bootstrap (analysis/clusters.py). The change is then tested for equivalence with the margin MARGIN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.clusters import RatioChange, ratio_change
from analysis.equivalence import Equivalence, clusters_needed, equivalence
from analysis.latency import DEFAULT
from analysis.load import AGAIN, InvalidRun, Run

EXPERIMENT = "acceptance"
MARGIN = 0.5  # %: a shorter or longer acceptance length within it costs or gains less than a round in 200
POOLED = 0  # as a batch: all batches together, as the paper's Figure 15 pools over concurrency
_NAMED = ["pair", "steps", "temperature", "batch"]
_RUNS = ["batch", "pass", "prompt"]  # what names a row of one arm in a cell


@dataclass(frozen=True, order=True)
class Cell:
    """What is compared: a pair of target and drafter, steps (γ), temperature, and batch (the concurrency), or POOLED."""

    pair: str
    steps: int
    temperature: float
    batch: int


@dataclass(frozen=True)
class Identity:
    """How many prompts have one and the same text in both arms and in all passes, batch by batch: the target's matrix products are rounded otherwise
    in another shape."""

    same: int
    prompts: int


@dataclass(frozen=True)
class Comparison:
    """An arm against the default in a cell.

    lengths: tokens a round of the default and of the arm
    change:  of that length, in %
    needed:  prompts with which the change would be equivalent
    batches: what is pooled
    """

    run: Run
    lengths: tuple[float, float]
    change: RatioChange
    verdict: Equivalence
    needed: float
    identity: Identity
    sources: int
    batches: tuple[int, ...]

    @property
    def needed_words(self) -> str:
        return "no number" if math.isinf(self.needed) else f"{self.needed:,.0f}"


def comparisons(runs: Sequence[Run], *, default: str = DEFAULT) -> dict[Cell, dict[str, Comparison]]:
    """Every arm of every cell, batches pooled too, from the newest run that has the arm and the default there: pass `all_runs`, the newest first.

    Raises:
        InvalidRun: a record that contradicts itself.
    """
    found: dict[Cell, dict[str, Comparison]] = {}
    for run in runs:
        for cell, rows in _cells(acceptance_rows(run)).items():
            known = found.setdefault(cell, {})
            arms = [str(arm) for arm in rows["variant"].unique() if arm != default and arm not in known]
            compared = {arm: compare(run, rows, arm, default) for arm in arms}
            known |= {arm: each for arm, each in compared.items() if each}
    return dict(sorted(found.items()))


def compare(run: Run, rows: pd.DataFrame, variant: str, default: str = DEFAULT) -> Comparison | None:
    """`variant` against `default` over `rows` of the table `acceptance`, those of one pair, length and temperature. None where an arm is missing.

    Raises:
        InvalidRun: one arm lacks a prompt or a pass of the other.
    """
    arms = _paired(run, rows, variant, default)
    if arms is None:
        return None
    ours, theirs = (_sums(arm) for arm in _beside(run, arms, (variant, default)))
    change = ratio_change(ours, theirs)
    length, of_default = (float(tokens / rounds) for tokens, rounds in (ours.sum(axis=0), theirs.sum(axis=0)))
    batches = tuple(sorted({int(batch) for batch in rows["batch"]}))
    verdict, needed, sources = equivalence(change, MARGIN), clusters_needed(change, MARGIN), arms[0]["source"].nunique()
    return Comparison(run, (of_default, length), change, verdict, needed, _identity(arms), sources, batches)


def fewest_identical(runs: Sequence[Run], variant: str, default: str = DEFAULT, pair: str = "") -> Comparison | None:
    """Of all greedy cells, each from its newest run, the one with the smallest share of identical texts; None without any. pair: of the others none."""
    greedy = [
        arms[variant]
        for cell, arms in comparisons(runs, default=default).items()
        if cell.temperature == 0 and cell.batch != POOLED and variant in arms and pair in ("", cell.pair)
    ]
    return min(greedy, key=lambda each: each.identity.same / each.identity.prompts, default=None)


def positions(run: Run, cell: Cell) -> dict[str, NDArray[np.float64]]:
    """Of every arm, [steps] the share of tokens at a position of the draft that the target accepts, where it accepted all earlier ones.

    NaN at a position that was never offered.

    Raises:
        InvalidRun: positions that do not add up to the table `acceptance`.
    """
    places, prompts = _of_cell(run.table("acceptance_positions"), cell), _of_cell(acceptance_rows(run), cell)
    found = {}
    for arm in prompts["variant"].unique():
        counts = places[places["variant"] == arm].groupby("position")[["offered", "accepted"]].sum()
        offered, accepted = ([int(count) for count in counts[name]] for name in ("offered", "accepted"))
        rounds, whole = (int(prompts.loc[prompts["variant"] == arm, name].sum()) for name in ("rounds", "accepted"))
        if list(counts.index) != list(range(cell.steps)) or offered != [rounds, *accepted[:-1]] or sum(accepted) != whole:
            raise InvalidRun(
                f"{run.path}: {arm} has {rounds} rounds and {whole} tokens accepted in acceptance ({cell}), but at the positions {list(counts.index)} "
                f"acceptance_positions offers {offered} and accepts {accepted}, which do not follow from one another; {AGAIN}."
            )
        found[str(arm)] = np.array([taken / of if of else np.nan for taken, of in zip(accepted, offered, strict=True)])
    return found


def acceptance_rows(run: Run) -> pd.DataFrame:
    """The table `acceptance`, checked.

    Raises:
        InvalidRun: a row stated twice, or one whose counts contradict each other.
    """
    rows = _with_lengths(run, run.table("acceptance"))
    wrong = rows[
        (rows["rounds"] <= 0)
        | ~rows["accepted"].between(0, rows["drafted"])
        | (rows["drafted"] != rows["rounds"] * rows["steps"])
        | (rows["tokens"] != rows["accepted"] + rows["rounds"])
    ]
    if len(wrong):
        first = wrong.iloc[0][["variant", "prompt", "steps", "rounds", "drafted", "accepted", "tokens"]].to_dict()
        raise InvalidRun(f"{run.path}: {len(wrong)} rows of acceptance cannot be counts of whole rounds (first: {first}); {AGAIN}.")
    twice = rows[rows.duplicated(["variant", *_NAMED, "pass", "prompt"])]
    if len(twice):
        first = twice.iloc[0][["variant", *_NAMED, "pass", "prompt"]].to_dict()
        raise InvalidRun(f"{run.path}: acceptance states a prompt of an arm twice (first: {first}); {AGAIN}.")
    return rows


def _with_lengths(run: Run, rows: pd.DataFrame) -> pd.DataFrame:
    """With a column `length`, the tokens that count: expected ones and the target's own where the record has them, else those that were decoded."""
    if "acceptance_expected" not in run.tables:
        return rows.assign(length=rows["tokens"].astype(float))
    key = ["variant", *_NAMED, "pass", "prompt"]
    expected = run.table("acceptance_expected")[[*key, "expected"]]
    if len(twice := expected[expected.duplicated(key)]):
        raise InvalidRun(
            f"{run.path}: acceptance_expected states a prompt of an arm twice (first: {twice.iloc[0][key].to_dict()}); {AGAIN}."
        )
    joined = rows.merge(expected, on=key, how="left")
    wrong = joined[(joined["temperature"] > 0) & ~joined["expected"].between(0, joined["drafted"])]
    if len(wrong):
        first = wrong.iloc[0][["variant", "prompt", "steps", "drafted", "expected"]].to_dict()
        raise InvalidRun(f"{run.path}: {len(wrong)} rows of acceptance have no expected tokens that could be (first: {first}); {AGAIN}.")
    return joined.assign(length=(joined["expected"] + joined["rounds"]).fillna(joined["tokens"]))


def acceptance_table(found: Mapping[Cell, Mapping[str, Comparison]]) -> str:
    """A Markdown table: acceptance lengths, the change with both intervals, the verdict, prompts, identical greedy texts."""
    rows = [
        "| pair, γ, T, concurrency | arm | default, tokens a round | arm | change, %, 95 % interval | 90 % interval | verdict | prompts | needed | same text |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    compared = [(cell, arm, each) for cell, arms in found.items() for arm, each in arms.items()]
    if not compared:
        return "Not measured yet."
    rows += [_row(cell, arm, each) for cell, arm, each in compared if cell.batch != POOLED or len(each.batches) > 1]
    return "\n".join([*rows, "", f"- equivalent: the 90 % interval lies within ±{MARGIN:g} %. needed: prompts with which it would."])


def positions_table(run: Run, cell: Cell) -> str:
    """A Markdown table: the share accepted at every position, an arm a row."""
    rows = [
        f"| accepted at position, % | {' | '.join(str(place + 1) for place in range(cell.steps))} |",
        "|---|" + "---|" * cell.steps,
    ]
    for arm, shares in positions(run, cell).items():
        entries = ["never offered" if np.isnan(share) else f"{100 * share:.1f}" for share in shares]
        rows.append(f"| `{arm}` | {' | '.join(entries)} |")
    return "\n".join(rows)


def _cells(rows: pd.DataFrame) -> dict[Cell, pd.DataFrame]:
    """The rows of every cell; POOLED ones before their parts."""
    found: dict[Cell, pd.DataFrame] = {}
    for first in rows[_NAMED].drop_duplicates().itertuples(index=False):
        pair, steps, temperature, batch = first
        for each in (POOLED, int(batch)):
            cell = Cell(str(pair), int(steps), float(temperature), each)
            if cell not in found:
                found[cell] = _of_cell(rows, cell)
    return dict(sorted(found.items()))


def _of_cell(rows: pd.DataFrame, cell: Cell) -> pd.DataFrame:
    inside = (rows["pair"] == cell.pair) & (rows["steps"] == cell.steps) & (rows["temperature"] == cell.temperature)
    return rows[inside if cell.batch == POOLED else inside & (rows["batch"] == cell.batch)]


def _paired(run: Run, rows: pd.DataFrame, variant: str, default: str) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """The rows of the arm and of the default, of the same batches, passes and prompts in the same order. None where one has none."""
    ours, theirs = (rows[rows["variant"] == arm].sort_values(_RUNS) for arm in (variant, default))
    if ours.empty or theirs.empty:
        return None
    if not np.array_equal(ours[_RUNS].to_numpy(), theirs[_RUNS].to_numpy()):
        raise InvalidRun(
            f"{run.path}: {variant} has {len(ours)} rows and {default} {len(theirs)}, not of the same batches, passes and prompts; {AGAIN}."
        )
    return ours, theirs


def _beside(run: Run, arms: tuple[pd.DataFrame, pd.DataFrame], names: tuple[str, str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of both arms, each with those of its drafts in the other's rounds, where the record has them.

    Raises:
        InvalidRun: they are not of the other's rounds.
    """
    if "acceptance_beside" not in run.tables or (arms[0]["temperature"] <= 0).all():
        return arms
    table, both = run.table("acceptance_beside"), list[pd.DataFrame]()
    for own, other, name, text in ((arms[0], arms[1], *names), (arms[1], arms[0], *reversed(names))):
        drafts = table[(table["variant"] == name) & (table["text"] == text)]
        joined = other[[*_NAMED, "pass", "prompt", "rounds"]].merge(
            drafts, on=[*_NAMED, "pass", "prompt"], how="left", suffixes=("", "_beside")
        )
        wrong = joined[(joined["rounds_beside"] != joined["rounds"]) | ~joined["expected"].between(0, joined["rounds"] * joined["steps"])]
        if len(wrong) or len(joined) != len(other):
            raise InvalidRun(
                f"{run.path}: acceptance_beside has not one draft of {name} for every round of {text}: {len(joined)} prompts and {len(other)} in acceptance, "
                f"{len(wrong)} with other rounds or more than was drafted; {AGAIN}."
            )
        both.append(pd.concat([own, joined.assign(length=joined["expected"] + joined["rounds"])]))
    return both[0], both[1]


def _identity(arms: Sequence[pd.DataFrame]) -> Identity:
    texts = pd.concat(arms).groupby(["prompt", "batch"])["text_sha256"].nunique().groupby("prompt").max()
    return Identity(int((texts == 1).sum()), len(texts))


def _sums(arm: pd.DataFrame) -> NDArray[np.float64]:
    """[prompts, 2] tokens that count and rounds of every prompt, over passes and batches, in the order of prompts."""
    return arm.groupby("prompt")[["length", "rounds"]].sum().to_numpy(dtype=np.float64)


def _row(cell: Cell, arm: str, each: Comparison) -> str:
    change, place = each.change, "all" if cell.batch == POOLED else str(cell.batch)
    narrow = "none" if np.isnan(change.narrow.low) else f"[{change.narrow.low:+.2f}, {change.narrow.high:+.2f}]"
    same = f"{each.identity.same} of {each.identity.prompts}" if cell.temperature == 0 else ""
    return (
        f"| {cell.pair}, {cell.steps}, {cell.temperature:g}, {place} | `{arm}` | {each.lengths[0]:.3f} | {each.lengths[1]:.3f} | {change.wide:+.2f} | {narrow} "
        f"| {each.verdict} | {change.clusters} | {each.needed_words} | {same} |"
    )
