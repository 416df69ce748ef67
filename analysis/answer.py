"""Claims answered from the records: our value with its interval, beside the paper's, with a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.bootstrap import Estimate, bootstrap, median, median_ratio
from analysis.claim import Book, Claim, Query, Verdict
from analysis.load import MissingResults, Run, newest_run
from analysis.slope import fit, medians


@dataclass(frozen=True)
class Answer:
    """A claim and what our records say. `ours` is None where nothing answers it; `reason` then says why."""

    claim: Claim
    verdict: Verdict
    ours: Estimate | None = None
    run_id: str = ""
    hardware: str = ""
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        return self.ours.value / self.claim.value if self.ours and self.claim.value else None

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


def newest_runs(book: Book, root: Path) -> dict[str, Run]:
    """The newest run of every experiment that a claim asks for, where there is one."""
    runs = {}
    for experiment in sorted({claim.query.experiment for claim in book.claims if claim.query}):
        try:
            runs[experiment] = newest_run(root, experiment, book.device)
        except MissingResults:
            continue
    return runs


def answer_all(book: Book, runs: Mapping[str, Run]) -> list[Answer]:
    """Every claim of the book with its verdict, in the book's order."""
    by_id = {claim.id: claim for claim in book.claims}
    return [_answer(claim, by_id, book, runs) for claim in book.claims]


def measure(query: Query, run: Run) -> Estimate | None:
    """Our value for `query` in `run`, with its interval over replicas; None where the run did not time it."""
    samples = run.table("samples")
    points = medians(samples, **query.cell())
    if query.measure in ("slope", "entry"):
        if len(points.columns) < 2:
            return None
        fitted = fit(points)
        return fitted.slope_us if query.measure == "slope" else fitted.entry_us
    arms = [query.variant, *query.against] if query.measure == "ratio" else [query.variant]
    columns = [medians(samples, **query.cell(arm)).get(query.steps) for arm in arms]
    present = [column for column in columns if column is not None]
    if columns[0] is None or (query.measure == "ratio" and len(present) < len(columns)):
        return None
    # A ratio compares the arms of one process: a replica in which one of them is missing says nothing.
    paired = pd.concat(present, axis=1, join="inner").dropna().to_numpy(dtype=np.float64)
    if not len(paired):
        return None
    return bootstrap(paired, median_ratio) if query.measure == "ratio" else bootstrap(paired[:, 0], median)


def _answer(claim: Claim, by_id: Mapping[str, Claim], book: Book, runs: Mapping[str, Run]) -> Answer:
    if claim.hardware not in book.measurable:
        return Answer(claim, Verdict.OTHER_HARDWARE)
    if claim.query is None:
        return Answer(claim, Verdict.NOT_MEASURED)
    run = runs.get(claim.query.experiment)
    if run is None:
        return Answer(claim, Verdict.NOT_MEASURED, reason=f"no run of experiment={claim.query.experiment} on device={book.device}")
    ours = measure(claim.query, run)
    if ours is None:
        return Answer(claim, Verdict.NOT_MEASURED, reason=f"run {run.run_id} has no such samples")
    below = by_id[claim.above].query if claim.above else None
    floor = measure(below, run) if below else None
    return Answer(claim, claim.judge(ours, floor), ours, run.run_id, run.hardware)
