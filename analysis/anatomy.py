"""What a step of each arm is made of, from a run of `step_anatomy`: what the longer walk has more than the shorter one, a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.bootstrap import Estimate, bootstrap, median
from analysis.load import Run

EXPERIMENT = "step_anatomy"
IDLE = "(between kernels)"
GEMM = "GEMM"
MAIN_WALK = ("markov_v248k", 1, 0.0)  # head, batch, temperature: what Figure 3 and the table of all arms show
GROWS_US = 0.05  # a step: a kernel that is launched once a walk is part of a step where it takes so much longer with each


@dataclass(frozen=True)
class Part:
    """A kernel's share of a step: how often it is launched, and its us."""

    kernel: str
    launches: float
    time_us: Estimate


@dataclass(frozen=True)
class Step:
    """One arm's step: its parts, the largest first and the time between kernels last; the bytes of W2 it reads and what they take at peak."""

    parts: tuple[Part, ...]
    streamed_bytes: int
    floor_us: float

    @property
    def launches(self) -> float:
        return sum(part.launches for part in self.parts)

    @property
    def busy_us(self) -> float:
        """In kernels."""
        return sum(part.time_us.value for part in self.parts if part.kernel != IDLE)


def run_of(runs: Sequence[Run], head: str, batch: int, temperature: float) -> Run | None:
    """The newest run (`all_runs` has it first) that took this walk apart."""
    for run in runs:
        first = run.table("cells").iloc[0]
        if (first["head"], first["batch"], first["temperature"]) == (head, batch, temperature):
            return run
    return None


def steps(run: Run) -> dict[str, Step]:
    """Every traced arm's step, by variant, in the order of the record."""
    rows = run.table("step_kernels")
    return {str(variant): _step(run, str(variant), of) for variant, of in rows.groupby("variant", sort=False)}


def short_name(kernel: str) -> str:
    """A kernel's name without its types: `void at::native::add_kernel<float>(...)` is `add_kernel`. Of torch's element-wise kernels what they do."""
    for sign, name in _KNOWN.items():
        if sign in kernel:
            return name
    return kernel.removeprefix("void ").split("<")[0].split("(")[0].rsplit("::", 1)[-1]


_KNOWN: Mapping[str, str] = {
    IDLE: IDLE,
    "nvjet": GEMM,
    "distribution_elementwise": "exponential noise",
    "CUDAFunctor_add": "add",
    "CUDAFunctorOnSelf_add": "add",
    "indexSelect": "gather",
    "vectorized_gather": "gather",
    "index_elementwise": "gather",
    "ArgMaxOps": "argmax",
    "CatArrayBatchedCopy": "concatenate",
    "unrolled_elementwise_kernel<at::native::direct_copy": "convert",
    "copy_kernel": "copy",
    "Memcpy": "copy",
    "memcpy": "copy",
    "Memset": "memset",
    "FillFunctor": "fill",
    "LoadWithCast": "convert",
}


def anatomy_table(run: Run | None) -> str:
    """A Markdown table: launches, time in kernels and between them, bytes of W2 and their floor, for a step of every arm."""
    if run is None:
        return "Not measured yet."
    rows = [
        "| arm | launches a step | in kernels, µs | between, µs | W2 read a step, MB | at HBM's peak, µs |",
        "|---|---|---|---|---|---|",
    ]
    for variant, step in steps(run).items():
        idle = sum(part.time_us.value for part in step.parts if part.kernel == IDLE)
        rows.append(
            f"| `{variant}` | {step.launches:g} | {step.busy_us:.1f} | {idle:.1f} | {step.streamed_bytes / 1e6:.1f} | {step.floor_us:.1f} |"
        )
    return "\n".join(rows)


def _step(run: Run, variant: str, rows: pd.DataFrame) -> Step:
    short, long = sorted(int(length) for length in rows["steps"].unique())
    rows = rows.assign(kernel=rows["kernel"].map(short_name))
    more = long - short
    parts = [_part(str(kernel), of, short, long, more) for kernel, of in rows.groupby("kernel", sort=False)]
    parts = [part for part in parts if part.launches or part.kernel == IDLE or part.time_us.value > GROWS_US]
    parts.sort(key=lambda part: (part.kernel == IDLE, -part.time_us.value))
    streamed = int(run.manifest["resources"].get(variant, {}).get("streamed_bytes", 0))
    return Step(tuple(parts), streamed, streamed / (float(run.manifest["config"]["device"]["hbm_gb_s"]) * 1e3))


def _part(kernel: str, rows: pd.DataFrame, short: int, long: int, more: int) -> Part:
    """Per replica, since a difference is taken within a process."""
    by = rows.groupby(["replica", "steps"])[["launches", "time_us"]].sum().unstack("steps", fill_value=0)
    launches = (by["launches"].get(long, 0) - by["launches"].get(short, 0)) / more
    times = (by["time_us"].get(long, 0.0) - by["time_us"].get(short, 0.0)) / more
    return Part(kernel, float(np.median(launches)), bootstrap(np.asarray(times, dtype=np.float64), median))
