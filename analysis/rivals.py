"""All ways to run the walk side by side, from the runs of `rivals`; and the ratios that vLLM published beside the same ratios here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from analysis.claim import Claim
from analysis.latency import TEMPERATURES, WALKS, Cell, Latency

EXPERIMENT = "rivals"
TABLE_WALK = ("markov_v152k", 7)
TABLE_BATCHES = (1, 16, 64)
# What vLLM's pull requests compare: a way as it is and their own, by the first word of the claims' ids, and the arms that stand for them.
_GREEDY, _SAMPLED = "vllm_loop_greedy", "vllm_loop_gumbel"
_PAIRS = (("vllm_eager", "vllm_int8", "vllm_int8_walk"), ("vllm_loop", "vllm_inverse_cdf", "vllm_inverse_cdf"))
_ID = re.compile(r"(?P<what>\w+)\.v(?P<size>\w+)\.g(?P<steps>\d+)\.bs(?P<batch>\d+)\.(?P<kind>greedy|prob|t1)")


@dataclass(frozen=True)
class Ratio:
    """How much faster one way is than another in a cell: as published, and between our reconstructions of both. us a call, loop first."""

    cell: Cell
    hardware: str
    fast: str
    published_us: tuple[float, float]
    ours_us: tuple[float, float] | None  # None where one of them was not timed

    @property
    def published(self) -> float:
        return self.published_us[0] / self.published_us[1]

    @property
    def ours(self) -> float | None:
        return self.ours_us[0] / self.ours_us[1] if self.ours_us else None

    @property
    def deviation(self) -> float | None:
        """Our ratio over the published one, less one."""
        return self.ours / self.published - 1 if self.ours else None


def ratios(claims: Sequence[Claim], found: Mapping[Cell, Latency]) -> list[Ratio]:
    """Every pair of times that a source published for the same cell."""
    by_id = {claim.id: claim for claim in claims}
    return list(_ratios(by_id, found))


def rivals_table(found: Mapping[Cell, Latency]) -> str:
    """A Markdown table: us a call of every arm at V = 151,936, 7 steps, by temperature and batch."""
    head, steps = TABLE_WALK
    columns = [Cell(head, steps, batch, temperature) for temperature in TEMPERATURES for batch in TABLE_BATCHES]
    arms = list(dict.fromkeys(arm for cell in columns if cell in found for arm in (*found[cell].times, *found[cell].gaps)))
    if not arms:
        return "Not measured yet."
    names = [f"{'greedy' if cell.temperature == 0 else f'T = {cell.temperature:g}'}, bs {cell.batch}" for cell in columns]
    rows = [f"| µs a call | {' | '.join(names)} |", "|---|" + "---|" * len(columns)]
    for arm in arms:
        rows.append(f"| `{arm}` | {' | '.join(_entry(found.get(cell), arm) for cell in columns)} |")
    return "\n".join(rows)


def ratio_table(found: Sequence[Ratio]) -> str:
    """A Markdown table: published and our own times of both ways, both ratios, how far apart they are, and the time that the faster one saves."""
    timed = [ratio for ratio in found if ratio.ours_us]
    if not timed:
        return "Not measured yet."
    vocab = {head: size for head, size, _ in WALKS}
    rows = [
        "| V, steps, batch, T | against the loop | published, on | µs here | ratio published | here | apart | µs saved, published | here |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for ratio in timed:
        cell, ours = ratio.cell, ratio.ours_us or (0.0, 0.0)
        place = f"{vocab[cell.head]:,}, {cell.steps}, {cell.batch}, {cell.temperature:g}"
        published = f"{ratio.published_us[0]:g} / {ratio.published_us[1]:g} µs, {ratio.hardware}"
        here = f"{ours[0]:.1f} / {ours[1]:.1f}"
        rows.append(
            f"| {place} | `{ratio.fast}` | {published} | {here} | {ratio.published:.2f} | {ratio.ours:.2f} | {100 * (ratio.deviation or 0):+.0f} % | "
            f"{ratio.published_us[0] - ratio.published_us[1]:.1f} | {ours[0] - ours[1]:.1f} |"
        )
    return "\n".join(rows)


def _ratios(by_id: Mapping[str, Claim], found: Mapping[Cell, Latency]) -> Iterator[Ratio]:
    for loop, own, fast in _PAIRS:
        for claim in by_id.values():
            match = _ID.fullmatch(claim.id)
            other = by_id.get(claim.id.replace(loop, own, 1))
            if match is None or match["what"] != loop or other is None or claim.value is None or other.value is None:
                continue
            cell = Cell(f"markov_v{match['size']}", int(match["steps"]), int(match["batch"]), 0.0 if match["kind"] == "greedy" else 1.0)
            times = found[cell].times if cell in found else {}
            slow = _SAMPLED if cell.temperature else _GREEDY
            ours = (times[slow].value, times[fast].value) if slow in times and fast in times else None
            yield Ratio(cell, claim.hardware, fast, (claim.value, other.value), ours)


def _entry(latency: Latency | None, arm: str) -> str:
    if latency is None:
        return "not measured"
    if arm in latency.times:
        return f"{latency.times[arm].value:.1f}"
    return latency.gaps.get(arm, "not timed").split(":")[0]
