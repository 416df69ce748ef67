"""What a dispatcher would have chosen, round after round, of walks that were all timed: the rows of `certified_rounds` replayed in the order of their sets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import fmean

import torch

from experiments.outcome import Row
from kernels.dispatch import CertifiedCost, Choice, Dispatcher, Terms

_CELL = ("device", "head", "vocab", "rank", "steps", "batch", "temperature", "l2")
LATE = 1  # a count is copied while the next round is under way, so it is there before the one after that is chosen
_COUNTS = ("again", "searched")


def dispatched(rows: Sequence[Row], *, passes: int = 1, late: int = LATE) -> list[Row]:
    """Rows of `certified_dispatch`: of every cell and certified arm, which walk each set's round takes and how long that is.

    The serial walk is the arm without counts that is fastest on the mean over the sets. What a dispatcher knows of both is what these rows say: the
    serial one's mean time, and the certified one's by `measured_cost`. Sets that an arm lacks, or where a clock strayed, are left out.

    Args:
        rows: of `certified_rounds`, of exact arms only, each set once an arm.
        passes: times that the sets are gone through. What is learnt in one is known in the next.
        late: rounds by which the dispatcher is told later than at once.

    Raises:
        ValueError: an arm has a set twice.
    """
    cell = itemgetter(*_CELL)
    ordered = sorted((row for row in rows if row["valid"]), key=cell)
    return [found for _, of_cell in groupby(ordered, cell) for found in _cell(list(of_cell), passes, late)]


def measured_cost(rounds: Sequence[Row]) -> CertifiedCost:
    """What a certified round takes by its counts, as these rounds say: least squares with no cost below 0. Counts that always come together share what they
    cost."""
    times = torch.tensor([row["time_us"] for row in rounds], dtype=torch.float64)
    counts = torch.tensor([[1.0, *(row[name] for name in _COUNTS)] for row in rounds], dtype=torch.float64)
    best, least, nothing = CertifiedCost(float(times.mean()), 0.0, 0.0), float("inf"), 1e-12 * float(times.square().sum())
    # The best without negative costs is the unbounded best of some columns; of equal ones that of the most, whose base promises most.
    for kept in ([0, 1, 2], [0, 1], [0, 2], [0]):
        found = torch.linalg.pinv(counts[:, kept]) @ times
        error = float((counts[:, kept] @ found - times).square().sum())
        if found[0] > 0 and (found >= 0).all() and error < least - nothing:
            costs = dict(zip(kept, found.tolist(), strict=True))
            best, least = CertifiedCost(costs[0], costs.get(1, 0.0), costs.get(2, 0.0)), error
    return best


def _cell(rows: Sequence[Row], passes: int, late: int) -> Iterator[Row]:
    arms: dict[str, dict[int, Row]] = {}
    for row in rows:
        of_arm = arms.setdefault(row["variant"], {})
        if row["set"] in of_arm:
            raise ValueError(f"{row['variant']} has the set {row['set']} twice in one cell; give every set of an arm once.")
        of_arm[row["set"]] = row
    serial = {name: of for name, of in arms.items() if all(row["again"] < 0 for row in of.values())}
    for variant in (name for name in arms if name not in serial):
        shared = {name: sets for name, of in serial.items() if (sets := sorted(arms[variant].keys() & of.keys()))}
        if shared:
            yield from _replay(arms[variant], serial, shared, passes, late)


def _replay(
    certified: dict[int, Row], serial: dict[str, dict[int, Row]], shared: dict[str, list[int]], passes: int, late: int
) -> Iterator[Row]:
    means = {name: fmean(serial[name][number]["time_us"] for number in sets) for name, sets in shared.items()}
    fastest = min(means, key=means.__getitem__)
    sets = shared[fastest]
    dispatcher = Dispatcher(Terms(means[fastest], measured_cost([certified[number] for number in sets])))
    under_way: deque[tuple[int, Row]] = deque()
    for place, number in enumerate(sets * passes):
        while under_way and under_way[0][0] + late < place:
            told = under_way.popleft()[1]
            dispatcher.tell(told["again"], told["searched"])
        row, choice = certified[number], dispatcher.choose()
        if choice == Choice.CERTIFIED:
            under_way.append((place, row))
        us = {Choice.CERTIFIED: row["time_us"], Choice.SERIAL: serial[fastest][number]["time_us"]}
        yield {
            **{name: row[name] for name in (*_CELL, "backend", "variant")},
            "serial": fastest,
            "pass": place // len(sets),
            "set": number,
            "choice": str(choice),
            "time_us": us[choice],
            "certified_us": us[Choice.CERTIFIED],
            "serial_us": us[Choice.SERIAL],
        }
