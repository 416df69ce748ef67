from __future__ import annotations

from collections import Counter
from dataclasses import replace

from experiments import record
from experiments.compose import compose
from experiments.execute import execute
from experiments.plan import Plan
from experiments.schema import Rivals, Timing, Variant, WalkLatency
from experiments.workload import create
from kernels.registry import backends

# an oracle, half of an explanation (see step_slope), and a walk whose time depends on the data (see certified)
OURS_ONLY = {"reference", "streaming_sm90", "certified_sm80", "fixed_point_sm90"}


def test_the_config_asks_every_backend_on_the_grid_of_walk_latency() -> None:
    ask, grid = (compose([f"experiment={name}", "device=h200"]).experiment for name in ("rivals", "walk_latency"))
    assert isinstance(ask, Rivals)
    assert isinstance(grid, WalkLatency)
    assert (ask.steps, ask.batches, ask.temperatures) == (grid.steps, grid.batches, grid.temperatures)
    assert {variant.backend for variant in ask.variants} == set(backends()) - OURS_ONLY
    for variant in ask.variants:
        create(variant.backend, variant.options)
    ours = list(grid.variants)
    assert all(variant in ask.variants for variant in ours), "the arms of walk_latency under the same names"


def test_fresh_processes_become_one_record(plan: Plan) -> None:
    arms = (Variant("bits", "reference"), Variant("resident", "resident_sm90"))
    timing = Timing(rounds=2, warmup=1, kernel_replays=0)
    ask = Rivals(arms, steps=(2,), batches=(1,), temperatures=(0.0,), replicas=1, replica_timeout_s=120, timing=timing)
    run = record.load(execute(replace(plan, config=replace(plan.config, experiment=ask))).folder)
    assert run.meta["experiment"] == "rivals"
    ended = Counter((row["variant"], row["status"]) for row in run.tables["cells"].to_pylist())
    assert ended == {("bits", "ok"): 1, ("resident", "unsupported"): 1}
