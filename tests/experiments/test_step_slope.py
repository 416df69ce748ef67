from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from experiments import record, step_slope
from experiments.convert import ConfigError
from experiments.execute import execute
from experiments.measure import Measured
from experiments.outcome import Status
from experiments.plan import Plan
from experiments.replicas import Part
from experiments.schema import StepSlope, Timing, Variant
from experiments.workload import Arm, Workload, create
from kernels.walk import Draft, Limits, Resources, WalkInputs

ARMS = (
    Variant("bits", "reference"),
    Variant("int8", "reference", {"rounding": "int8"}),
    Variant("resident", "resident_sm90", clocked=True),
)


@pytest.fixture
def slope(plan: Plan) -> Plan:
    ask = StepSlope(ARMS, steps=(1, 3), replicas=2, replica_timeout_s=120, timing=Timing(rounds=3, warmup=1))
    return replace(plan, config=replace(plan.config, experiment=ask))


def test_replicas_in_fresh_processes_become_one_record(slope: Plan) -> None:
    run = record.load(execute(slope).folder)
    cells = Counter((row["variant"], row["status"], row["replica"]) for row in run.tables["cells"].to_pylist())
    assert cells == {
        (variant, status, replica): 2
        for variant, status in (("bits", "ok"), ("int8", "ok"), ("resident", "unsupported"))
        for replica in (0, 1)
    }
    samples = Counter((row["variant"], row["steps"], row["l2"], row["replica"]) for row in run.tables["samples"].to_pylist())
    assert samples == {(v, s, l2, r): 3 for v in ("bits", "int8") for s in (1, 3) for l2 in ("cold", "hot") for r in (0, 1)}
    orders = {r: [row["order"] for row in run.tables["samples"].to_pylist() if row["replica"] == r] for r in (0, 1)}
    assert orders[0] != orders[1]  # each replica has an order of its own
    assert set(run.meta["resources"]) == {"bits", "int8"}
    assert run.meta["protocol"]["replicas"] == 2


@pytest.mark.parametrize(("temperature", "own"), [(0.0, 1), (1.0, 2)])
def test_lengths_share_a_walk_unless_it_counts_its_rounds(
    temperature: float, own: int, slope: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[object] = []

    class Prepared:
        resources = Resources()

        def launch(self, inputs: WalkInputs, out: Draft) -> None:
            launched.append(self)

    def prepare(self: Workload, label: str, backend: str, options: Mapping[str, Any], limits: Limits) -> Arm:
        assert limits == Limits(1, 3, sampling=temperature > 0)
        return Arm(label, create(backend, options), Prepared())

    monkeypatch.setattr(Workload, "prepare", prepare)
    monkeypatch.setattr(step_slope, "measure", lambda *_: Measured([], [], []))
    ask = StepSlope(ARMS[:1], steps=(1, 3), temperature=temperature)
    for subject in step_slope.take(replace(slope, config=replace(slope.config, experiment=ask)), 0).subjects:
        assert subject.cell["temperature"] == temperature
        subject.launch()
    assert (len(launched), len(set(launched))) == (2, own)


def _parts(monkeypatch: pytest.MonkeyPatch, *parts: Part) -> None:
    monkeypatch.setattr(step_slope, "run_replicas", lambda plan, count, timeout_s: list(parts))


def _good(plan: Plan, replica: int) -> Part:
    outcome = json.loads(json.dumps(step_slope.run_replica(plan, replica).tables))
    return Part(replica, Status.OK, "", outcome, {"notes": [f"note of {replica}"]}, {"bits": {}})


def test_a_lost_replica_is_rows_with_its_reason_beside_the_others_samples(slope: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    _parts(monkeypatch, Part(0, Status.TIMEOUT, "did not finish"), _good(slope, 1))
    outcome = step_slope.run(slope)
    lost = [row for row in outcome.tables["cells"] if row["replica"] == 0]
    assert Counter(row["variant"] for row in lost) == {"bits": 2, "int8": 2, "resident": 2}
    assert {(row["status"], row["reason"]) for row in lost} == {("timeout", "did not finish")}
    assert {row["replica"] for row in outcome.tables["samples"]} == {1}
    assert (outcome.status, outcome.protocol["notes"]) == (Status.OK, ["note of 1"])


def test_when_all_replicas_are_lost_the_run_is_what_they_were(slope: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    _parts(monkeypatch, *(Part(replica, Status.TIMEOUT, "did not finish") for replica in (0, 1)))
    outcome = step_slope.run(slope)
    assert (outcome.status, outcome.reason, outcome.tables["samples"]) == (Status.TIMEOUT, "did not finish", [])


def test_clocks_are_compared_over_all_replicas(slope: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [_good(slope, replica) for replica in (0, 1)]
    for part, clock in zip(parts, (1900.0, 1500.0), strict=True):
        for row in part.tables["samples"]:
            row["clock_mhz"] = clock
    parts[0].tables["samples"].append(dict(parts[0].tables["samples"][0]))  # a majority for the first
    _parts(monkeypatch, *parts)
    rows = step_slope.run(slope).tables["samples"]
    assert {(row["replica"], row["valid"]) for row in rows} == {(0, True), (1, False)}


def test_a_typo_in_a_variant_is_told_before_anything_runs(slope: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    never: Callable[..., list[Part]] = lambda *_: pytest.fail("a replica was started")  # noqa: E731
    monkeypatch.setattr(step_slope, "run_replicas", never)
    ask = StepSlope((Variant("x", "resident_sm90", {"rf_tile": 4}),))
    with pytest.raises(ConfigError, match=r"^experiment\.variants\[0\]\.options\.rf_tile: unknown key \(did you mean 'rf_tiles'"):
        step_slope.run(replace(slope, config=replace(slope.config, experiment=ask)))


def test_a_variant_without_clocks_is_a_note_and_keeps_its_samples(slope: Plan) -> None:
    ask = replace(slope.config.experiment, variants=(Variant("bits", "reference", clocked=True),))
    outcome = step_slope.run_replica(replace(slope, config=replace(slope.config, experiment=ask)), 0)
    assert outcome.tables["step_clocks"] == []
    assert "no in-kernel clocks of bits" in outcome.protocol["notes"][0]
    assert outcome.tables["samples"]
