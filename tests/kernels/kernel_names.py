"""Which kernels and copies a walk launches, in their order. The memsets that cuBLAS and torch.argmax put before a kernel of theirs are left out."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from kernels.walk import Draft, PreparedWalk, WalkInputs


def kernel_names(walk: PreparedWalk, inputs: WalkInputs) -> list[str]:
    """Of one launch, after another that compiled what had to be."""
    draft = Draft.like(inputs)
    walk.launch(inputs, draft)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        walk.launch(inputs, draft)
        torch.cuda.synchronize()
    results = trace.profiler.kineto_results if trace.profiler else None
    on_device = [event for event in results.events() if str(event.device_type()).endswith("CUDA")] if results else []
    return [event.name() for event in sorted(on_device, key=lambda event: event.start_ns()) if "Memset" not in event.name()]
