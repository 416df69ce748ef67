from __future__ import annotations

from dataclasses import replace

import pytest

from experiments import capacity, record
from experiments.convert import ConfigError
from experiments.outcome import Row
from experiments.plan import Plan
from experiments.schema import Capacity, Footprint

V152K = Footprint("markov_v152k", 151936, 256)


def _rows(plan: Plan, *devices: str) -> list[Row]:
    ask = Capacity(devices, (V152K, Footprint("huge", 10**7, 256)))
    return capacity.run(replace(plan, config=replace(plan.config, experiment=ask))).tables["placement"]


def test_capacities_are_those_of_the_whole_chip(plan: Plan) -> None:
    rows = _rows(plan, "h100", "b200")
    found = {(row["device"], row["tier"]): row["capacity_bytes"] for row in rows}
    assert found["h100", "registers"] == 132 * 256 * 1024
    assert found["h100", "shared_memory"] == 132 * 228 * 1024
    assert found["h100", "registers"] + found["h100", "shared_memory"] == pytest.approx(65.4e6, rel=1e-3)  # the paper's number
    assert found["b200", "tensor_memory"] == 148 * 256 * 1024
    assert ("h100", "tensor_memory") not in found
    record.table("placement", rows, "r")


def test_what_is_used_holds_the_weights_and_fits(plan: Plan) -> None:
    rows = [row for row in _rows(plan, "h200") if row["head"] == "markov_v152k"]
    used = {row["tier"]: row["used_bytes"] for row in rows}
    assert used["registers"] + used["shared_memory"] >= 151936 * 256
    assert all(row["used_bytes"] <= row["capacity_bytes"] and row["reason"] == "" for row in rows)
    assert used["hbm"] == 151936 * (256 + 4) + 151936 * 512


def test_what_does_not_fit_keeps_its_capacities_and_says_why(plan: Plan) -> None:
    rows = [row for row in _rows(plan, "h200") if row["head"] == "huge"]
    assert {row["used_bytes"] for row in rows} == {0}
    assert all("10000000" in row["reason"] and row["capacity_bytes"] > 0 for row in rows)


def test_an_unknown_device_is_a_config_error(plan: Plan) -> None:
    with pytest.raises(ConfigError, match="experiment.devices: no device is called 'h300'"):
        _rows(plan, "h300")
