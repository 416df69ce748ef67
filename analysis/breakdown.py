"""Where a step of the resident walk goes: what each part costs, from walks that do one part of every step twice, and what is left over.

A part's cost is the slope of the walk that does it twice less that of the plain walk, replica by replica: both ran in one process. Parts that
overlap in a plain step cost more one by one than together, and then the rest is negative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.bootstrap import Estimate, bootstrap
from analysis.load import Run
from analysis.slope import flagged, medians, slopes

EXPERIMENT = "step_breakdown"
PLAIN = "resident"
PARTS = {  # the walk that does it twice, in the order of a step
    "latent_twice": "latent fetch",
    "score_twice": "scoring",
    "reduce_twice": "reduce",
    "exchange_twice": "exchange",
}


@dataclass(frozen=True)
class Part:
    """A part of a step, or what is left of the step besides all parts.

    cost_us: us a step; None where it was not measured, and `gap` says why
    share:   of the plain walk's step
    """

    name: str
    cost_us: Estimate | None = None
    share: Estimate | None = None
    flagged: int = 0  # samples left out, of the walk that does it twice
    gap: str = ""


@dataclass(frozen=True)
class Breakdown:
    """A step of the plain walk, its parts and the rest."""

    step_us: Estimate | None
    parts: tuple[Part, ...]
    rest: Part


def breakdown(run: Run, *, l2: str = "cold", scope: str = "call") -> Breakdown:
    """The parts of a step in a run of step_breakdown."""
    samples, cells = run.table("samples"), run.table("cells")
    found = {variant: slopes(medians(samples, variant=variant, l2=l2, scope=scope)) for variant in (PLAIN, *PARTS)}
    gaps = {variant: _gap(cells[cells["variant"] == variant]) for variant, steps in found.items() if steps.empty}
    plain = _paired(found[PLAIN])
    parts = []
    for variant, name in PARTS.items():
        out, missing = flagged(samples, variant=variant, l2=l2, scope=scope), [gaps[each] for each in (PLAIN, variant) if each in gaps]
        parts.append(_part(name, _paired(found[PLAIN], found[variant]), _extra, out, "; ".join(dict.fromkeys(missing))))
    unknown = [PARTS.get(variant, "the plain walk") for variant in gaps]
    rest = _part("rest", _paired(*found.values()), _rest, 0, f"not measured: {', '.join(unknown)}" if unknown else "")
    return Breakdown(bootstrap(plain, _step) if len(plain) else None, tuple(parts), rest)


def part_cost(samples: pd.DataFrame, variant: str, plain: str, **cell: object) -> Estimate | None:
    """us a step that `variant` takes longer than `plain`; `cell` fixes columns of the table `samples`. None where one was not timed."""
    pairs = _paired(*(slopes(medians(samples, variant=each, **cell)) for each in (plain, variant)))
    return bootstrap(pairs, _extra) if len(pairs) else None


def breakdown_table(found: Breakdown) -> str:
    """A Markdown table: every part with its cost and share, the rest, the whole step."""
    rows = ["| part of a step | µs/step | share of the step | flagged samples |", "|---|---|---|---|"]
    rows += [_row(part, str(part.flagged)) for part in found.parts]
    rows += [_row(found.rest, ""), f"| whole step | {f'{found.step_us:.2f}' if found.step_us else 'not measured'} | | |"]
    return "\n".join(
        [*rows, "", "- A part costs what a walk that does it twice takes longer. The rest is negative where parts overlap in a plain step."]
    )


def _row(part: Part, out: str) -> str:
    cost = f"{part.cost_us:.2f}" if part.cost_us else part.gap
    share = f"{100 * part.share.value:.0f} %" if part.share else ""
    return f"| {part.name} | {cost} | {share} | {out} |"


def _paired(*steps: pd.Series) -> NDArray[np.float64]:
    """[replicas, arms] us a step, of the replicas that have all arms."""
    return pd.concat(steps, axis=1, join="inner").to_numpy(dtype=np.float64)


def _part(name: str, pairs: NDArray[np.float64], cost: Callable[[NDArray[np.float64]], NDArray[np.float64]], out: int, gap: str) -> Part:
    """Cost and share over the replicas of `pairs`, whose first arm is the plain walk."""
    if not len(pairs):
        return Part(name, flagged=out, gap=gap or "no replica has all walks that it needs")
    return Part(name, bootstrap(pairs, cost), bootstrap(pairs, lambda drawn: cost(drawn) / _step(drawn)), out)


def _gap(cells: pd.DataFrame) -> str:
    failed = cells[cells["status"] != "ok"]
    if failed.empty:
        return "fewer than two lengths were timed" if len(cells) else "not asked for"
    return f"{failed['status'].iloc[0]}: {failed['reason'].iloc[0]}"


# Statistics of [draws, replicas, arms], the plain walk first.
def _step(drawn: NDArray[np.float64]) -> NDArray[np.float64]:
    return drawn[:, :, 0].mean(axis=1)


def _extra(drawn: NDArray[np.float64]) -> NDArray[np.float64]:
    return (drawn[:, :, 1] - drawn[:, :, 0]).mean(axis=1)


def _rest(drawn: NDArray[np.float64]) -> NDArray[np.float64]:
    """The step less all parts."""
    plain = drawn[:, :, :1]
    return (plain[:, :, 0] - (drawn[:, :, 1:] - plain).sum(axis=2)).mean(axis=1)
