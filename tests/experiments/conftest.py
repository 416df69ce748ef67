"""A config small enough for milliseconds, and a record to spoil."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from experiments import record
from experiments.outcome import Outcome
from experiments.plan import Plan
from experiments.provenance import Revision, source_digest
from experiments.schema import BackendConfig, Config, HeadConfig, Smoke, Timing
from kernels.device import load

SHA = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A smoke run of the reference at V=64, r=8."""
    timing = Timing(rounds=4, warmup=1, kernel_replays=1)
    return Config(
        device=load("cpu"),
        head=HeadConfig("test", vocab=64, rank=8, w2_std=0.5),
        backend=BackendConfig("reference"),
        experiment=Smoke(steps=(1, 3), timing=timing),
        output=str(tmp_path / "runs"),
    )


@pytest.fixture
def plan(config: Config) -> Plan:
    return Plan(config, ("head=test",), Revision(SHA, dirty=False, digest=source_digest()))


@pytest.fixture
def make_run(plan: Plan) -> Callable[..., record.Run]:
    """A valid run with one ok cell and two samples; keyword arguments change run.json, `cell` and `sample` their rows."""

    def make(cell: dict[str, Any] | None = None, sample: dict[str, Any] | None = None, **meta: Any) -> record.Run:
        named = {
            "device": "cpu", "head": "test", "backend": "reference", "variant": "reference", "vocab": 64, "rank": 8, "steps": 3, "batch": 1,
            "temperature": 0.0, "inputs": "synthetic", "replica": 0,
        }  # fmt: skip
        timed = {**named, "l2": "cold", "scope": "call", "round": 0, "order": 0, "time_us": 5.0, "clock_mhz": 0.0, "valid": True}
        found = {"status": "ok", "reason": "", "rounding": "twice", "tokens": 6, "near_ties": 0, "floor_us": 0.0}
        samples = [{**timed, **(sample or {})}, {**timed, "l2": "hot", "order": 1}]
        run_id = "20260101T000000Z-cpu-01234567"
        base = {
            "schema_version": 1, "run_id": run_id, "experiment": "smoke", "status": "ok", "reason": "", "config": plan.config.as_dict(),
            "config_sha256": plan.config.sha256, "argv": [], "seed": 0, "revision": plan.revision.as_dict(), "device": {"spec": "cpu"},
            "software": {}, "protocol": {}, "resources": {}, "tables": {},
            "started_at": datetime.now(UTC).isoformat(), "finished_at": datetime.now(UTC).isoformat(),
        }  # fmt: skip
        tables = {
            "samples": record.table("samples", samples, run_id),
            "cells": record.table("cells", [{**named, **found, **(cell or {})}], run_id),
        }
        return record.Run({**base, **meta}, tables)

    return make


@pytest.fixture
def outcome_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Plan], Outcome]], None]:
    """Let the experiment `smoke` be another function."""
    return lambda question: monkeypatch.setattr("experiments.smoke.run", question)
