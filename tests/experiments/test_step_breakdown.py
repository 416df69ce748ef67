from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from experiments import record, step_breakdown, step_slope
from experiments.compose import compose
from experiments.execute import execute
from experiments.outcome import Outcome
from experiments.plan import Plan
from experiments.schema import StepBreakdown, Timing, Variant
from experiments.workload import create
from kernels.backends.resident_sm90 import TWICE, ResidentSm90
from kernels.placement import plan as plan_of
from kernels.walk import Limits


def test_the_config_does_each_part_twice_with_all_else_alike() -> None:
    made = compose(["experiment=step_breakdown", "device=h200"])
    ask = made.experiment
    assert isinstance(ask, StepBreakdown)
    assert (ask.steps, ask.batch, ask.replicas, made.head.vocab) == ((1, 4, 7, 10, 13, 16), 1, 6, 151_936)
    assert ask.timing == StepBreakdown(ask.variants).timing
    assert [variant.label for variant in ask.variants] == ["resident", "latent_twice", "score_twice", "reduce_twice", "exchange_twice"]
    twice = {variant.options.get("twice", "none"): variant for variant in ask.variants}
    assert set(twice) == set(TWICE)
    placements = set()
    for part, variant in twice.items():
        assert variant.label == ("resident" if part == "none" else f"{part}_twice")
        backend = create(variant.backend, variant.options)
        assert isinstance(backend, ResidentSm90)
        placements.add(backend.place(made.head.vocab, made.head.rank, Limits(ask.batch, max(ask.steps)), made.device))
    assert placements == {plan_of(made.head.vocab, made.head.rank, made.device)}, "of the walk that step_slope times"


def test_the_protocol_says_what_a_part_is(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_slope, "run", lambda plan: Outcome({"samples": [], "cells": []}, {"rounds": 3}))
    outcome = step_breakdown.run(plan)
    assert outcome.protocol["rounds"] == 3
    assert set(outcome.protocol["parts"]) == {part for part in TWICE if part != "none"}


def test_fresh_processes_become_one_record(plan: Plan) -> None:
    arms = (Variant("bits", "reference"), Variant("score_twice", "resident_sm90", {"twice": "score"}))
    ask = StepBreakdown(arms, steps=(1, 3), replicas=1, replica_timeout_s=120, timing=Timing(rounds=2, warmup=1, kernel_replays=0))
    run = record.load(execute(replace(plan, config=replace(plan.config, experiment=ask))).folder)
    assert run.meta["experiment"] == "step_breakdown"
    ended = Counter((row["variant"], row["status"]) for row in run.tables["cells"].to_pylist())
    assert ended == {("bits", "ok"): 2, ("score_twice", "unsupported"): 2}
    assert "exchange" in run.meta["protocol"]["parts"]
