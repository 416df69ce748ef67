"""Every rival path beside ours: the question and the grid of `walk_latency`, with all arms, interleaved in every cell."""

from __future__ import annotations

from experiments import walk_latency

run, run_replica = walk_latency.run, walk_latency.run_replica
