from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from experiments import record, walk_latency
from experiments.compose import compose
from experiments.convert import ConfigError
from experiments.execute import execute
from experiments.outcome import Outcome, Row, Status
from experiments.plan import Plan
from experiments.replicas import Part
from experiments.schema import HeadConfig, Timing, Variant, WalkLatency
from experiments.walk_latency import Cell
from experiments.workload import Arm, Workload, create
from kernels.device import load
from kernels.walk import Limits, Unsupported

ARMS = (Variant("bits", "reference"), Variant("resident", "resident_sm90"))
GRID = [(steps, batch, temperature) for steps in (1, 3) for batch in (1, 2) for temperature in (0.0, 1.0)]


@pytest.fixture
def latency(plan: Plan) -> Plan:
    timing = Timing(rounds=2, warmup=1, kernel_replays=0)
    ask = WalkLatency(ARMS, steps=(1, 3), batches=(1, 2), temperatures=(0.0, 1.0), replicas=2, replica_timeout_s=120, timing=timing)
    return replace(plan, config=replace(plan.config, experiment=ask))


def _place(row: Row) -> tuple[int, int, float]:
    return row["steps"], row["batch"], row["temperature"]


def test_replicas_in_fresh_processes_become_one_record(latency: Plan) -> None:
    run = record.load(execute(latency).folder)
    cells = run.tables["cells"].to_pylist()
    assert Counter(_place(row) for row in cells) == dict.fromkeys(GRID, 2 * 2)
    ended = {(row["variant"], row["temperature"], row["status"]) for row in cells}
    assert ended == {("bits", 0.0, "ok"), ("bits", 1.0, "ok"), ("resident", 0.0, "unsupported"), ("resident", 1.0, "unsupported")}
    samples = run.tables["samples"].to_pylist()
    assert Counter((*_place(row), row["l2"], row["replica"]) for row in samples) == {
        (*place, l2, replica): 2 for place in GRID for l2 in ("cold", "hot") for replica in (0, 1)
    }
    assert set(run.meta["resources"]) == {f"bits.{Cell(*place)}" for place in GRID}
    assert run.meta["protocol"]["replicas"] == 2


def _serve(monkeypatch: pytest.MonkeyPatch, refuse: Callable[[str, Limits], bool] = lambda label, limits: False) -> list[Limits]:
    """Every arm is the oracle, but for those that `refuse` says. Returns the limits that were asked for, as they come."""
    asked: list[Limits] = []

    def prepare(self: Workload, label: str, backend: str, options: Mapping[str, Any], limits: Limits | None = None) -> Arm:
        assert limits is not None
        asked.append(limits)
        if refuse(label, limits):
            raise Unsupported(f"no {label} here")
        made = create("reference", {})
        return Arm(label, made, made.prepare(self.head, limits, self.config.device))

    monkeypatch.setattr(Workload, "prepare", prepare)
    return asked


def test_every_cell_is_prepared_for_itself_checked_and_timed_with_all_its_arms(latency: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _serve(monkeypatch)
    found = walk_latency.run_replica(latency, 0)
    assert Counter(asked) == {Limits(batch, steps, sampling=temperature > 0): 2 for steps, batch, temperature in GRID}
    assert {(*_place(row), row["status"], row["tokens"]) for row in found.tables["cells"]} == {
        (steps, batch, temperature, "ok", 2 * steps * batch) for steps, batch, temperature in GRID
    }
    counts = Counter((*_place(row), row["variant"], row["l2"]) for row in found.tables["samples"])
    assert counts == {(*place, arm, l2): 2 for place in GRID for arm in ("bits", "resident") for l2 in ("cold", "hot")}
    for place in GRID:  # a cell's arms are interleaved
        rows = [row for row in found.tables["samples"] if _place(row) == place and row["round"] == 0]
        assert sorted(row["order"] for row in rows) == [0, 1, 2, 3]


def test_cells_come_in_another_order_in_every_replica(latency: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _serve(monkeypatch, lambda label, limits: True)  # what is not served takes no time
    for replica in (0, 0, 1):
        walk_latency.run_replica(latency, replica)
    first, again, other = (asked[i : i + len(asked) // 3] for i in range(0, len(asked), len(asked) // 3))
    assert first == again != other


def test_an_arm_that_cannot_serve_a_cell_is_a_row_with_its_reason_beside_the_others(latency: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    _serve(monkeypatch, lambda label, limits: label == "resident" and limits.max_batch > 1)
    found = walk_latency.run_replica(latency, 0)
    ended = {(row["variant"], row["batch"], row["status"], row["reason"]) for row in found.tables["cells"]}
    assert ended == {
        ("bits", 1, "ok", ""),
        ("bits", 2, "ok", ""),
        ("resident", 1, "ok", ""),
        ("resident", 2, "unsupported", "no resident here"),
    }
    assert {(row["variant"], row["batch"]) for row in found.tables["samples"]} == {("bits", 1), ("bits", 2), ("resident", 1)}
    assert not [name for name in found.resources if name.startswith("resident") and "bs2" in name]


def _run(plan: Plan, monkeypatch: pytest.MonkeyPatch, *parts: Part) -> Outcome:
    monkeypatch.setattr(walk_latency, "run_replicas", lambda plan, count, timeout_s: list(parts))
    return walk_latency.run(plan)


def test_a_lost_replica_is_a_row_for_every_arm_of_every_cell(latency: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = json.loads(json.dumps(walk_latency.run_replica(latency, 1).tables))
    outcome = _run(latency, monkeypatch, Part(0, Status.TIMEOUT, "did not finish"), Part(1, Status.OK, "", tables, {"notes": []}))
    lost = [row for row in outcome.tables["cells"] if row["replica"] == 0]
    assert Counter(_place(row) for row in lost) == dict.fromkeys(GRID, 2)
    assert {(row["status"], row["reason"]) for row in lost} == {("timeout", "did not finish")}
    assert (outcome.status, {row["replica"] for row in outcome.tables["samples"]}) == (Status.OK, {1})


def test_a_run_without_one_right_cell_says_what_failed_and_not_what_was_never_meant(latency: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    part = walk_latency.run_replica(latency, 0)
    rows = part.tables["cells"]
    refused = [row for row in rows if row["variant"] == "resident"]
    assert _run(latency, monkeypatch, Part(0, Status.OK, "", {"cells": refused})).status is Status.UNSUPPORTED
    broken = {**refused[-1], "status": "incorrect", "reason": "request 0"}
    outcome = _run(latency, monkeypatch, Part(0, Status.OK, "", {"cells": [*refused, broken]}))
    assert (outcome.status, outcome.reason) == (Status.INCORRECT, "request 0")


def test_a_cell_is_named_as_in_the_claims() -> None:
    assert [str(cell) for cell in (Cell(7, 16, 0.0), Cell(15, 1, 1.0), Cell(5, 64, 0.6))] == [
        "g7.bs16.greedy",
        "g15.bs1.t1",
        "g5.bs64.t0.6",
    ]


def test_a_part_of_the_grid_is_asked_for_on_the_command_line() -> None:
    made = compose(["experiment=walk_latency", "device=h200", "head=markov_v248k", "experiment.steps=[15]", "experiment.temperatures=[1]"])
    ask = made.experiment
    assert isinstance(ask, WalkLatency)
    assert (made.head.vocab, ask.steps, ask.batches, ask.temperatures) == (248_320, (15,), (1, 2, 4, 8, 16, 32, 64), (1.0,))
    whole = compose(["experiment=walk_latency"])
    assert whole.head.vocab == 151_936
    assert whole.experiment == WalkLatency(ask.variants)  # the YAML says what the dataclass says
    assert [variant.label for variant in ask.variants] == ["sglang_folded", "sglang_greedy", "vllm_addmm", "resident"]
    assert compose(["experiment=walk_latency", "head=markov_v129k"]).head.vocab == 129_280


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batches=[1,1]", r"experiment\.batches: needs different ones of at least 1; got \[1, 1\]"),
        ("batches=[]", r"experiment\.batches: needs different ones"),
        ("batches=[0]", r"experiment\.batches: needs different ones of at least 1; got \[0\]"),
        ("temperatures=[-1]", r"experiment\.temperatures: needs different finite ones, 0 for greedy; got \[-1\.0\]"),
        ("temperatures=[1,1]", r"experiment\.temperatures: needs different finite ones"),
        ("temperatures=[]", r"experiment\.temperatures: needs different finite ones"),
        ("steps=[7,7]", r"experiment\.steps: needs different lengths"),
        ("replicas=0", r"experiment\.replicas: must be at least 1"),
    ],
)
def test_a_grid_that_makes_no_sense_is_one_sentence(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        compose(["experiment=walk_latency", f"experiment.{override}"])


def test_a_typo_in_a_variant_is_told_before_anything_runs(latency: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    never: Callable[..., list[Part]] = lambda *_: pytest.fail("a replica was started")  # noqa: E731
    monkeypatch.setattr(walk_latency, "run_replicas", never)
    ask = replace(latency.config.experiment, variants=(Variant("x", "resident_sm90", {"exchang": "pair"}),))
    with pytest.raises(ConfigError, match=r"^experiment\.variants\[0\]\.options\.exchang: unknown key \(did you mean 'exchange'"):
        walk_latency.run(replace(latency, config=replace(latency.config, experiment=ask)))


@pytest.mark.gpu
def test_on_a_gpu_greedy_and_sampled_cells_are_checked_and_timed(latency: Plan) -> None:
    """A small vocabulary at the rank that the kernels have: our walk and the stock arms, one request and eight."""
    import torch

    live = torch.cuda.get_device_name(0)
    device = next((spec for spec in map(load, ("h100", "h200")) if spec.product in live), None)
    if device is None:
        pytest.skip(f"the resident walk needs an H100 or H200; this is {live}")
    ask = replace(compose(["experiment=walk_latency"]).experiment, steps=(4,), batches=(1, 8), timing=Timing(2, 1, 0))
    config = replace(latency.config, device=device, head=HeadConfig("small", 4096, 256), experiment=ask)
    found = walk_latency.run_replica(replace(latency, config=config), 0)
    failed = [row for row in found.tables["cells"] if row["status"] != "ok"]
    assert {(row["variant"], row["temperature"], row["status"]) for row in failed} == {
        (arm, 1.0, "unsupported") for arm in ("sglang_greedy", "vllm_addmm")
    }, failed
    timed = Counter((row["variant"], row["batch"], row["temperature"]) for row in found.tables["samples"])
    assert timed == {
        (arm, batch, temperature): 4
        for batch in (1, 8)
        for arm, temperature in [(arm, 0.0) for arm in ("sglang_folded", "sglang_greedy", "vllm_addmm", "resident")]
        + [(arm, 1.0) for arm in ("sglang_folded", "resident")]
    }
