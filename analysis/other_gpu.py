"""How much of a published time is its GPU's: our time of the same walk, with the GEMM as that GPU's memory would have it.

The GEMM u W2^T moves nearly all bytes of a step. A walk that spends g us a step in it here would take call + steps g (HBM here / HBM there - 1)
more or less there if nothing else changed; and where W2 fits the other L2 (66 MB of bf16 at V = 129,280, of a GB200's 126), something between
that and a walk whose GEMM takes no time at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from analysis.anatomy import GEMM, run_of, steps
from analysis.claim import Claim
from analysis.latency import WALKS, Cell, Latency
from analysis.load import Run

DEVICES = Path(__file__).resolve().parent.parent / "configs" / "device"
_SPECS = {"H100": "h100", "GB200": "b200"}  # a GPU of a GB200 is a B200
_ID = re.compile(
    r"(?P<way>folded|vllm_eager|vllm_loop|vllm_inverse_cdf)\.v(?P<size>\w+)\.g(?P<steps>\d+)\.bs(?P<batch>\d+)(\.(?P<kind>greedy|prob|t1))?"
)


@dataclass(frozen=True)
class Elsewhere:
    """A published call, and the same call here. Times in us; gemm_us of a step."""

    cell: Cell
    arm: str
    hardware: str
    published_us: float
    here_us: float
    gemm_us: float
    hbm_ratio: float  # rate here over rate there

    @property
    def scaled_us(self) -> float:
        """With the GEMM at the other HBM's rate."""
        return self.here_us + self.cell.steps * self.gemm_us * (self.hbm_ratio - 1)

    @property
    def without_us(self) -> float:
        """With a GEMM that takes no time."""
        return self.here_us - self.cell.steps * self.gemm_us


def elsewhere(claims: Sequence[Claim], found: Mapping[Cell, Latency], anatomies: Sequence[Run]) -> list[Elsewhere]:
    """Every published call of a way with a GEMM whose cell was timed here and whose step was taken apart."""
    return list(_elsewhere(claims, found, anatomies))


def other_gpu_table(rows: Sequence[Elsewhere]) -> str:
    """A Markdown table: published and here, and here with the other GPU's GEMM."""
    if not rows:
        return "Not measured yet."
    vocab = {head: size for head, size, _ in WALKS}
    lines = [
        "| V, steps, batch, T | arm | published µs, on | µs here | its GEMM, µs a step | µs here, GEMM by that HBM | no GEMM |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        place = f"{vocab[row.cell.head]:,}, {row.cell.steps}, {row.cell.batch}, {row.cell.temperature:g}"
        times = f"{row.here_us:.1f} | {row.gemm_us:.1f} | {row.scaled_us:.1f} | {row.without_us:.1f}"
        lines.append(f"| {place} | `{row.arm}` | {row.published_us:g}, {row.hardware} | {times} |")
    return "\n".join(lines)


def _elsewhere(claims: Sequence[Claim], found: Mapping[Cell, Latency], anatomies: Sequence[Run]) -> Iterator[Elsewhere]:
    for claim in claims:
        match = _ID.fullmatch(claim.id)
        if match is None or claim.value is None or claim.hardware not in _SPECS:
            continue
        temperature = 1.0 if match["kind"] in ("prob", "t1") else 0.0
        cell = Cell(f"markov_v{match['size']}", int(match["steps"]), int(match["batch"]), temperature)
        arm = _arm(match["way"], temperature)
        run = run_of(anatomies, cell.head, cell.batch, temperature)
        if cell not in found or arm not in found[cell].times or run is None:
            continue
        step = steps(run).get(arm)
        if step is None:
            continue
        gemm_us = sum(part.time_us.value for part in step.parts if part.kernel == GEMM)
        hbm_ratio = float(run.manifest["config"]["device"]["hbm_gb_s"]) / _hbm_gb_s(claim.hardware)
        yield Elsewhere(cell, arm, claim.hardware, claim.value, found[cell].times[arm].value, gemm_us, hbm_ratio)


def _arm(way: str, temperature: float) -> str:
    if way in ("vllm_eager", "vllm_loop"):
        return "vllm_loop_gumbel" if temperature else "vllm_loop_greedy"
    return {"folded": "sglang_folded", "vllm_inverse_cdf": "vllm_inverse_cdf"}[way]


def _hbm_gb_s(hardware: str) -> float:
    return float(yaml.safe_load((DEVICES / f"{_SPECS[hardware]}.yaml").read_text())["hbm_gb_s"])
