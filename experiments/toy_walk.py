"""Every number of a walk small enough to print: base, bias and logit of every row at every step (Figure 2)."""

from __future__ import annotations

from typing import cast

import torch

from experiments.outcome import Outcome, Row
from experiments.plan import Plan
from experiments.schema import GREEDY, ToyWalk
from kernels.heads.markov import MarkovHead
from kernels.reference import previous_tokens, walk
from kernels.synthetic import synthetic_inputs
from kernels.walk import Rounding, Unsupported

_MAX_ROWS = 100_000
_ROUNDING = Rounding.TWICE


def run(plan: Plan) -> Outcome:
    """The table `walk_steps`, by the reference, on the CPU.

    Raises:
        Unsupported: the head is too large for a table of all its numbers.
    """
    config, ask = plan.config, cast(ToyWalk, plan.config.experiment)
    size = config.head
    if size.vocab * ask.steps > _MAX_ROWS:
        raise Unsupported(
            f"toy_walk writes a row for every token and step, {size.vocab * ask.steps} here; {_MAX_ROWS} is the most; use head=toy."
        )
    head = MarkovHead.synthetic(size.vocab, size.rank, size.seed, "cpu", size.w1_std, size.w2_std)
    inputs = synthetic_inputs(size.vocab, ask.steps, 1, config.inputs.seed, "cpu", config.inputs.base_std, GREEDY)
    found = walk(head, inputs, _ROUNDING, keep_logits=True)
    assert found.logits is not None  # asked for
    named = {"head": size.name, "rounding": str(_ROUNDING), "vocab": size.vocab, "rank": size.rank}
    rows: list[Row] = []
    for step in range(ask.steps):
        previous = previous_tokens(inputs, found.tokens, step)
        base = inputs.base_logits[:, step]
        bias = head.step_logits(previous, torch.zeros_like(base), _ROUNDING)  # rho(0 + rho(W2 u)) is the rounded bias itself
        columns = zip(base[0].tolist(), bias[0].tolist(), found.logits[0, step].tolist(), strict=True)
        place = {**named, "step": step, "previous": int(previous[0]), "token": int(found.tokens[0, step])}
        rows += [{**place, "row": row, "base": b, "bias": c, "logit": z} for row, (b, c, z) in enumerate(columns)]
    return Outcome({"walk_steps": rows}, protocol={"computed_by": "kernels.reference.walk on the CPU"})
