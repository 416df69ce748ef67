"""The certified walk, from the runs of `certified`: how long its rounds take, which depends on their data, and what share of the steps few rows prove.

A set is one round's inputs, so sets are what the bootstrap draws: times of one set do not say how another's data would do. A cell is taken whole from
the newest run that has it, since arms may only be compared within a process.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.bootstrap import Estimate, bootstrap, median, percentiles, resample
from analysis.load import AGAIN, InvalidRun, Run
from analysis.roofline import floor_us

EXPERIMENT = "certified"
CERTIFIED = "certified_sm80"  # the arm
LISTED = 128  # rows of a token's list, as the walk takes them
TRAINED, FLAT = "trained", "synthetic"  # families of inputs: rounds that a pair drafted; the paper's logits, the adverse case
QUANTILES = (0.10, 0.25, 0.50, 0.75, 0.90)
PREFIXES = (7, 16)  # steps from a round's start, of which shares are given
_NAMED = ["vocab", "head", "steps", "batch", "temperature", "l2"]
_SHARED = ["vocab", "head", "temperature", "candidates", "listed"]


@dataclass(frozen=True, order=True)
class Cell:
    """What rounds have in common. steps: γ. l2: cold or hot."""

    family: str
    vocab: int
    head: str
    steps: int
    batch: int
    temperature: float
    l2: str


@dataclass(frozen=True)
class Rounds:
    """One arm in a cell, over sets.

    quantiles_us: at QUANTILES, over sets
    median_us:    with its interval
    again:        shares of rounds with 0, 1, and more steps that the table did not settle; None where the arm counts none
    searched:     likewise, of steps that were searched
    """

    quantiles_us: tuple[float, ...]
    median_us: Estimate
    sets: int
    again: tuple[float, float, float] | None
    searched: tuple[float, float, float] | None


@dataclass(frozen=True)
class Dispatch:
    """A replay of the dispatcher over the sets of a cell, in their order: means over rounds, in us.

    serial:       the arm that it chooses from beside the certified one
    mean_us:      of what was chosen; certified_us, serial_us: had it always been that walk; best_us: had it been the faster one every round
    share:        of rounds that were certified
    over_serial:  mean_us over serial_us
    """

    serial: str
    rounds: int
    mean_us: float
    certified_us: float
    serial_us: float
    best_us: float
    share: float
    over_serial: Estimate

    @property
    def regret_us(self) -> float:
        """A round, against the better walk in hindsight; below 0 where changing between them paid."""
        return self.mean_us - min(self.certified_us, self.serial_us)


@dataclass(frozen=True)
class Measured:
    """A cell as one run has it. dispatches: by certified arm; floor_us: no walk is faster with cold L2, which reads its base logits."""

    run: Run
    arms: Mapping[str, Rounds]
    dispatches: Mapping[str, Dispatch]
    floor_us: float

    @property
    def fastest_serial(self) -> str | None:
        """The arm without counts that has the least median."""
        serial = [arm for arm, found in self.arms.items() if found.again is None]
        return min(serial, key=lambda arm: self.arms[arm].median_us.value, default=None)


@dataclass(frozen=True, order=True)
class ShareCell:
    """Where shares are taken. candidates: M, rows of a step by base logits; listed: J, rows by the previous token's bias; first: steps of a round."""

    family: str
    vocab: int
    head: str
    temperature: float
    candidates: int
    listed: int
    first: int


@dataclass(frozen=True)
class Share:
    """unproved: the share of steps without a certificate. lifted: of those proved by a row that only the bias list named. steps: how many there were.

    Without any in the record the interval of `unproved` ends at 3 / steps (95 %, one-sided), as if steps were independent.
    """

    run: Run
    unproved: Estimate
    lifted: Estimate
    steps: int
    sets: int


def family(run: Run) -> str:
    """The family of the inputs of `run`.

    Raises:
        InvalidRun: its configuration does not say.
    """
    inputs = run.manifest["config"].get("inputs")
    if not isinstance(inputs, dict) or not isinstance(inputs.get("family"), str):
        raise InvalidRun(f"{run.path / 'run.json'} does not say what its inputs are (config.inputs.family); {AGAIN}.")
    return inputs["family"]


def measured(runs: Sequence[Run]) -> dict[Cell, Measured]:
    """Every cell of the table `certified_rounds`, from the newest run that has it: pass `all_runs`, the newest first.

    Raises:
        InvalidRun: a record that contradicts itself.
    """
    found: dict[Cell, Measured] = {}
    for run in (run for run in runs if "certified_rounds" in run.tables):
        kind, replays = family(run), _replays(run)
        for key, rows in round_rows(run).groupby(_NAMED):
            of = rows.iloc[0]
            cell = Cell(
                kind, int(of["vocab"]), str(of["head"]), int(of["steps"]), int(of["batch"]), float(of["temperature"]), str(of["l2"])
            )
            if cell not in found:
                arms = {str(arm): each for arm, of_arm in rows.groupby("variant", sort=False) if (each := _rounds(of_arm))}
                found[cell] = Measured(run, arms, replays.get(key, {}), floor(run, cell.vocab, cell.steps, cell.batch))
    return dict(sorted(found.items()))


def shares(runs: Sequence[Run]) -> dict[ShareCell, Share]:
    """Every cell of the table `certified_shares`, likewise. Of several lengths in a run the longest counts.

    Raises:
        InvalidRun: a record that contradicts itself.
    """
    found: dict[ShareCell, Share] = {}
    for run in (run for run in runs if "certified_shares" in run.tables):
        kind = family(run)
        for _, rows in share_rows(run).groupby(_SHARED):
            of = rows.iloc[0]
            place = (int(of["vocab"]), str(of["head"]), float(of["temperature"]), int(of["candidates"]), int(of["listed"]))
            longest = rows[rows["steps"] == rows["steps"].max()]
            for first in (first for first in PREFIXES if first <= longest["steps"].iloc[0]):
                cell = ShareCell(kind, *place, first)
                if cell not in found:
                    found[cell] = _share(run, longest[longest["step"] < first])
    return dict(sorted(found.items()))


def round_median(run: Run, variant: str, cell: Mapping[str, object]) -> Estimate | None:
    """The median time of a round of an arm in us, with its interval over sets; `cell` fixes columns. None where it was not timed."""
    rows = _of(round_rows(run), {**cell, "variant": variant})
    found = _rounds(rows)
    return found.median_us if found else None


def proved_share(run: Run, cell: Mapping[str, object], first: int) -> Estimate | None:
    """The share of steps with a certificate among the `first` of every round, with its interval over sets. None where there are none."""
    rows = _of(share_rows(run), cell)
    rows = rows[(rows["steps"] == rows["steps"].max()) & (rows["step"] < first)]
    if rows.empty or rows["steps"].iloc[0] < first:
        return None
    unproved = _share(run, rows).unproved
    return Estimate(1 - unproved.value, 1 - unproved.high, 1 - unproved.low)


def dispatch_ratio(run: Run, variant: str, cell: Mapping[str, object]) -> Estimate | None:
    """The mean time of what a dispatcher chose over that of the serial walk. None where it was not replayed."""
    rows = _of(dispatch_rows(run), {**cell, "variant": variant})
    return None if rows.empty else _dispatch(rows).over_serial


def floor(run: Run, vocab: int, steps: int, batch: int = 1) -> float:
    """Us that any walk takes with cold L2: its launch, and its base logits in bf16 at the rate of HBM.

    Raises:
        InvalidRun: the run does not say that rate.
    """
    rate = run.manifest["config"]["device"].get("hbm_gb_s")
    if not rate:
        raise InvalidRun(
            f"{run.path / 'run.json'} states no memory rate (config.device.hbm_gb_s = {rate}); add it to configs/device and measure again."
        )
    return launch_us(run) + floor_us(2 * vocab * steps * batch, rate)


def launch_us(run: Run) -> float:
    """Below which the run's stopwatch takes no call for real."""
    return float(run.manifest["protocol"].get("launch_floor_us", 0.0))


def round_rows(run: Run) -> pd.DataFrame:
    """The table `certified_rounds`, checked.

    Raises:
        InvalidRun: a set of an arm stated twice, or counts that cannot be.
    """
    rows = run.table("certified_rounds")
    _assert_once(run, rows, "certified_rounds", ["variant", *_NAMED, "set"])
    counted = rows["searched"].between(0, rows["again"]) & (rows["again"] <= rows["steps"] * rows["batch"])
    wrong = rows[~counted & ~((rows["again"] == -1) & (rows["searched"] == -1))]
    if len(wrong):
        first = wrong.iloc[0][["variant", "steps", "batch", "set", "again", "searched"]].to_dict()
        raise InvalidRun(f"{run.path}: {len(wrong)} rows of certified_rounds cannot be counts of steps (first: {first}); {AGAIN}.")
    return rows


def share_rows(run: Run) -> pd.DataFrame:
    """The table `certified_shares`, checked.

    Raises:
        InvalidRun: a step stated twice or beyond its round, or one that is lifted and not proved.
    """
    rows = run.table("certified_shares")
    _assert_once(run, rows, "certified_shares", [*_SHARED, "steps", "set", "step"])
    wrong = rows[(rows["lifted"] & ~rows["proved"]) | ~rows["step"].between(0, rows["steps"] - 1)]
    if len(wrong):
        first = wrong.iloc[0][["steps", "set", "step", "proved", "lifted"]].to_dict()
        raise InvalidRun(f"{run.path}: {len(wrong)} rows of certified_shares are no steps of a round (first: {first}); {AGAIN}.")
    return rows


def dispatch_rows(run: Run) -> pd.DataFrame:
    """The table `certified_dispatch`, checked.

    Raises:
        InvalidRun: a round stated twice, or one whose time is not that of its choice.
    """
    rows = run.table("certified_dispatch")
    _assert_once(run, rows, "certified_dispatch", ["variant", *_NAMED, "pass", "set"])
    certified = rows["choice"] == "certified"
    wrong = rows[
        (rows["time_us"] != rows["certified_us"].where(certified, rows["serial_us"])) | ~(certified | (rows["choice"] == "serial"))
    ]
    if len(wrong):
        first = wrong.iloc[0][["variant", "set", "choice", "time_us", "certified_us", "serial_us"]].to_dict()
        raise InvalidRun(
            f"{run.path}: {len(wrong)} rows of certified_dispatch have another time than their choice (first: {first}); {AGAIN}."
        )
    return rows


def certified_table(found: Mapping[Cell, Measured]) -> str:
    """A Markdown table: rounds of the certified walk with cold L2, what they had to do again, the fastest serial arm, and the dispatcher between them."""
    rows = [
        "| inputs, V, γ, T, requests | µs: 10 % | median, 95 % interval | 90 % | floor | steps again: 0 / 1 / more, % of rounds | searched | sets "
        "| fastest serial arm, µs | dispatched, µs | over serial |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    shown = [(cell, each) for cell, each in found.items() if cell.l2 == "cold" and CERTIFIED in each.arms]
    if not shown:
        return "Not measured yet."
    return "\n".join([*rows, *(_row(cell, each) for cell, each in shown)])


def share_table(found: Mapping[ShareCell, Share]) -> str:
    """A Markdown table: the share of steps proved by M candidates and LISTED rows, and of those proved by a listed row alone; Figure 17 has other lists."""
    shown = {cell: each for cell, each in found.items() if cell.listed == LISTED}
    if not shown:
        return "Not measured yet."
    rows = ["| inputs, V, T | M | J | first steps | proved, %, 95 % interval | lifted, % | steps |", "|---|---|---|---|---|---|---|"]
    for cell, each in shown.items():
        unproved = each.unproved
        proved = Estimate(100 * (1 - unproved.value), 100 * (1 - unproved.high), 100 * (1 - unproved.low))
        rows.append(
            f"| {cell.family}, {cell.vocab:,}, {cell.temperature:g} | {cell.candidates} | {cell.listed} | {cell.first} | {proved:.2f} "
            f"| {100 * each.lifted.value:.2f} | {each.steps:,} |"
        )
    return "\n".join(rows)


def _replays(run: Run) -> dict[Hashable, dict[str, Dispatch]]:
    """By what names a cell, and by arm."""
    if "certified_dispatch" not in run.tables:
        return {}
    rows = dispatch_rows(run)
    return {key: {str(arm): _dispatch(of_arm) for arm, of_arm in of.groupby("variant", sort=False)} for key, of in rows.groupby(_NAMED)}


def _rounds(rows: pd.DataFrame) -> Rounds | None:
    """Of one arm; None where every clock strayed."""
    times = rows.loc[rows["valid"], "time_us"].to_numpy(dtype=np.float64)
    if not len(times):
        return None
    quantiles = tuple(float(us) for us in np.quantile(times, QUANTILES))
    return Rounds(quantiles, bootstrap(times, median), len(times), _by_number(rows["again"]), _by_number(rows["searched"]))


def _by_number(counts: pd.Series) -> tuple[float, float, float] | None:
    if (counts < 0).any():
        return None
    return float((counts == 0).mean()), float((counts == 1).mean()), float((counts > 1).mean())


def _share(run: Run, rows: pd.DataFrame) -> Share:
    counts = rows.assign(unproved=~rows["proved"], steps=1).groupby("set")[["unproved", "lifted", "steps"]].sum().to_numpy(dtype=np.float64)
    values, drawn = _shares_of_sums(counts[None])[0], resample(counts, _shares_of_sums)
    nothing = (float("nan"), float("nan"))
    unproved, lifted = (
        Estimate(float(value), *(percentiles(column) if len(counts) > 1 else nothing))
        for value, column in zip(values, drawn.T, strict=True)
    )
    if unproved.value == 0:
        unproved = Estimate(0.0, 0.0, 3 / len(rows))
    return Share(run, unproved, lifted, len(rows), len(counts))


def _dispatch(rows: pd.DataFrame) -> Dispatch:
    means = rows[["time_us", "certified_us", "serial_us"]].mean()
    best = rows[["certified_us", "serial_us"]].min(axis=1).mean()
    by_set = rows.groupby("set")[["time_us", "serial_us"]].mean().to_numpy(dtype=np.float64)
    return Dispatch(
        serial=str(rows["serial"].iloc[0]),
        rounds=len(rows),
        mean_us=float(means["time_us"]),
        certified_us=float(means["certified_us"]),
        serial_us=float(means["serial_us"]),
        best_us=float(best),
        share=float((rows["choice"] == "certified").mean()),
        over_serial=bootstrap(by_set, _ratio_of_sums),
    )


def _shares_of_sums(drawn: NDArray[np.float64]) -> NDArray[np.float64]:
    """[draws, sets, 3] to [draws, 2]: the first two sums over the third."""
    sums = drawn.sum(axis=1)
    return sums[:, :2] / sums[:, 2:]


def _ratio_of_sums(drawn: NDArray[np.float64]) -> NDArray[np.float64]:
    """[draws, sets, 2] to [draws]."""
    sums = drawn.sum(axis=1)
    return sums[:, 0] / sums[:, 1]


def _of(rows: pd.DataFrame, cell: Mapping[str, object]) -> pd.DataFrame:
    return rows[np.logical_and.reduce([rows[column] == value for column, value in cell.items()])]


def _assert_once(run: Run, rows: pd.DataFrame, table: str, key: list[str]) -> None:
    twice = rows[rows.duplicated(key)]
    if len(twice):
        raise InvalidRun(f"{run.path}: {table} states a row twice (first: {twice.iloc[0][key].to_dict()}); {AGAIN}.")


def _row(cell: Cell, each: Measured) -> str:
    ours, serial, replay = each.arms[CERTIFIED], each.fastest_serial, each.dispatches.get(CERTIFIED)
    words = [" / ".join(f"{100 * share:.0f}" for share in counted) if counted else "" for counted in (ours.again, ours.searched)]
    beside = f"`{serial}` {each.arms[serial].median_us.value:.1f}" if serial else ""
    dispatched = [f"{replay.mean_us:.1f}", f"{replay.over_serial.value:.2f}×"] if replay else ["", ""]
    entries = [
        f"{cell.family}, {cell.vocab:,}, {cell.steps}, {cell.temperature:g}, {cell.batch}",
        f"{ours.quantiles_us[0]:.1f}",
        f"{ours.median_us:.1f}",
        f"{ours.quantiles_us[-1]:.1f}",
        f"{each.floor_us:.1f}",
        *words,
        str(ours.sets),
        beside,
        *dispatched,
    ]
    return f"| {' | '.join(entries)} |"
