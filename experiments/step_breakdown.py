"""What the parts of a step of the resident walk cost: the latent's fetch, scoring (the GEMV), the reduction of a CTA, the exchange.

Each arm does one part of every step twice (the option `twice` of `resident_sm90`), one pass after the other and with the same outcome, so
that its tokens pass the check that every arm passes. A walk without the part could not be checked, and would take other tokens. What the
arm's steps take longer than those of the plain walk is what the part costs; the measurement is that of `step_slope`.
"""

from __future__ import annotations

from dataclasses import replace

from experiments import step_slope
from experiments.outcome import Outcome
from experiments.plan import Plan

run_replica = step_slope.run_replica

_WHAT = {
    "cost": "us a step of the walk that does the part twice, less us a step of the plain walk, replica by replica",
    "parts": {
        "score": "the barrier at which the latent is there, and every lane's best row",
        "reduce": "the best key of a warp, the barrier at which all warps' are there, the best key of the CTA",
        "exchange": "post and wait for the winner, the second time among other words",
        "latent": "the winner's latent from L2 into shared memory; what HBM adds the first time is in no part",
    },
}


def run(plan: Plan) -> Outcome:
    """Every replica in a fresh process; their rows together."""
    outcome = step_slope.run(plan)
    return replace(outcome, protocol={**outcome.protocol, **_WHAT})
