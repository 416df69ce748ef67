"""Small runs in the shape of `results/`, with known slopes: `python -m tests.data.make_runs` writes tests/data/results anew.

Nothing here was measured. The times are lines with a little seeded noise, so that the analysis must give the lines back.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
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
    truth: Mapping[str, tuple[float, float]] | None = None, *, noise_us: float = 0.3, seed: int = 0, lengths: tuple[int, ...] = STEPS
) -> dict[str, pd.DataFrame]:
    """samples, cells and step_clocks of a step_slope run over `lengths` whose cold complete calls lie on the lines of `truth`."""
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
            of = common | {"backend": BACKENDS.get(variant, "resident_sm90"), "variant": variant, "replica": replica}
            for steps in lengths:
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


GRID = {"markov_v129k": (129_280, (5,)), "markov_v152k": (151_936, (7, 16)), "markov_v248k": (248_320, (15,))}
GRID_BATCHES = (1, 2, 4, 8, 16, 32, 64)
GRID_REPLICAS = 3
GREEDY_ONLY = ("sglang_greedy", "vllm_addmm", "vllm_loop_greedy")
SAMPLING_ONLY = ("vllm_loop_gumbel", "vllm_inverse_cdf")
ARMS = ("sglang_folded", "sglang_greedy", "vllm_addmm", "resident")
RIVALS = (*ARMS, "vllm_loop_greedy", *SAMPLING_ONLY, "vllm_int8_walk")
RIVALS_TRUTH = TRUTH | {
    "vllm_loop_greedy": (9.0, 41.3),
    "vllm_loop_gumbel": (10.0, 49.5),
    "vllm_inverse_cdf": (7.0, 40.1),
    "vllm_int8_walk": (9.3, 7.3),
}


def grid_time(variant: str, vocab: int, steps: int, batch: int, temperature: float) -> float:
    """Us of a complete call with cold L2: a little below the lines of TRUTH at V = 151,936, one request, greedy, and growing from there."""
    entry, slope = RIVALS_TRUTH[variant]
    return 0.955 * (entry + slope * steps * (1 + 0.02 * (batch - 1)) * (1.2 if temperature else 1.0)) * vocab / 151_936


def walk_latency_tables(
    head: str,
    steps: tuple[int, ...],
    batches: tuple[int, ...] = GRID_BATCHES,
    temperatures: tuple[float, ...] = (0.0, 1.0),
    refused: Mapping[tuple[str, int, int, float], str] | None = None,
    factor: float = 1.0,
    arms: tuple[str, ...] = ARMS,
) -> dict[str, pd.DataFrame]:
    """samples and cells of a walk_latency run, or one like it. `refused`: reasons by (variant, steps, batch, temperature); `factor` makes all walks slower."""
    rng, vocab = np.random.default_rng(1), GRID[head][0]
    refused = dict(refused or {})
    samples, cells = [], []
    for replica, length, batch, temperature in (
        (replica, length, batch, temperature)
        for replica in range(GRID_REPLICAS)
        for length in steps
        for batch in batches
        for temperature in temperatures
    ):
        for variant in arms:
            if temperature and variant in GREEDY_ONLY:
                refused[variant, length, batch, temperature] = f"{variant} is greedy only and cannot serve temperature > 0."
            if not temperature and variant in SAMPLING_ONLY:
                refused[variant, length, batch, temperature] = f"{variant} only samples."
            reason = refused.get((variant, length, batch, temperature), "")
            of = {
                "device": "h200",
                "head": head,
                "backend": BACKENDS.get(variant, variant),
                "variant": variant,
                "vocab": vocab,
                "rank": 256,
            }
            of |= {"steps": length, "batch": batch, "temperature": temperature, "inputs": "synthetic", "replica": replica}
            status = "unsupported" if reason else "ok"
            found = {"rounding": "int8", "tokens": 2 * length * batch, "near_ties": 0, "floor_us": 1.0}
            cells.append(of | {"status": status, "reason": reason} | found)
            for l2, number in ((l2, number) for l2 in ("cold", "hot") for number in range(0 if reason else 3)):
                time = factor * grid_time(variant, vocab, length, batch, temperature) - (4.0 if l2 == "hot" else 0.0) + rng.normal(0, 0.1)
                of_sample = {"l2": l2, "scope": "call", "round": number, "order": len(samples) % 8}
                samples.append(of | of_sample | {"time_us": time, "clock_mhz": 1975.0, "valid": True})
    return {"samples": pd.DataFrame(samples), "cells": pd.DataFrame(cells)}


def walk_latency(root: Path, head: str, *, run_id: str = "20260101T000000Z-h200-00000000", **grid: Any) -> Path:
    """A walk_latency run on an H200 of the paper's lengths at `head`, or of a part of its grid."""
    tables = walk_latency_tables(head, grid.pop("steps", GRID[head][1]), **grid)
    return write_run(root, "walk_latency", tables, run_id=run_id, device={"spec": "h200", "name": "NVIDIA H200"})


def rivals(root: Path, head: str, *, run_id: str = "20260101T000000Z-h200-00000000", **grid: Any) -> Path:
    """A rivals run on an H200, likewise."""
    tables = walk_latency_tables(head, grid.pop("steps", GRID[head][1]), arms=RIVALS, **grid)
    return write_run(root, "rivals", tables, run_id=run_id, device={"spec": "h200", "name": "NVIDIA H200"})


# kernel: launches and us a step of SGLang's default walk, and what the whole walk has once
ANATOMY = {
    "nvjet_sm90_tst_512x8_64x3_2x1_v_bz_TNT": (1, 33.0, 0.0),
    "_race_in_tile": (1, 4.5, 0.0),
    "void at::CUDAFunctor_add<f>()": (1, 2.0, 0.0),
    "small": (2, 0.8, 3.0),
}
ANATOMY |= {"(between kernels)": (0, 5.5, 1.0)}


def step_anatomy(root: Path, head: str = "markov_v248k", *, run_id: str = "20260101T000000Z-h200-00000000") -> Path:
    """A step_anatomy run on an H200 of one arm."""
    tables = walk_latency_tables(head, (7, 15), (1,), (0.0,), arms=("sglang_folded",))
    of = {"device": "h200", "head": head, "backend": "sglang_folded", "variant": "sglang_folded", "vocab": 248_320, "rank": 256}
    of |= {"batch": 1, "temperature": 0.0, "inputs": "synthetic", "l2": "cold"}
    rows = [
        of
        | {
            "steps": steps,
            "replica": replica,
            "kernel": kernel,
            "launches": launches * steps,
            "time_us": (1 + 0.01 * replica) * time_us * steps + once,
        }
        for replica in range(GRID_REPLICAS)
        for steps in (7, 15)
        for kernel, (launches, time_us, once) in ANATOMY.items()
    ]
    device, resources = {"spec": "h200", "name": "NVIDIA H200"}, {"sglang_folded": {"streamed_bytes": 127_139_840}}
    tables |= {"step_kernels": pd.DataFrame(rows)}
    return write_run(root, "step_anatomy", tables, run_id=run_id, device=device, resources=resources)


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


def packing_map(root: Path, *, run_id: str = "20260101T000000Z-cpu-00000000") -> Path:
    """One tile of rank 128: where the lanes of an m16n8k32 hold its bytes, at batch 1 and 4, and row 5 of random codes."""
    rng = np.random.default_rng(7)
    code, hi, lo = (rng.integers(-127, 128, 128) for _ in range(3))
    weight, latent = code * 0.001, (256 * hi + lo) * 1e-4
    hi_sum, lo_sum = int(code @ hi), int(code @ lo)
    bias = (256 * hi_sum + lo_sum) * 1e-7
    found = {
        "head": "toy",
        "vocab": 16,
        "rank": 128,
        "row": 5,
        "previous": 3,
        "hi_sum": hi_sum,
        "lo_sum": lo_sum,
        "sum": 256 * hi_sum + lo_sum,
    }
    found |= {"weight_scale": 0.001, "latent_scale": 1e-4, "base": -1.5, "bias": bias, "logit": bias - 1.5}
    tables = {
        "packing": pd.DataFrame([row for batch in (1, 4) for lane in range(32) for row in _lane_bytes(batch, lane)]),
        "plane_codes": pd.DataFrame({"k": range(128), "weight": weight, "code": code, "latent": latent, "hi": hi, "lo": lo}),
        "plane_sums": pd.DataFrame([found]),
    }
    return write_run(root, "packing_map", tables, run_id=run_id, device={"spec": "cpu", "name": ""})


def _lane_bytes(batch: int, lane: int) -> Iterator[dict[str, Any]]:
    """What one lane holds of A, B and D; chunk t + 4 (k_step / 2) of the row or latent, its half k_step % 2."""
    group, thread = divmod(lane, 4)
    for k_step in range(4):
        at = {"batch": batch, "k_step": k_step, "lane": lane}
        for register, byte in np.ndindex(4, 4):
            upper, k = divmod(register, 2)[::-1]
            column = 4 * thread + 16 * k + byte
            held = 16 * (thread + 4 * (k_step // 2)) + 8 * (k_step % 2) + 4 * k + byte
            of = {"operand": "a", "register": register, "byte": byte, "row": group + 8 * upper, "column": column}
            yield at | of | {"k": held, "plane": "", "request": -1}
            if not upper:
                of = {"operand": "b", "register": k, "byte": byte, "row": column, "column": group}
                yield at | of | {"k": held, "plane": ("hi", "lo")[group % 2], "request": group // 2 % batch}
    for register in range(4):
        of = {"batch": batch, "k_step": -1, "lane": lane, "operand": "d", "register": register, "byte": 0}
        place = {"row": group + 8 * (register // 2), "column": 2 * thread + register % 2, "k": -1}
        yield of | place | {"plane": ("hi", "lo")[register % 2], "request": thread % batch}


# protocol: whether PTX promises it, then us a step among 8, 66 and 132 CTAs; None where it cannot run
EXCHANGES: dict[str, tuple[bool, tuple[float | None, ...]]] = {
    "pair": (False, (0.47, 0.66, 0.82)),
    "pair_acquire": (True, (0.98, 1.12, 1.25)),
    "striped_2": (False, (0.48, 0.64, 0.80)),
    "striped_4": (False, (0.49, 0.63, 0.79)),
    "striped_8": (False, (0.50, 0.64, 0.80)),
    "cluster_2": (False, (0.62, 0.74, 0.81)),
    "cluster_4": (False, (0.60, None, None)),
    "cluster_8": (False, (0.66, None, None)),
    "mailboxes": (True, (0.88, 1.20, 1.45)),
    "grid_sync": (True, (1.01, 1.08, 1.14)),
}
EXCHANGE_CTAS = (8, 66, 132)


def exchange_tables(truth: Mapping[str, tuple[bool, tuple[float | None, ...]]] | None = None) -> dict[str, pd.DataFrame]:
    """exchange, exchange_cells and exchange_clocks of a run whose cold calls lie on the slopes of `truth`, entry 3.5 us."""
    rng = np.random.default_rng(5)
    samples, cells, clocks = [], [], []
    for replica in range(REPLICAS):
        for protocol, (promised, slopes) in (EXCHANGES if truth is None else truth).items():
            for ctas, slope in zip(EXCHANGE_CTAS, slopes, strict=True):
                named = {"protocol": protocol, "ctas": ctas, "replica": replica}
                process = 0.0 if slope is None else slope * rng.normal(1, 0.01)
                for steps in (8, 16, 24, 32):
                    of = named | {"device": "h200", "promised": promised, "steps": steps}
                    reason = "" if slope else _no_room(ctas, int(protocol.removeprefix("cluster_")))
                    cells.append(of | {"status": "ok" if slope else "unsupported", "reason": reason, "tokens": 2 * steps, "floor_us": 0.0})
                    for l2, number in ((l2, number) for l2 in ("cold", "hot") for number in range(3 if slope else 0)):
                        time = 3.5 + (0.6 if l2 == "cold" else 0.0) + process * steps + rng.normal(0, 0.02)
                        at = {"l2": l2, "scope": "call", "round": number, "order": len(samples) % 40}
                        samples.append(of | at | {"time_us": time, "clock_mhz": 1975.0, "valid": True})
                if slope:
                    clocks.append(named | {"steps": 32, "time_us": process * 1.01, "clock_mhz": 1970.0})
    return {"exchange": pd.DataFrame(samples), "exchange_cells": pd.DataFrame(cells), "exchange_clocks": pd.DataFrame(clocks)}


def _no_room(ctas: int, cluster: int) -> str:
    if ctas % cluster:
        return f"exchange_probe: {ctas} CTAs are no whole number of clusters of {cluster}."
    return f"exchange_probe needs {ctas // cluster} clusters of {cluster} resident at once; this GPU holds 32 of them; take smaller clusters, or fewer CTAs."


def exchange(root: Path, *, run_id: str = "20260101T000000Z-h200-00000000") -> Path:
    """An exchange run on an H200: clusters of 4 and 8 among 8 CTAs only."""
    leans = "a 16-byte load that sees both words at one moment"
    described = {name: {"what": "", "leans_on": "" if promised else leans} for name, (promised, _) in EXCHANGES.items()}
    protocol = {"rounds": 3, "replicas": REPLICAS, "protocols": described}
    device = {"spec": "h200", "name": "NVIDIA H200"}
    return write_run(root, "exchange", exchange_tables(), run_id=run_id, device=device, protocol=protocol)


# tiles of a warp in registers, shared memory and streamed; bytes a thread spills; entry and slope in us, measured and expected
SPLITS = (
    ((0, 4, 5), 0, (12.9, 3.41), (11.4, 3.77)),
    ((1, 4, 4), 0, (13.1, 3.05), (11.7, 3.43)),
    ((2, 4, 3), 0, (13.3, 2.79), (12.1, 3.10)),
    ((3, 6, 0), 0, (14.0, 2.52), (13.8, 2.46)),
    ((4, 5, 0), 0, (13.8, 2.31), (13.8, 2.30)),
    ((5, 4, 0), 0, (13.7, 2.16), (13.8, 2.14)),
    ((6, 3, 0), 0, (13.8, 2.04), (13.8, 2.01)),
    ((7, 2, 0), 48, (14.3, 2.38), (13.8, 2.01)),
    ((8, 1, 0), 232, (15.2, 3.02), (13.8, 2.01)),
    ((9, 0, 0), 440, None, (13.8, 2.01)),
)
NO_LAUNCH = "RuntimeError: cuLaunchKernelEx: out of resources"


def placement_tables() -> dict[str, pd.DataFrame]:
    """samples, cells and plans of a placement run whose cold complete calls lie on the lines of SPLITS; the last split failed."""
    truth = {f"rf{near}": line for (near, _, _), _, line, _ in SPLITS if line}
    tables = step_slope_tables(truth, noise_us=0.1, lengths=(1, 7, 16))
    lost = tables["cells"][tables["cells"]["variant"] == "rf8"].assign(variant="rf9", status="runtime_error", reason=NO_LAUNCH, tokens=0)
    tables["cells"] = pd.concat([tables["cells"], lost])
    named = {"device": "h200", "head": "markov_v152k", "backend": "resident_sm90", "vocab": 151_936, "rank": 256, "batch": 1}
    plans = []
    for (near, shared, streamed), spilled, _, (entry_us, step_us) in SPLITS:
        split = {
            "register_tiles": 8 * near,
            "shared_tiles": 8 * shared,
            "streamed_tiles": 8 * streamed,
            "base_slots": 4 if streamed else 16,
        }
        kernel = {
            "registers": min(255, 78 + 30 * near),
            "spill_bytes": spilled,
            "smem_bytes": 213_344 if streamed else min(44_528 + 32_768 * shared, 231_792),
        }
        of = named | {"variant": f"rf{near}", "max_steps": 16, "ctas": 132, "reason": "", "unpriced": ""}
        plans.append(of | split | kernel | {"entry_us": entry_us, "step_us": step_us})
    return tables | {"plans": pd.DataFrame(plans)}


def placement(root: Path, tables: Mapping[str, pd.DataFrame] | None = None, *, run_id: str = "20260101T000000Z-h200-00000000") -> Path:
    """A placement run on an H200."""
    device = {"spec": "h200", "name": "NVIDIA H200"}
    return write_run(root, "placement", placement_tables() if tables is None else tables, run_id=run_id, device=device)


# head: per cent of W2 and of the bias in int8, e4m3 and e5m2; standard deviations of a row up to its largest weight; flips in 160 walks
QUANTIZED: dict[str, tuple[tuple[float, float, float], tuple[float, float, float], float, tuple[int, int, int]]] = {
    "trained_a": ((0.58, 2.64, 5.28), (0.60, 2.70, 5.30), 3.0, (1, 3, 6)),
    "trained_b": ((0.62, 2.66, 5.30), (0.64, 2.72, 5.40), 3.8, (0, 4, 5)),
}


def quantization_tables(weights: str = "checkpoint", heads: tuple[str, ...] = tuple(QUANTIZED)) -> dict[str, pd.DataFrame]:
    """All tables of a quantization run: errors as QUANTIZED has them, rows of W2 cut out of a normal distribution."""
    errors, flips, gaps, magnitudes = [], [], [], []
    for head in heads:
        w2, bias, reach, flipped = QUANTIZED[head]
        of = {"head": head, "weights": weights, "vocab": 1000, "rank": 64}
        for place, form in enumerate(("int8", "e4m3", "e5m2")):
            errors += [
                of | {"matrix": matrix, "format": form, "tokens": "", "count": 1000, "relative_error": w2[place] / 100}
                for matrix in ("w2", "w1")
            ]
            for tokens, factor in (("random", 1.0), ("used", 1.1)):
                error = {"count": 512, "relative_error": factor * bias[place] / 100}
                errors.append(of | {"matrix": "bias", "format": form, "tokens": tokens} | error)
            for step in range(4):
                flips.append({"head": head, "format": form, "inputs": "rounds", "step": step, "walks": 160, "flips": flipped[place]})
        for form, error in (("int8_one_plane", 0.0056), ("int8_two_planes", 2e-5)):
            errors.append(of | {"matrix": "latent", "format": form, "tokens": "random", "count": 512, "relative_error": error})
        for step, place in np.ndindex(4, 65):
            high = 0.125 * (place + 1) if place < 64 else float(np.finfo(np.float32).max)
            gaps.append(
                {"head": head, "inputs": "rounds", "step": step, "low": 0.125 * place, "high": high, "count": 160 // 2 ** (place + 1)}
            )
        for k in range(449):
            share = math.erf(reach * k / 448 / math.sqrt(2)) / math.erf(reach / math.sqrt(2))
            magnitudes.append({"head": head, "weights": weights, "magnitude": k / 448, "share": share})
    named = {"quantization": errors, "argmax_flips": flips, "top2_gaps": gaps, "magnitudes": magnitudes}
    return {name: pd.DataFrame(rows) for name, rows in named.items()}


def quantization(root: Path, tables: Mapping[str, pd.DataFrame] | None = None, *, run_id: str = "20260101T000000Z-cpu-00000000") -> Path:
    """A quantization run of two trained heads on the CPU."""
    chosen = quantization_tables() if tables is None else tables
    return write_run(root, "quantization", chosen, run_id=run_id, device={"spec": "cpu", "name": ""})


# steps, temperature: which share of its rounds our arm loses a token in; None where both arms' rounds are drawn apart, with the same rates
ACCEPTANCE: dict[tuple[int, float], float | None] = {(7, 0.0): 0.0, (7, 1.0): None, (16, 0.0): 0.08, (16, 1.0): None}
ACCEPTANCE_SOURCES = ("gsm8k", "math", "aime", "humaneval", "mbpp", "livecode", "mt_bench", "alpaca", "arena")
ACCEPTANCE_BATCHES = (1, 16, 64)
OTHER_TEXTS = 2  # prompts whose greedy text our arm changes at 16 steps


def acceptance_tables(
    truth: Mapping[tuple[int, float], float | None] | None = None,
    *,
    prompts: int = 45,
    batches: tuple[int, ...] = ACCEPTANCE_BATCHES,
    pair: str = "tiny",
    seed: int = 12,
) -> dict[str, pd.DataFrame]:
    """acceptance and acceptance_positions of two arms and two passes whose rounds follow `truth`; each prompt has its own rate."""
    rng = np.random.default_rng(seed)
    rates = rng.uniform(0.55, 0.9, prompts)
    rows = [
        of | {"pair": pair} | _taken(taken, steps)
        for (steps, temperature), lost in (ACCEPTANCE if truth is None else truth).items()
        for batch in batches
        for number in range(2)
        for of, taken in _acceptance_pass(rng, rates, steps, temperature, lost, batch, number)
    ]
    frame = pd.DataFrame(rows)
    named = [column for column in SCHEMA["tables"]["acceptance_positions"] if column in frame and column != "accepted"]
    positions = []
    for _, group in frame.groupby(named, sort=False):
        first, taken = group.iloc[0], np.concatenate(list(group["taken"]))
        for place in range(first["steps"]):
            positions.append(
                {column: first[column] for column in named}
                | {"position": place, "offered": int((taken >= place).sum()), "accepted": int((taken > place).sum())}
            )
    return {"acceptance": frame.drop(columns="taken"), "acceptance_positions": pd.DataFrame(positions)}


def _acceptance_pass(
    rng: np.random.Generator, rates: np.ndarray, steps: int, temperature: float, lost: float | None, batch: int, number: int
) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """What names a row, and how many tokens each of its rounds accepted: both arms of every prompt in one pass."""
    for prompt, rate in enumerate(rates):
        rounds = 10 + 5 * (prompt % 6)
        default = np.minimum(rng.geometric(1 - rate, rounds) - 1, steps)
        ours = np.minimum(rng.geometric(1 - rate, rounds + prompt % 3) - 1, steps)
        if lost is not None:
            ours = default - ((rng.random(rounds) < lost) & (default > 0))
        for place, (variant, taken) in enumerate((("sglang_folded", default), ("resident", ours))):
            other = variant == "resident" and steps == 16 and prompt < OTHER_TEXTS
            text = f"{prompt} {other}" if temperature == 0 else f"{prompt} {variant} {steps} {batch} {number}"
            yield (
                {"device": "h200", "head": f"tiny_g{steps}", "backend": BACKENDS[variant], "variant": variant, "vocab": 4096, "rank": 64}
                | {"steps": steps, "batch": batch, "temperature": temperature, "pass": number, "order": place if number == 0 else 1 - place}
                | {"prompt": prompt, "source": ACCEPTANCE_SOURCES[prompt % 9], "text_sha256": hashlib.sha256(text.encode()).hexdigest()},
                taken,
            )


def _taken(taken: np.ndarray, steps: int) -> dict[str, Any]:
    rounds, accepted = len(taken), int(taken.sum())
    return {"rounds": rounds, "drafted": steps * rounds, "accepted": accepted, "tokens": accepted + rounds, "taken": taken}


def acceptance(
    root: Path, tables: Mapping[str, pd.DataFrame] | None = None, *, run_id: str = "20260101T000000Z-h200-00000000", **shape: Any
) -> Path:
    """An acceptance run on an H200."""
    device = {"spec": "h200", "name": "NVIDIA H200"}
    return write_run(root, "acceptance", acceptance_tables(**shape) if tables is None else tables, run_id=run_id, device=device)


# us of a certified round: at once, a step, a step that the table does not settle, one that is searched
CERTIFIED = (13.0, 0.4, 1.6, 7.5)
CERTIFIED_SETS = 40
CERTIFIED_GRID = ((7, 1, 0.0), (16, 1, 0.0), (7, 1, 1.0), (16, 1, 1.0), (7, 64, 0.0))
CERTIFIED_ARMS = ("sglang_folded", "vllm_int8_walk", "resident", "certified_sm80")
LAUNCH_US = 1.5


def certified_tables(
    flat: bool = False,
    *,
    vocab: int = 151_936,
    grid: tuple[tuple[int, int, float], ...] = CERTIFIED_GRID,
    sets: int = CERTIFIED_SETS,
    tried: int = 10,
    shares: bool = True,
) -> dict[str, pd.DataFrame]:
    """certified_rounds, cells, certified_dispatch and certified_shares. On `flat` inputs every step is searched, and the dispatcher tries one set in `tried`."""
    rng = np.random.default_rng(21)
    entry, step_us, again_us, searched_us = CERTIFIED
    named = {"device": "h200", "head": "markov_v152k" if flat else "qwen_vocab_markov", "vocab": vocab, "rank": 256}
    named |= {"inputs": "synthetic" if flat else "trained"}
    rounds, replays = [], []
    for steps, batch, temperature in grid:
        again = rng.binomial(steps * batch, 0.16 if temperature else 0.04, sets) if not flat else np.full(sets, steps * batch)
        searched = rng.binomial(again, 0.3) if not flat else again
        for l2, number in ((l2, number) for l2 in ("cold", "hot") for number in range(sets)):
            at = named | {"steps": steps, "batch": batch, "temperature": temperature, "l2": l2, "set": number}
            times = {}
            for variant in CERTIFIED_ARMS:
                ours, saved = variant == "certified_sm80", 4.0 if l2 == "hot" else 0.0
                time = (
                    entry
                    + step_us * steps * batch**0.5
                    + again_us * again[number] / batch**0.5
                    + searched_us * searched[number] / batch**0.5
                )
                times[variant] = (time if ours else grid_time(variant, vocab, steps, batch, temperature)) - saved + rng.normal(0, 0.15)
                counts = {"again": again[number], "searched": searched[number]} if ours else {"again": -1, "searched": -1}
                of = {"backend": BACKENDS.get(variant, variant), "variant": variant, "time_us": times[variant], "order": len(rounds) % 8}
                rounds.append(at | of | counts | {"clock_mhz": 1975.0, "valid": True})
            choice = "serial" if flat and number % tried else "certified"
            both = {"certified_us": times["certified_sm80"], "serial_us": times["resident"]}
            of = {"backend": "certified_sm80", "variant": "certified_sm80", "serial": "resident", "pass": 0, "choice": choice}
            replays.append(at | of | both | {"time_us": both[f"{choice}_us"]})
    timed = pd.DataFrame(rounds)
    cells = timed[[column for column in SCHEMA["tables"]["cells"] if column in timed]].drop_duplicates()
    cells = cells.assign(
        replica=0, status="ok", reason="", rounding="twice", tokens=cells["steps"] * cells["batch"] * sets, near_ties=0, floor_us=2.0
    )
    tables = {"certified_rounds": timed, "cells": cells, "certified_dispatch": pd.DataFrame(replays)}
    return tables | ({"certified_shares": certified_shares(named, flat, sets)} if shares else {})


def unproved(candidates: int, listed: int, temperature: float) -> float:
    """The share of steps that so many rows do not prove."""
    return (0.2 if temperature else 0.04) * (64 / candidates) ** 1.3 * (64 / listed) ** 0.6


def certified_shares(named: Mapping[str, Any], flat: bool = False, sets: int = CERTIFIED_SETS) -> pd.DataFrame:
    """Every step of rounds of 16, by candidates, listed rows and temperature, proved as `unproved` says; a step in 20 is lifted."""
    rng, steps, rows = np.random.default_rng(22), 16, []
    for candidates, listed, temperature in ((m, j, t) for m in (64, 256, 512) for j in (64, 128) for t in (0.0, 1.0)):
        hidden = rng.random((sets, steps)) < (1.0 if flat else unproved(candidates, listed, temperature))
        lifted = (rng.random((sets, steps)) < 0.05) & ~hidden
        of = dict(named) | {"steps": steps, "temperature": temperature, "candidates": candidates, "listed": listed}
        for number, step in np.ndindex(sets, steps):
            found = {"proved": not hidden[number, step], "lifted": bool(lifted[number, step]), "survivors": int(rng.integers(1, 6))}
            rows.append(of | {"set": number, "step": step} | found)
    return pd.DataFrame(rows)


def certified(
    root: Path,
    tables: Mapping[str, pd.DataFrame] | None = None,
    *,
    flat: bool = False,
    run_id: str = "20260101T000000Z-h200-00000000",
    **shape: Any,
) -> Path:
    """A certified run on an H200: of rounds that a trained pair drafted, or of the paper's flat logits."""
    device = {"spec": "h200", "name": "NVIDIA H200"}
    config = {
        "device": {"name": "h200", "hbm_gb_s": 4800.0, "l2_bytes": 62914560},
        "inputs": {"family": "synthetic" if flat else "trained"},
    }
    chosen = certified_tables(flat, **shape) if tables is None else tables
    return write_run(root, "certified", chosen, run_id=run_id, device=device, config=config, protocol={"launch_floor_us": LAUNCH_US})


def write_results(root: Path) -> None:
    """All fixture runs under `root`."""
    acceptance(root)
    placement(root)
    exchange(root)
    step_slope(root)
    walk_latency(root, "markov_v152k", refused={("resident", 16, 64, 1.0): "no room for 64 requests of 16 steps."})
    walk_latency(root, "markov_v248k", run_id="20260101T000100Z-h200-00000001")
    walk_latency(root, "markov_v129k", run_id="20260101T000200Z-h200-00000002", temperatures=(0.0,))
    rivals(root, "markov_v152k", batches=(1, 16, 64))
    rivals(root, "markov_v129k", run_id="20260101T000200Z-h200-00000002", batches=(1, 64), temperatures=(1.0,))
    step_anatomy(root)
    toy_walk(root)
    capacity(root)
    packing_map(root)
    quantization(root)
    certified(root)
    certified(root, flat=True, run_id="20260101T000100Z-h200-00000001", shares=False)


if __name__ == "__main__":
    import shutil

    shutil.rmtree(ROOT / "results", ignore_errors=True)
    write_results(ROOT / "results")
