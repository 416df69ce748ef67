from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest
import torch

from experiments import toy_walk
from experiments.plan import Plan
from experiments.schema import HeadConfig, ToyWalk
from kernels.heads.markov import MarkovHead
from kernels.walk import Unsupported


def test_every_number_of_the_toy_walk_follows_from_the_one_before(plan: Plan) -> None:
    size = HeadConfig("toy", vocab=12, rank=4, w2_std=0.5)
    rows = toy_walk.run(replace(plan, config=replace(plan.config, head=size, experiment=ToyWalk()))).tables["walk_steps"]
    assert len(rows) == 3 * 12
    head = MarkovHead.synthetic(12, 4, 0, "cpu", 1.0, 0.5)
    before = None
    for step, group in groupby(rows, key=lambda row: row["step"]):
        step_rows = list(group)
        token, previous = step_rows[0]["token"], step_rows[0]["previous"]
        assert step == 0 or previous == before
        bias = (head.w2.double() @ head.w1[previous].double()).float().bfloat16()
        assert [row["bias"] for row in step_rows] == bias.tolist()
        logits = torch.tensor([row["base"] for row in step_rows]).float() + bias.float()
        assert [row["logit"] for row in step_rows] == logits.bfloat16().tolist()
        assert token == max(range(12), key=lambda row: (step_rows[row]["logit"], -row))
        before = token


def test_a_walk_too_large_to_print_is_refused(plan: Plan) -> None:
    large = HeadConfig("markov_v152k", vocab=151936, rank=256)
    with pytest.raises(Unsupported, match="455808 here; 100000 is the most; use head=toy"):
        toy_walk.run(replace(plan, config=replace(plan.config, head=large, experiment=ToyWalk())))
