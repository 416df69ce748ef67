"""One number that the paper or its sources state, the query that answers it, and the verdict on the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from analysis.bootstrap import Estimate
from analysis.certified import EXPERIMENT as CERTIFIED_EXPERIMENT
from analysis.quantization import EXPERIMENT as QUANTIZATION
from analysis.quantization import TRAINED

CLAIMS = Path(__file__).resolve().parent.parent / "paper" / "claims.yaml"
ACCEPTANCE = ("acceptance_change", "greedy_identity")  # measures that the experiment `acceptance` answers
CERTIFIED = {
    "round_median": "certified_rounds",
    "proved_share": "certified_shares",
    "dispatch_ratio": "certified_dispatch",
}  # measure: its table
_MEASURES = ("median", "slope", "entry", "ratio", "sampling", "part", "relative_error", *ACCEPTANCE, *CERTIFIED)
_PAIRED = ("part", *ACCEPTANCE)  # against one arm
_T = TypeVar("_T")


class Verdict(StrEnum):
    """What our records say about a claim."""

    BETTER = "better"
    REPRODUCED = "reproduced"
    SHORT = "short"
    UNDECIDED = "undecided"
    NOT_STATED = "no number stated"
    OTHER_HARDWARE = "needs other hardware"
    NOT_MEASURED = "not measured"


class InvalidClaim(ValueError):
    """An entry of claims.yaml that cannot be read; the message names the entry, the key and what is valid."""


@dataclass(frozen=True)
class Query:
    """A question to the records, answered by the newest run that has all its cells.

    measure: `median` (us a call at `steps`), `slope` (us a step), `entry` (us a call), `ratio` (the fastest arm of `against` over `variant`
    at `steps`), `sampling` (`variant` at `temperature` over its greedy walk), `part` (us a step that `variant` takes longer than the only arm
    of `against`), `acceptance_change` (% by which its acceptance length differs from that arm's), or `greedy_identity` (prompts whose text is
    that arm's, where they are fewest). experiment: who answers, where it is not who usually does.

    `relative_error`: what the format `variant` loses of `matrix` (of trained heads, for `tokens` where the matrix is of tokens), in per cent;
    with `against`, over what that one format loses. The mean over the run's heads, and from the least to the greatest head's. Nothing of it
    depends on the device, so any device's run answers, and no other field of a query counts.

    The measures of acceptance are asked of a `pair` of target and drafter instead of a head; no pair means the only one, 0 steps all lengths, batch 0 all
    batches.

    Of the experiment `certified`: `round_median` (us a round, the median over sets of inputs), `dispatch_ratio` (what a dispatcher chose over the serial
    walk that it chose from), `proved_share` (the share of steps that `candidates` and `listed` rows prove, of the first `steps` of a round). They are asked of
    a `vocab` and a family of `inputs` instead of a head; no family means any.
    """

    measure: str
    variant: str
    against: tuple[str, ...] = ()
    steps: int = 0
    head: str = "markov_v152k"
    batch: int = 1
    temperature: float = 0.0
    l2: str = "cold"
    scope: str = "call"
    experiment: str = ""
    matrix: str = "w2"
    tokens: str = ""
    pair: str = ""
    vocab: int = 0
    inputs: str = ""
    candidates: int = 0
    listed: int = 0

    @property
    def experiments(self) -> tuple[str, ...]:
        """Who may answer, the first choice first. A line needs many lengths; a single cell stands in the grid, and some in the lines too."""
        if self.experiment:
            return (self.experiment,)
        if self.measure == "part":
            return ("step_breakdown",)
        if self.measure == "relative_error":
            return (QUANTIZATION,)
        if self.measure in ACCEPTANCE:
            return ("acceptance",)
        if self.measure in CERTIFIED:
            return (CERTIFIED_EXPERIMENT,)
        return ("step_slope",) if self.measure in ("slope", "entry") else ("walk_latency", "step_slope")

    @property
    def table(self) -> str:
        """The table that says which cells a run has."""
        if self.measure == "relative_error":
            return "quantization"
        if self.measure in CERTIFIED:
            return CERTIFIED[self.measure]
        return "acceptance" if self.measure in ACCEPTANCE else "cells"

    @property
    def cells(self) -> list[dict[str, object]]:
        """The cells that a run must have, as columns of `table`; the query's own comes first."""
        if self.measure == "relative_error":
            of: dict[str, object] = {"weights": TRAINED, "matrix": self.matrix, "tokens": self.tokens}
            return [of | {"format": form} for form in (self.variant, *self.against)]
        if self.measure in ACCEPTANCE:
            named: dict[str, object] = {"pair": self.pair, "steps": self.steps, "batch": self.batch}
            asked = {column: value for column, value in named.items() if value}
            own: dict[str, object] = asked | {"temperature": self.temperature}
            return [own, *(own | {"variant": arm} for arm in (self.variant, *self.against))]
        if self.measure == "proved_share":
            own = {"vocab": self.vocab, "temperature": self.temperature, "candidates": self.candidates, "listed": self.listed}
            return [own, own | {"step": self.steps - 1}]  # as many steps as are asked for
        if self.measure in CERTIFIED:
            of_walk: dict[str, object] = {"vocab": self.vocab, "steps": self.steps, "batch": self.batch, "temperature": self.temperature}
            return [of_walk | {"l2": self.l2, "variant": self.variant}]
        own = {"head": self.head, "batch": self.batch, "temperature": self.temperature}
        if self.steps:
            own["steps"] = self.steps
        return [own, own | {"temperature": 0.0}] if self.measure == "sampling" else [own]

    @property
    def samples(self) -> dict[str, object]:
        """What its samples have besides the arm: columns of the table `samples`."""
        return self.cells[0] | {"l2": self.l2, "scope": self.scope}


@dataclass(frozen=True)
class Claim:
    """A stated number. `value` is None where the source states none: `stated` says so, and `above` names a claim it must lie above, if any.

    A claim with an `interval` is that nothing changes: its value is a change near 0, and what counts is whether ours is equivalent to none.
    """

    id: str
    source: str
    where: str
    value: float | None
    unit: str
    hardware: str
    better: str = "lower"
    tolerance: float = 0.05  # as a share of the value: how far off still counts as reproduced
    title: str = ""  # what a reader is told; the id where it is empty
    stated: str = ""  # the source's own words where they are not one number
    note: str = ""
    goal: float | None = None  # the floor this suite set itself
    above: str = ""
    interval: tuple[float, float] | None = None  # the source's own, 95 %, in the claim's unit
    query: Query | None = None

    @property
    def paper(self) -> str:
        """The stated number as the source prints it."""
        if self.stated:
            return self.stated
        if self.interval:
            return f"{self.value:.2f} [{self.interval[0]:.2f}, {self.interval[1]:.2f}]"
        return f"{self.value:g}" if self.value is not None else f"above {self.above}"

    def goal_met(self, ours: float) -> bool | None:
        """Whether our value reaches the goal; None where there is no goal."""
        if self.goal is None:
            return None
        return ours <= self.goal if self.better == "lower" else ours >= self.goal

    def judge(self, ours: Estimate, floor: Estimate | None = None) -> Verdict:
        """The verdict on our value.

        `better`: beyond the tolerance on the good side, and the interval's worst end still beats the paper. `reproduced`: not better and no
        more than the tolerance on the bad side. `short`: the rest. Without a stated value: reproduced if our whole interval lies above `floor`'s,
        and no verdict where the claim is above nothing.
        """
        if self.value is None and not self.above:
            return Verdict.NOT_STATED
        if self.value is None:
            return Verdict.REPRODUCED if floor and _worst(ours, "higher") > _worst(floor, "lower") else Verdict.SHORT
        gain = _gain(ours.value, self.value, self.better)
        if gain > 1 + self.tolerance and _gain(_worst(ours, self.better), self.value, self.better) > 1:
            return Verdict.BETTER
        return Verdict.REPRODUCED if gain >= 1 - self.tolerance else Verdict.SHORT


@dataclass(frozen=True)
class Book:
    """Everything in claims.yaml: `device` is the GPU whose records answer, `measurable` the paper's hardware that it stands in for."""

    device: str
    measurable: tuple[str, ...]
    sources: Mapping[str, str]
    claims: tuple[Claim, ...] = field(default=())


def load_claims(path: Path = CLAIMS) -> Book:
    """The claims of `path`.

    Raises:
        OSError: the file cannot be read.
        InvalidClaim: no YAML, a wrong key, an unknown source, an id used twice; the message names the entry.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidClaim(f"{path} is not YAML ({' '.join(str(error).split())}); correct it there, or restore it from git.") from None
    if not isinstance(data, dict) or not isinstance(data.get("claims"), list):
        raise InvalidClaim(f"{path} has no list `claims`; correct it, or restore it from git.")
    claims = tuple(_claim(entry) for entry in data.pop("claims"))
    book = _build(Book, str(path), data | {"claims": claims})
    ids = [claim.id for claim in claims]
    for claim in claims:
        if ids.count(claim.id) > 1:
            raise InvalidClaim(f"{path} has {ids.count(claim.id)} claims called {claim.id!r}; rename all but one.")
        if claim.source not in book.sources:
            raise InvalidClaim(f"{claim.id} cites the source {claim.source!r}, which is none of {', '.join(book.sources)}.")
        if claim.value is None and (claim.above not in ids if claim.above else not claim.stated):
            raise InvalidClaim(
                f"{claim.id} states no value and lies above {claim.above!r}, which is no claim; give it a value, an `above`, or say in "
                "`stated` what the source has."
            )
    return book


def _claim(entry: Any) -> Claim:
    if not isinstance(entry, dict):
        raise InvalidClaim(f"the claim {entry!r} is not a mapping; write it as `id: ...` with the keys of a claim.")
    name = str(entry.get("id"))
    query = entry.get("query")
    if query is not None:
        entry = entry | {"query": _build(Query, f"the query of {name}", query)}
    claim = _build(Claim, name, entry)
    if claim.better not in ("lower", "higher"):
        raise InvalidClaim(f"{name} has better={claim.better!r}; it is lower or higher.")
    if claim.query and claim.query.measure not in _MEASURES:
        raise InvalidClaim(f"{name} asks for measure={claim.query.measure!r}; it is one of {', '.join(_MEASURES)}.")
    if claim.query and claim.query.measure in _PAIRED and len(claim.query.against) != 1:
        asked = f"measure={claim.query.measure!r} against {list(claim.query.against)}"
        raise InvalidClaim(f"{name} asks for {asked}; name the one arm that it is compared with.")
    if claim.interval is not None and (
        claim.value is None or len(claim.interval) != 2 or not claim.interval[0] <= claim.value <= claim.interval[1]
    ):
        raise InvalidClaim(f"{name} has interval={list(claim.interval)} around {claim.value}; write its low and its high end.")
    if claim.query and claim.query.measure == "relative_error" and len(claim.query.against) > 1:
        raise InvalidClaim(f"{name} asks for measure='relative_error' against {list(claim.query.against)}; name one format, or none.")
    return claim


def _build(kind: type[_T], name: str, values: Mapping[str, Any]) -> _T:
    valid = [field.name for field in fields(cast(Any, kind))]
    for key in values:
        if key not in valid:
            raise InvalidClaim(f"{name} has the unknown key {key!r}; it may have: {', '.join(valid)}.")
    listed = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    try:
        return kind(**listed)
    except TypeError as error:
        raise InvalidClaim(f"{name} is incomplete: {error}.") from None


def _gain(ours: float, paper: float, better: str) -> float:
    return paper / ours if better == "lower" else ours / paper


def _worst(estimate: Estimate, better: str) -> float:
    """The interval's end on the bad side; the value itself where there is no interval."""
    end = estimate.high if better == "lower" else estimate.low
    return estimate.value if end != end else end
