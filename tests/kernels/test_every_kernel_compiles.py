"""Every CUDA kernel compiles for every architecture it names, without spills: what is measured, and a sample of what the planner chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from kernels import clock
from kernels.backends.certified_sm80 import CertifiedOptions, CertifiedSm80
from kernels.backends.fixed_point_sm90 import FixedPointSm90
from kernels.backends.pdl_chain import PdlChain, PdlChainOptions
from kernels.backends.resident_sm90 import ResidentOptions, ResidentSm90
from kernels.backends.streaming_sm90 import StreamingOptions, StreamingSm90
from kernels.backends.vllm_int8_walk import VllmInt8Walk
from kernels.build import Kernel, build
from kernels.device import load
from kernels.placement import BatchedPlacement, Placement
from kernels.registry import backends
from kernels.settled_logits import LogitsLayout, compile_logits
from kernels.walk import Limits, NoOptions

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings; install it with: pip install -e '.[gpu]'")
HoldInCpp = Callable[[str, Iterable[str]], None]
CudaShape = Callable[[Placement | BatchedPlacement], str]
CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"
DEVICES = {"sm_90a": load("h200"), "sm_80": replace(load("h200"), arch="sm_80"), "sm_100a": load("b200")}


@dataclass(frozen=True)
class Case:
    """A walk that `prepare` would compile a kernel for."""

    name: str
    vocab: int
    limits: Limits = field(default_factory=Limits)
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        drawn = "sampled" if self.limits.sampling else "greedy"
        options = [f"{key}={value}" for key, value in self.options]
        return "-".join([self.name, str(self.vocab), f"b{self.limits.max_batch}", drawn, *options])


def resident(vocab: int, batch: int = 1, sampling: bool = False, **options: Any) -> Case:
    return Case("resident_sm90", vocab, Limits(batch, 16, sampling), tuple(options.items()))


def streaming(vocab: int, **options: Any) -> Case:
    return Case("streaming_sm90", vocab, options=tuple(options.items()))


def vllm_int8(vocab: int, batch: int = 1, sampling: bool = False) -> Case:
    return Case("vllm_int8_walk", vocab, Limits(batch, 16, sampling))


def chain(vocab: int, batch: int = 1, **options: Any) -> Case:
    return Case("pdl_chain", vocab, Limits(batch, 16), tuple(options.items()))


def certified(vocab: int, batch: int = 1, steps: int = 16, sampling: bool = False, **options: Any) -> Case:
    return Case("certified_sm80", vocab, Limits(batch, steps, sampling), tuple(options.items()))


def fixed_point(vocab: int, steps: int) -> Case:
    return Case("fixed_point_sm90", vocab, Limits(1, steps))


# Vocabularies, batches and temperatures, the paper's heads most; NVRTC takes two to three seconds for each. Beside a case stand the register
# tiles a warp that must be left to it: a kernel that wants more registers elsewhere gets fewer without an error, and is slower.
CASES: dict[Case, int] = {
    resident(151_936): 6,
    resident(151_936, clocks=True): 6,
    resident(151_936, rf_tiles=6): 6,
    resident(151_936, rf_tiles=6, twice="score"): 6,
    resident(151_936, rf_tiles=6, twice="reduce"): 6,
    resident(151_936, rf_tiles=6, twice="exchange"): 6,
    resident(151_936, rf_tiles=6, twice="latent"): 6,
    resident(151_936, sampling=True): 6,
    resident(151_936, batch=16): 0,
    resident(151_936, batch=8, sampling=True): 0,
    resident(151_936, batch=32, sampling=True): 0,
    resident(151_936, batch=64, sampling=True): 0,
    resident(248_320): 6,
    resident(248_320, batch=4): 6,
    resident(248_320, weights="bf16"): 3,
    resident(129_280, batch=4, sampling=True): 6,
    resident(1_000, exchange="mailboxes"): 1,
    resident(32_000, batch=8): 2,
    resident(49_153, batch=4, sampling=True, weights="bf16"): 3,
    resident(32_000, batch=5, sampling=True): 0,
    resident(100_000, batch=32, sampling=True): 0,
    resident(80_000, batch=64): 0,
    resident(100_000, batch=64): 0,
    resident(110_000, batch=64, sampling=True): 0,
    resident(163_840, batch=64): 0,
    resident(201_024, batch=16, sampling=True): 0,
    resident(248_320, batch=17): 0,
    resident(201_024, batch=2): 6,
    resident(262_144, batch=64): 0,
    resident(400_000, batch=32): 0,
    streaming(151_936, weights="int8"): 0,
    streaming(151_936, weights="bf16"): 0,
    vllm_int8(129_280, batch=8): 0,
    vllm_int8(151_936): 0,
    vllm_int8(151_936, batch=2, sampling=True): 0,
    vllm_int8(248_320, batch=4, sampling=True): 0,
    vllm_int8(270_336): 0,
    chain(151_936): 0,
    chain(151_936, weights="bf16"): 0,
    chain(248_320, batch=4): 0,
    certified(151_936): 0,
    certified(151_936, steps=7): 0,
    certified(151_936, sampling=True): 0,
    certified(151_936, batch=4, steps=16): 0,
    certified(151_936, batch=2, steps=16, sampling=True): 0,
    certified(151_936, batch=4, steps=16, sampling=True): 0,
    certified(248_320, steps=15): 0,
    certified(151_936, batch=64, steps=7): 0,
    certified(151_936, batch=16, steps=7): 0,
    certified(151_936, batch=64, steps=7, sampling=True): 0,
    certified(248_320, batch=64, steps=15): 0,
    certified(248_320, batch=64, steps=15, sampling=True): 0,
    certified(151_936, batch=64, steps=7, listed=256): 0,
    certified(151_936, steps=7, clocks=True): 0,
    certified(151_936, batch=64, steps=7, clocks=True): 0,
    certified(151_936, batch=16, steps=16, sampling=True): 0,
    certified(1_000, batch=3, steps=5, sampling=True): 0,
    certified(151_936, batch=4, steps=7, candidates=128, previous=32, listed=128): 0,
    fixed_point(151_936, 7): 6,
    fixed_point(151_936, 16): 6,
    fixed_point(1_000, 7): 1,
}
BOUNDED = [resident(1_000, spin_limit=1000), resident(1_000, batch=64, spin_limit=1000)]


@cache
def fitted(case: Case, arch: str) -> tuple[Placement | BatchedPlacement | None, Kernel]:
    """The placement, where there is one, and the kernel of a case, made without a GPU. The build itself refuses one that spills."""
    device, options = DEVICES[arch], dict(case.options)
    if case.name == "resident_sm90":
        return ResidentSm90(ResidentOptions(**options)).fit(case.vocab, 256, case.limits, device)
    if case.name == "vllm_int8_walk":
        return VllmInt8Walk(NoOptions()).fit(case.vocab, 256, case.limits, device)
    if case.name == "pdl_chain":
        rival = PdlChain(PdlChainOptions(**options))
        return None, rival.compile(rival.place(case.vocab, case.limits.max_batch, device), device)[0]
    if case.name == "fixed_point_sm90":
        return FixedPointSm90(NoOptions()).fit(case.vocab, 256, case.limits.max_steps, device)
    if case.name == "certified_sm80":
        walk = CertifiedSm80(CertifiedOptions(**options))
        return None, walk.compile(walk.place(case.vocab, case.limits, device), device)
    backend = StreamingSm90(StreamingOptions(**options))
    return None, backend.compile(backend.tiles(case.vocab, device), device)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_walks_compile_without_spills(case: Case) -> None:
    for arch in backends()[case.name].archs:
        placement, kernel = fitted(case, arch)
        assert kernel.entry.encode() in kernel.cubin
        assert kernel.spill_bytes == 0
        assert 32 < kernel.registers <= 255
        assert kernel.static_smem_bytes == 0, "all shared memory is dynamic, as the planner counts it"
        if isinstance(placement, Placement):
            assert placement.register_tiles == CASES[case]


@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("columns", [16, 112, 1024])
def test_the_pass_that_writes_logits_compiles(arch: str, columns: int) -> None:
    kernel = compile_logits(LogitsLayout.of(columns, DEVICES[arch]), DEVICES[arch])
    assert kernel.registers <= 128, "16 warps a CTA"


def test_batched_cases_reach_every_path(hold_in_cpp: HoldInCpp, cuda_shape: CudaShape) -> None:
    """Unrolled and rolled, every other tile streamed or fewer or more, in one stage a warpgroup or two. (So many tiles that a step is rolled
    leave room for few.)"""
    paths, layouts, facts = set(), set(), []
    for case in (case for case in CASES if case.name == "resident_sm90"):
        placed = ResidentSm90(ResidentOptions(**dict(case.options))).place(case.vocab, 256, case.limits, DEVICES["sm_90a"])
        if isinstance(placed, BatchedPlacement):
            tiles, streamed, stages = (count // placed.members for count in (placed.tiles, placed.streamed_tiles, placed.stages))
            unrolled = tiles <= 10
            kernel = f"wts::Batched<{cuda_shape(placed)}>"
            alternates = stages == 1 and streamed == (tiles + 1) // 2
            facts += [f"({kernel}::kTiles <= {kernel}::kUnrolled) == {str(unrolled).lower()}"]
            facts += [f"{kernel}::kAlternates == {str(alternates).lower()}"]
            paths.add(("unrolled" if unrolled else "rolled", "alternating" if alternates else f"{stages} stages"))
            layouts.add((placed.copies, placed.halves, placed.sampling))
    hold_in_cpp('#include "walk_batched.cuh"', facts)
    assert paths == {("unrolled", tiles) for tiles in ("0 stages", "1 stages", "alternating", "2 stages")} | {
        ("rolled", "1 stages"),
        ("rolled", "2 stages"),
    }
    assert layouts >= {(4, 1, True), (2, 1, True), (1, 1, True), (1, 2, True), (2, 1, False), (1, 1, False), (1, 2, False)}


@pytest.mark.parametrize("case", BOUNDED, ids=str)
def test_bounded_spins_compile(case: Case) -> None:
    assert b"gave up after" in fitted(case, "sm_90a")[1].cubin


def test_only_bounded_spins_give_up() -> None:
    for case in (resident(151_936), resident(262_144, batch=64), streaming(151_936, weights="int8")):
        assert b"gave up after" not in fitted(case, "sm_90a")[1].cubin


def test_every_cuda_backend_has_a_case() -> None:
    ours = {name for name, backend in backends().items() if any(arch.startswith("sm_") for arch in backend.archs)}
    assert ours == {case.name for case in CASES}


@pytest.mark.parametrize("name", ["step_slope", "step_breakdown"])
def test_every_variant_has_a_case(name: str) -> None:
    experiment = yaml.safe_load((CONFIGS / "experiment" / f"{name}.yaml").read_text())
    (head,) = [path for each in experiment["defaults"] if isinstance(each, dict) for path in each.values()]
    vocab = yaml.safe_load((CONFIGS / "head" / f"{head}.yaml").read_text())["vocab"]
    asked = [
        (variant["backend"], variant.get("options", {}) | clocks)
        for variant in experiment["variants"]
        if variant["backend"].endswith("_sm90")
        for clocks in ({}, {"clocks": True})
        if not clocks or variant.get("clocked")
    ]
    assert len(asked) >= 4
    mine = [(case.name, dict(case.options)) for case in CASES if case.vocab == vocab and case.limits == Limits()]
    assert [variant for variant in asked if variant not in mine] == []


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_the_clock_probe_compiles(arch: str) -> None:
    assert build(clock._SOURCE, "clock_probe", arch).registers < 64
