from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from experiments import placement, record
from experiments.compose import compose
from experiments.convert import ConfigError
from experiments.execute import execute
from experiments.outcome import Outcome, Row
from experiments.plan import Plan
from experiments.schema import HeadConfig, Placement, Timing, Variant
from kernels.backends.resident_sm90 import ResidentSm90
from kernels.build import BuildError, Kernel
from kernels.cost import predict, rates
from kernels.device import DeviceSpec, load
from kernels.placement import MAX_REGISTER_TILES
from kernels.placement import Placement as Placed
from kernels.placement import plan as plan_of

SPLITS = tuple(Variant(f"rf{near}", "resident_sm90", {"rf_tiles": near, "allow_spills": near > 6}) for near in range(10))


def test_the_config_sweeps_a_warps_tiles_and_lets_only_those_spill_that_must() -> None:
    made = compose(["experiment=placement", "device=h200"])
    ask = made.experiment
    assert isinstance(ask, Placement)
    assert (ask.steps, ask.batch, made.head.vocab, made.head.rank) == ((1, 7, 16), 1, 151_936, 256)
    tiles = plan_of(151_936, 256, made.device).rows_per_cta // (16 * 8)
    assert [variant.options["rf_tiles"] for variant in ask.variants] == list(range(tiles + 1))
    for variant in ask.variants:
        assert variant.options.get("allow_spills", False) == (variant.options["rf_tiles"] > MAX_REGISTER_TILES["int8"])


@pytest.fixture
def ask_for(plan: Plan) -> Callable[..., Plan]:
    """A plan of these variants at the paper's head, for a device."""

    def make(*variants: Variant, device: str = "h200", batch: int = 1) -> Plan:
        ask = Placement(variants, batch=batch, replicas=1, timing=Timing(rounds=2, warmup=1, kernel_replays=0))
        head = HeadConfig("markov_v152k", 151_936, 256)
        return replace(plan, config=replace(plan.config, device=load(device), head=head, experiment=ask))

    return make


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Placed]:
    """A machine that has the device, a compiler whose kernels spill from seven tiles on and fail at nine, and a step_slope that times nothing.

    The list is what was compiled.
    """
    asked: list[Placed] = []

    def compile_(self: ResidentSm90, placed: Placed, device: DeviceSpec) -> Kernel:
        asked.append(placed)
        near = placed.register_tiles
        if near == 9:
            raise BuildError("walk_resident does not compile")
        return Kernel("walk_resident", device.arch, b"", min(255, 60 + 32 * near), 48 if near > 6 else 0, 64, "", "")

    monkeypatch.setattr(ResidentSm90, "compile", compile_)
    monkeypatch.setattr(placement, "check_live", lambda device: "cuda")
    monkeypatch.setattr(placement.step_slope, "run", lambda plan: Outcome({"samples": [], "cells": []}))
    return asked


def _plans(plan: Plan) -> dict[str, Row]:
    rows = placement.run(plan).tables["plans"]
    record.table("plans", rows, "r")
    return {row["variant"]: row for row in rows}


def test_every_split_has_its_plan_its_kernel_and_its_expected_cost(ask_for: Callable[..., Plan], compiled: list[Placed]) -> None:
    found = _plans(ask_for(*SPLITS))
    assert list(found) == [variant.label for variant in SPLITS]
    assert len(compiled) == len(SPLITS)
    for near, (row, placed) in enumerate(zip(found.values(), compiled, strict=True)):
        assert row["register_tiles"] == 8 * near
        assert row["register_tiles"] + row["shared_tiles"] + row["streamed_tiles"] == 72
        assert (row["ctas"], row["base_slots"], row["max_steps"], row["unpriced"]) == (132, placed.base_slots, 16, "")
        cost = predict(placed, rates("h200"))
        assert (row["entry_us"], row["step_us"]) == (cost.entry_us, cost.step_us)
        assert (row["spill_bytes"] > 0) == (6 < near < 9)
        static = 64 if near < 9 else 0
        assert row["smem_bytes"] == placed.smem_bytes_per_cta + static <= load("h200").smem_bytes_per_cta
    assert found["rf0"]["streamed_tiles"] > 0 == found["rf6"]["streamed_tiles"]
    assert (found["rf9"]["registers"], found["rf9"]["reason"]) == (0, "walk_resident does not compile")
    assert {row["reason"] for label, row in found.items() if label != "rf9"} == {""}


def test_what_has_no_plan_is_a_row_with_its_reason(ask_for: Callable[..., Plan], compiled: list[Placed]) -> None:
    found = _plans(ask_for(Variant("stream", "streaming_sm90"), Variant("oracle", "reference"), SPLITS[6]))
    assert "backend=streaming_sm90 keeps no weights on chip" in found["stream"]["reason"]
    assert "runs on cpu" in found["oracle"]["reason"]
    for row in (found["stream"], found["oracle"]):
        assert row["unpriced"] == row["reason"]
        assert row["register_tiles"] + row["shared_tiles"] + row["streamed_tiles"] == row["step_us"] == 0
    assert found["rf6"]["reason"] == ""
    assert "needs a smaller experiment.batch" in _plans(ask_for(SPLITS[6], batch=64))["rf6"]["reason"]


def test_a_plan_without_rates_is_not_priced(ask_for: Callable[..., Plan], compiled: list[Placed]) -> None:
    row = _plans(ask_for(SPLITS[6], device="h100"))["rf6"]
    assert (row["reason"], row["step_us"], row["registers"]) == ("", 0.0, 252)
    assert "no rates of device=h100 were measured" in row["unpriced"]


def test_a_typo_is_told_before_anything_is_compiled(ask_for: Callable[..., Plan], compiled: list[Placed]) -> None:
    with pytest.raises(ConfigError, match=r"^experiment\.variants\[1\]\.options\.rf_tile: unknown key"):
        placement.run(ask_for(SPLITS[0], Variant("x", "resident_sm90", {"rf_tile": 1})))
    assert compiled == []


def test_fresh_processes_and_plans_become_one_record(plan: Plan) -> None:
    ask = Placement(
        (Variant("bits", "reference"), SPLITS[6]), steps=(1, 3), replicas=1, replica_timeout_s=120, timing=Timing(rounds=2, warmup=1)
    )
    run = record.load(execute(replace(plan, config=replace(plan.config, experiment=ask))).folder)
    assert run.meta["experiment"] == "placement"
    ended = Counter((row["variant"], row["status"]) for row in run.tables["cells"].to_pylist())
    assert ended == {("bits", "ok"): 2, ("rf6", "unsupported"): 2}
    assert {row["variant"] for row in run.tables["samples"].to_pylist()} == {"bits"}
    reasons = {row["variant"]: row["reason"] for row in run.tables["plans"].to_pylist()}
    assert "resident_sm90 runs on sm_90a; device=cpu is cpu" in reasons["rf6"]
    assert "reference keeps no weights on chip" in reasons["bits"]
