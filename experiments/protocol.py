"""How the samples of a run were taken, in words and numbers: the part of a record that a reader needs to believe it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.schema import Timing
from experiments.stopwatch import Stopwatch


def protocol(timing: Timing, stopwatch: Stopwatch, replicas: int, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The protocol of `run.json`."""
    return {
        "rounds": timing.rounds,
        "warmup": timing.warmup,
        "kernel_replays": timing.kernel_replays,
        "replicas": replicas,
        "cold": stopwatch.cold,
        "hot": "the same replay, untimed, directly before every sample",
        "call": "everything an engine would replay, staging included, between two events on the stream",
        "kernel": "sum of the durations of the kernels, copies and fills inside one replay",
        "order": "all subjects x cold and hot in seeded random order, every round",
        "check": "two input sets against the oracle before timing, every round's tokens under timing, once after",
        "check_sampled": "tokens against the host's draws of the same round, or, where a library drew them, against repetition; logits "
        "against the oracle before and after timing",
        "launch_floor_us": stopwatch.launch_floor_us,
        "clock_tolerance": timing.clock_tolerance,
        "notes": list(notes),
    }
