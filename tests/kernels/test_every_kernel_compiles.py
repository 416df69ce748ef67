"""Every CUDA kernel compiles for every architecture it names, without spills, in the configurations that are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kernels import clock
from kernels.backends.resident_sm90 import ResidentOptions, ResidentSm90
from kernels.backends.streaming_sm90 import StreamingOptions, StreamingSm90
from kernels.build import Kernel, build
from kernels.device import load
from kernels.placement import plan
from kernels.registry import backends

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings; install it with: pip install -e '.[gpu]'")
CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"
DEVICES = {"sm_90a": load("h200")}
RESIDENT = [
    *((vocab, {}) for vocab in (1_000, 32_000, 49_153, 101_000, 129_280, 151_936, 163_840)),
    *((vocab, {"clocks": True}) for vocab in (1_000, 151_936, 163_840)),
    *((vocab, {"rf_tiles": 5, "exchange": "mailboxes"}) for vocab in (49_153, 129_280, 151_936, 163_840)),
    (151_936, {"rf_tiles": 5, "exchange": "mailboxes", "clocks": True}),
    (49_153, {"rf_tiles": 0}),
]
STREAMING = [
    *((vocab, {"weights": weights}) for weights in ("int8", "bf16") for vocab in (1_000, 129_280, 151_936, 248_320)),
    *((151_936, {"weights": weights, "clocks": True}) for weights in ("int8", "bf16")),
    *((vocab, {"weights": "int8", "exchange": "mailboxes"}) for vocab in (151_936, 248_320)),
    *((151_936, {"weights": "bf16", "exchange": "mailboxes", "depth": depth}) for depth in (1, 2)),  # depth 3 spills 8 bytes
]
CASES = [("resident_sm90", *case) for case in RESIDENT] + [("streaming_sm90", *case) for case in STREAMING]


def kernel_of(name: str, vocab: int, options: dict[str, Any], arch: str) -> Kernel:
    """The kernel that `prepare` would load, made without a GPU. The build itself refuses one that spills."""
    device = DEVICES[arch]
    if name == "resident_sm90":
        resident = ResidentOptions(**options)
        return ResidentSm90(resident).compile(plan(vocab, 256, device, rf_tiles=resident.rf_tiles), device)
    streaming = StreamingSm90(StreamingOptions(**options))
    return streaming.compile(streaming.tiles(vocab, device), device)


@pytest.mark.parametrize(("name", "vocab", "options"), CASES)
def test_walks_compile_without_spills(name: str, vocab: int, options: dict[str, Any]) -> None:
    for arch in backends()[name].archs:
        kernel = kernel_of(name, vocab, options, arch)
        assert kernel.entry.encode() in kernel.cubin
        assert kernel.spill_bytes == 0
        assert 32 < kernel.registers <= 255
        assert kernel.static_smem_bytes == 0, "all shared memory is dynamic, as the planner counts it"


def test_every_cuda_backend_has_a_case() -> None:
    ours = {name for name, backend in backends().items() if any(arch.startswith("sm_") for arch in backend.archs)}
    assert ours == {name for name, _, _ in CASES}


def test_every_variant_of_step_slope_has_a_case() -> None:
    experiment = yaml.safe_load((CONFIGS / "experiment" / "step_slope.yaml").read_text())
    (head,) = [path for each in experiment["defaults"] if isinstance(each, dict) for path in each.values()]
    vocab = yaml.safe_load((CONFIGS / "head" / f"{head}.yaml").read_text())["vocab"]
    asked = [
        (variant["backend"], vocab, variant.get("options", {}) | clocks)
        for variant in experiment["variants"]
        if variant["backend"].endswith("_sm90")
        for clocks in ({}, {"clocks": True})
        if not clocks or variant.get("clocked")
    ]
    assert len(asked) >= 4
    assert [case for case in asked if case not in CASES] == []


@pytest.mark.parametrize("exchange", ["pair", "mailboxes"])
@pytest.mark.parametrize("name", ["resident_sm90", "streaming_sm90"])
def test_bounded_spins_compile(name: str, exchange: str) -> None:
    plain = {"exchange": exchange} | ({"rf_tiles": 5} if name == "resident_sm90" else {})
    bounded = kernel_of(name, 151_936, plain | {"spin_limit": 1000}, "sm_90a")
    assert b"gave up after" in bounded.cubin
    assert b"gave up after" not in kernel_of(name, 151_936, plain, "sm_90a").cubin


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_the_clock_probe_compiles(arch: str) -> None:
    assert build(clock._SOURCE, "clock_probe", arch).registers < 64
