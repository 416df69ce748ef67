"""Small runs in the shape of `results/`, with known slopes: `python -m tests.data.make_runs` writes tests/data/results anew.

Nothing here was measured. The times are lines with a little seeded noise, so that the analysis must give the lines back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent
SCHEMA = json.loads((ROOT.parent.parent / "results" / "schema.json").read_text())
STEPS = (1, 2, 4, 7, 10, 13, 16)
REPLICAS = 5
BACKENDS = {
    "sglang_folded": "sglang_folded",
    "sglang_greedy": "sglang_greedy",
    "vllm_addmm": "vllm_addmm",
    "streaming_bf16": "streaming_sm90",
    "streaming_int8": "streaming_sm90",
    "resident": "resident_sm90",
}
# variant: entry in us, slope in us a step, for complete calls with cold L2
TRUTH = {
    "sglang_folded": (22.0, 40.6),
    "sglang_greedy": (9.5, 39.4),
    "vllm_addmm": (8.0, 38.1),
    "streaming_bf16": (12.0, 18.6),
    "streaming_int8": (9.6, 8.9),
    "resident": (14.6, 2.45),
}


def write_run(
    root: Path,
    experiment: str,
    tables: Mapping[str, pd.DataFrame],
    *,
    run_id: str,
    device: Mapping[str, Any],
    status: str = "ok",
    **manifest: Any,
) -> Path:
    """A run folder under `root`, as an experiment would publish it. Returns its path."""
    path = root / experiment / run_id
    path.mkdir(parents=True)
    listed = {}
    for name, frame in tables.items():
        frame = frame.assign(run_id=run_id)
        fields = [(column, pa.type_for_alias(alias)) for column, alias in SCHEMA["tables"][name].items()]
        table = pa.Table.from_pandas(frame[[column for column, _ in fields]], schema=pa.schema(fields), preserve_index=False)
        file = path / f"{name}.parquet"
        pq.write_table(table, file)
        listed[name] = {"rows": len(frame), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    data = {
        "schema_version": SCHEMA["schema_version"],
        "run_id": run_id,
        "experiment": experiment,
        "status": status,
        "reason": "",
        "config": {"device": {"name": device["spec"], "hbm_gb_s": 4800.0, "l2_bytes": 62914560}},
        "config_sha256": "0" * 64,
        "argv": [],
        "seed": 0,
        "revision": {"sha": "0" * 40, "dirty": False, "digest": "0" * 64},
        "device": dict(device),
        "software": {},
        "protocol": {"rounds": 3, "replicas": REPLICAS},
        "resources": {},
        "tables": listed,
        "started_at": "2026-01-01T00:00:00Z",
        "finished_at": "2026-01-01T00:01:00Z",
    } | manifest
    (path / "run.json").write_text(json.dumps(data, indent=1))
    return path


def step_slope_tables(
    truth: Mapping[str, tuple[float, float]] | None = None, *, noise_us: float = 0.3, seed: int = 0
) -> dict[str, pd.DataFrame]:
    """samples, cells and step_clocks of a step_slope run whose cold complete calls lie on the lines of `truth`."""
    truth = TRUTH if truth is None else truth
    rng = np.random.default_rng(seed)
    common = {
        "device": "h200",
        "head": "markov_v152k",
        "vocab": 151_936,
        "rank": 256,
        "batch": 1,
        "temperature": 0.0,
        "inputs": "synthetic",
    }
    samples, cells, clocks = [], [], []
    for replica in range(REPLICAS):
        for variant, (entry, slope) in truth.items():
            process = rng.normal(0, noise_us)  # what a process shares: it shifts all its times
            of = common | {"backend": BACKENDS[variant], "variant": variant, "replica": replica}
            for steps in STEPS:
                cells.append(
                    of
                    | {"steps": steps, "status": "ok", "reason": "", "rounding": "int8", "tokens": steps, "near_ties": 0, "floor_us": 1.0}
                )
                for l2, scope, number in (
                    (l2, scope, number) for l2 in ("cold", "hot") for scope in ("call", "kernel") for number in range(3)
                ):
                    saved = (4.0 if l2 == "hot" else 0.0) + (3.0 if scope == "kernel" else 0.0)
                    time = entry + slope * steps - saved + process + rng.normal(0, noise_us)
                    order = len(samples) % 6
                    samples.append(
                        of
                        | {"steps": steps, "l2": l2, "scope": scope, "round": number, "order": order}
                        | {"time_us": time, "clock_mhz": 1975.0, "valid": True}
                    )
        if "resident" in truth:
            slope = truth["resident"][1]
            for step in range(16):
                time = slope * 1.03 + rng.normal(0, 0.01) + (9.0 if step == 0 else 0.0)
                clocks.append(
                    {"backend": "resident_sm90", "variant": "resident", "steps": 16, "replica": replica, "step": step, "time_us": time}
                )
    tables = {"samples": pd.DataFrame(samples), "cells": pd.DataFrame(cells)}
    return tables | ({"step_clocks": pd.DataFrame(clocks)} if clocks else {})


def step_slope(
    root: Path, truth: Mapping[str, tuple[float, float]] | None = None, *, run_id: str = "20260101T000000Z-h200-00000000"
) -> Path:
    """A step_slope run on an H200."""
    resources = {
        "resident": {"entry_bytes": 38_895_616 + 607_744, "streamed_bytes": 0},
        "streaming_int8": {"entry_bytes": 0, "streamed_bytes": 38_895_616},
        "streaming_bf16": {"entry_bytes": 0, "streamed_bytes": 77_791_232},
    }
    device = {"spec": "h200", "name": "NVIDIA H200"}
    return write_run(root, "step_slope", step_slope_tables(truth), run_id=run_id, device=device, resources=resources)


def toy_walk(root: Path, *, run_id: str = "20260101T000000Z-cpu-00000000") -> Path:
    """A three-step walk of a random toy head, V = 12, r = 4, on the CPU."""
    rng = np.random.default_rng(3)
    w1, w2, base = rng.normal(size=(12, 4)), rng.normal(size=(12, 4)), 1.5 * rng.normal(size=(3, 12))
    rows, previous = [], 5
    for step in range(3):
        bias = w2 @ w1[previous]
        token = int(np.argmax(base[step] + bias))
        of = {"head": "toy", "rounding": "never", "vocab": 12, "rank": 4, "step": step, "previous": previous, "token": token}
        rows += [of | {"row": row, "base": base[step, row], "bias": bias[row], "logit": base[step, row] + bias[row]} for row in range(12)]
        previous = token
    return write_run(root, "toy_walk", {"walk_steps": pd.DataFrame(rows)}, run_id=run_id, device={"spec": "cpu", "name": ""})


def capacity(root: Path, *, run_id: str = "20260101T000000Z-cpu-00000000") -> Path:
    """What a resident int8 walk of V = 151,936, r = 256 keeps where on an H200; a B200 is not planned, only its capacities are known."""
    tiers = {
        "h200": {
            "registers": (34_603_008, 25_952_256),
            "shared_memory": (30_818_304, 18_824_608),
            "l2": (62_914_560, 0),
            "hbm": (150_754_820_096, 117_294_592),
        },
        "b200": {
            "registers": (38_797_312, 0),
            "shared_memory": (34_553_856, 0),
            "tensor_memory": (38_797_312, 0),
            "l2": (132_120_576, 0),
            "hbm": (192_000_000_000, 0),
        },
    }
    named = {"head": "markov_v152k", "backend": "resident_sm90", "variant": "resident", "vocab": 151_936, "rank": 256}
    rows = []
    for device, of_device in tiers.items():
        reason = "" if device == "h200" else "resident_sm90 needs sm_90a; device=b200 is sm_100a."
        of = named | {"device": device, "reason": reason}
        rows += [of | {"tier": tier, "capacity_bytes": whole, "used_bytes": used} for tier, (whole, used) in of_device.items()]
    return write_run(root, "capacity", {"placement": pd.DataFrame(rows)}, run_id=run_id, device={"spec": "cpu", "name": ""})


def write_results(root: Path) -> None:
    """All fixture runs under `root`."""
    step_slope(root)
    toy_walk(root)
    capacity(root)


if __name__ == "__main__":
    import shutil

    shutil.rmtree(ROOT / "results", ignore_errors=True)
    write_results(ROOT / "results")
