"""Claims answered from the records: our value with its interval, beside the paper's, with a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.acceptance import acceptance_rows, compare, fewest_identical
from analysis.anatomy import EXPERIMENT as ANATOMY
from analysis.bootstrap import Estimate
from analysis.breakdown import part_cost
from analysis.certified import dispatch_ratio, family, proved_share, round_median
from analysis.claim import ACCEPTANCE, CERTIFIED, Book, Claim, Query, Verdict
from analysis.equivalence import Equivalence
from analysis.latency import median_time, sampling_cost, speedup
from analysis.load import Run, all_runs
from analysis.quantization import EXPERIMENT as QUANTIZATION
from analysis.quantization import relative_error
from analysis.slope import fit, medians

_NO_CHANGE = {Equivalence.EQUIVALENT: Verdict.REPRODUCED, Equivalence.UNDECIDED: Verdict.UNDECIDED}
Records = Mapping[str, Sequence[Run]]  # by experiment, the newest run first


@dataclass(frozen=True)
class Answer:
    """A claim and what our records say. `ours` is None where nothing answers it; `reason` then says why."""

    claim: Claim
    verdict: Verdict
    ours: Estimate | None = None
    run: Run | None = field(default=None, compare=False, repr=False)
    reason: str = ""

    @property
    def run_id(self) -> str:
        return self.run.run_id if self.run else ""

    @property
    def hardware(self) -> str:
        return self.run.hardware if self.run else ""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's; None for a change near 0, whose ratio says nothing."""
        return self.ours.value / self.claim.value if self.ours and self.claim.value and not self.claim.interval else None

    def as_json(self) -> dict[str, Any]:
        """The answer as plain values; numbers that do not exist are null."""
        ours = self.ours
        return {
            "id": self.claim.id,
            "source": self.claim.source,
            "where": self.claim.where,
            "paper": self.claim.value,
            "ours": ours.value if ours else None,
            "interval": [ours.low, ours.high] if ours and not np.isnan(ours.low) else None,
            "unit": self.claim.unit,
            "ratio": self.ratio,
            "verdict": str(self.verdict),
            "run_id": self.run_id or None,
            "hardware": {"paper": self.claim.hardware, "ours": self.hardware or None},
            "goal": self.claim.goal,
            "goal_met": self.claim.goal_met(ours.value) if ours else None,
            "note": self.reason or self.claim.note,
        }


def all_records(book: Book, root: Path) -> Records:
    """Every run that may answer a claim of the book or stands in a table of its own; experiments without one are left out."""
    names = sorted({ANATOMY} | {name for claim in book.claims if claim.query for name in claim.query.experiments})
    found = {name: all_runs(root, name, _device(name, book)) for name in names}
    return {name: runs for name, runs in found.items() if runs}


def answer_all(book: Book, records: Records) -> list[Answer]:
    """Every claim of the book with its verdict, in the book's order."""
    by_id = {claim.id: claim for claim in book.claims}
    return [_answer(claim, by_id, book, records) for claim in book.claims]


def cited(answers: Iterable[Answer]) -> list[Run]:
    """The runs that answer at least one claim, each once."""
    return list({answer.run.path: answer.run for answer in answers if answer.run}.values())


def run_for(query: Query, records: Records) -> Run | None:
    """The newest run that has the query's cells, of the first experiment that has such a run."""
    runs = (run for name in query.experiments for run in records.get(name, ()))
    if query.measure in CERTIFIED:  # a run may have been asked for times or for shares only
        runs = (run for run in runs if query.table in run.tables and query.inputs in ("", family(run)))
    return next((run for run in runs if all(_has(run.table(query.table), cell) for cell in query.cells)), None)


def measure(query: Query, run: Run) -> Estimate | None:
    """Our value for `query` in `run`, with its interval over replicas (of errors over heads, of rounds over sets of inputs); None where the run does not have it."""
    if query.measure == "relative_error":
        return relative_error(run, matrix=query.matrix, form=query.variant, tokens=query.tokens, over="".join(query.against))
    if query.measure == "round_median":
        return round_median(run, query.variant, query.cells[0])
    if query.measure == "dispatch_ratio":
        return dispatch_ratio(run, query.variant, query.cells[0])
    if query.measure == "proved_share":
        return proved_share(run, query.cells[0], query.steps)
    samples = run.table("samples")
    if query.measure == "median":
        return median_time(samples, query.variant, **query.samples)
    if query.measure == "ratio":
        return speedup(samples, query.variant, query.against, **query.samples)
    if query.measure == "sampling":
        return sampling_cost(samples, query.variant, **query.samples)
    if query.measure == "part":
        return part_cost(samples, query.variant, query.against[0], **query.samples)
    points = medians(samples, variant=query.variant, **query.samples)
    if len(points.columns) < 2:
        return None
    fitted = fit(points)
    return fitted.slope_us if query.measure == "slope" else fitted.entry_us


def _answer(claim: Claim, by_id: Mapping[str, Claim], book: Book, records: Records) -> Answer:
    if claim.hardware not in book.measurable:
        return Answer(claim, Verdict.OTHER_HARDWARE)
    if claim.query is None:
        return Answer(claim, Verdict.NOT_MEASURED)
    run = run_for(claim.query, records)
    if run is None:
        asked = " or ".join(f"{name} on device={_device(name, book) or 'any'}" for name in claim.query.experiments)
        return Answer(claim, Verdict.NOT_MEASURED, reason=f"no run of experiment={asked} has this cell")
    if claim.query.measure == "greedy_identity":
        return _identity(claim, claim.query, [run for name in claim.query.experiments for run in records.get(name, ())])
    if claim.query.measure in ACCEPTANCE:
        return _of_acceptance(claim, claim.query, run)
    ours = measure(claim.query, run)
    if ours is None:
        return Answer(claim, Verdict.NOT_MEASURED, reason=f"run {run.run_id} has no such samples")
    below = by_id[claim.above].query if claim.above else None
    under = run_for(below, records) if below else None
    floor = measure(below, under) if below and under else None
    return Answer(claim, claim.judge(ours, floor), ours, run)


def _device(experiment: str, book: Book) -> str | None:
    """Whose runs of `experiment` answer; None where every device gives the same numbers."""
    return None if experiment == QUANTIZATION else book.device


def _of_acceptance(claim: Claim, query: Query, run: Run) -> Answer:
    """Whether acceptance is tied with the default's."""
    table = acceptance_rows(run)
    rows = table[_where(table, query.cells[0])]
    pairs = sorted(rows["pair"].unique())
    if len(pairs) > 1:
        return Answer(claim, Verdict.NOT_MEASURED, reason=f"run {run.run_id} has the pairs {', '.join(pairs)}; name one in the query")
    found = compare(run, rows, query.variant, query.against[0])
    if found is None:
        return Answer(claim, Verdict.NOT_MEASURED, reason=f"run {run.run_id} has no such rows")
    # A change for the better is no tie either, but nobody would call it short.
    otherwise = Verdict.BETTER if (found.change.value > 0) == (claim.better == "higher") else Verdict.SHORT
    reason = f"{found.verdict} with {found.change.clusters} prompts; {found.needed_words} would show that nothing changes"
    return Answer(
        claim, _NO_CHANGE.get(found.verdict, otherwise), found.change.wide, run, reason if found.verdict == Equivalence.UNDECIDED else ""
    )


def _identity(claim: Claim, query: Query, runs: Sequence[Run]) -> Answer:
    """Whether all greedy texts are the default's, whatever the length and the batch."""
    worst = fewest_identical(runs, query.variant, query.against[0], query.pair)
    if worst is None:
        return Answer(claim, Verdict.NOT_MEASURED, reason="no run has greedy texts of both arms")
    found, run = worst.identity, worst.run
    if found.prompts != claim.value:
        return Answer(
            claim, Verdict.NOT_MEASURED, reason=f"run {run.run_id} has {found.same} of {found.prompts} prompts, not of {claim.value:g}"
        )
    ours = Estimate(found.same, float("nan"), float("nan"))
    return Answer(claim, claim.judge(ours), ours, run)


def _has(cells: pd.DataFrame, cell: Mapping[str, object]) -> bool:
    return bool(_where(cells, cell).any())


def _where(rows: pd.DataFrame, cell: Mapping[str, object]) -> pd.Series:
    return pd.Series(np.logical_and.reduce([rows[column] == value for column, value in cell.items()]), rows.index)
