"""Two small kernels a step, chained by programmatic dependent launch. Without a GPU: layout, refusals, what is launched, and what the machine
code does before its wait. On a GPU: the oracle's tokens, and those of the persistent walk bit for bit."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kernels.backends import pdl_chain
from kernels.backends.pdl_chain import PdlChain, PdlChainOptions, PdlChainWalk, StepParams
from kernels.build import Kernel
from kernels.device import load
from kernels.driver import Function, LaunchShape
from kernels.heads.markov import MarkovHead
from kernels.params import Params
from kernels.placement import LATENT_BYTES
from kernels.registry import create
from kernels.synthetic import synthetic_inputs
from kernels.walk import Draft, Limits, PreparedWalk, Unsupported, WalkInputs
from tests.kernels.arm import H200, Arm, compile_all, first_of, head_on_gpu, inputs_on_gpu

HoldInCpp = Callable[[str, Iterable[str]], None]
HEADER = '#include "walk_chain.cuh"'
OPTIONS: list[dict[str, Any]] = [
    {},
    {"weights": "bf16"},
    {"early": False},
    {"stages": 1, "warps": 8},
    {"weights": "bf16", "warps": 18, "stages": 2},
]
SIZES = [(151_936, 1), (151_936, 2), (248_320, 4), (1_000, 3), (17, 1), (1, 4)]
TRITON = find_spec("triton")
NVDISASM = [program for place in (TRITON and TRITON.submodule_search_locations) or () for program in Path(place).rglob("bin/nvdisasm")]


def chain(**options: Any) -> PdlChain:
    return PdlChain(PdlChainOptions(**options))


# ---- layout ----


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("vocab", "batch"), SIZES)
def test_every_row_has_a_cta_and_every_cta_has_a_row(vocab: int, batch: int, options: dict[str, Any]) -> None:
    layout = chain(**options).place(vocab, batch, H200)
    assert (layout.ctas - 1) * layout.rows_per_cta < vocab <= layout.ctas * layout.rows_per_cta
    assert layout.ctas <= H200.sms
    assert batch <= layout.requests <= 4
    assert layout.smem_bytes + 2 * 1024 <= H200.smem_bytes_per_sm, "select finds room beside it"
    assert layout.smem_bytes <= H200.smem_bytes_per_cta


def test_the_measured_vocabulary_fills_the_chip() -> None:
    """72 tiles of 16 rows on each of 132 SMs; what comes before the token is two thirds of them (int8), or one third (bf16)."""
    for weights, units in (("int8", 6), ("bf16", 12)):
        layout = chain(weights=weights).place(151_936, 1, H200)
        assert (layout.ctas, layout.tiles, layout.warps, layout.stages) == (132, 72, 12, 4)
        assert units == 72 // 12 * (1 if weights == "int8" else 2)


def test_stages_end_with_the_units_of_a_warp() -> None:
    assert chain(stages=64).place(1_000, 1, H200).stages == 1
    assert chain(stages=64, weights="bf16").place(1_000, 1, H200).stages == 2


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bytes_and_sizes_of_the_kernel_are_the_backends(
    options: dict[str, Any], hold_in_cpp: HoldInCpp, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[str] = []
    monkeypatch.setattr(pdl_chain, "build", lambda source, *_, **__: sources.append(source))
    facts = []
    for vocab, batch in SIZES:
        backend = chain(**options)
        layout = backend.place(vocab, batch, H200)
        sources.clear()
        backend.compile(layout, H200)
        (shape,) = re.findall(r"wts::ChainShape\{.*?\}", sources[0])
        kernel = f"wts::ChainScore<{shape}>"
        facts += [
            f"sizeof({kernel}::Smem) == {layout.smem_bytes}",
            f"{kernel}::kRows == {layout.rows_per_cta}",
            f"{kernel}::Latent::kSmemBytes == {LATENT_BYTES[layout.weights]}",
            f"{kernel}::kThreads == {32 * layout.warps}",
            f"{kernel}::kUnitBytes == {pdl_chain.UNIT_BYTES}",
        ]
        assert f"__launch_bounds__({32 * layout.warps}, 1)" in sources[0]
        assert f"__launch_bounds__({32 * layout.requests}, 1)" in sources[1]
    hold_in_cpp(HEADER, facts)


def test_both_sides_agree_on_what_a_step_is_given(hold_in_cpp: HoldInCpp) -> None:
    facts = [f"OFFSET({name}, wts::StepParams) == {getattr(StepParams, name).offset}" for name in ("walk", "step", "padding")]
    hold_in_cpp(HEADER, [*facts, f"wts::kEntries == {pdl_chain._ENTRIES}", f"wts::kLastRow == {pdl_chain._LAST_ROW}"])


def test_entries_order_candidates(hold_in_cpp: HoldInCpp) -> None:
    """Larger logits first, then lower tokens; a place without a CTA loses to everything, a row of -inf too."""

    def entry(bits: str, row: int, token: int) -> str:
        return f"wts::chain_entry(wts::candidate_key({bits}, {row}), {token}u)"

    one, minus_one, two, lost = "0x3F800000u", "0xBF800000u", "0x40000000u", "0xFF800000u"
    falling = [entry(two, 9, 9), entry(one, 3, 3), entry(one, 3, 1155), entry(one, 2, 2_000_000), entry(minus_one, 0, 0)]
    falling += [entry(lost, 0, 0), entry(lost, 5, 3_999_999_999), "0ull"]
    facts = [f"({a}) > ({b})" for a, b in pairwise(falling)]
    hold_in_cpp(HEADER, [*facts, f"0xFFFFFFFFu - static_cast<unsigned>({falling[2]}) == 1155"])


# ---- who may enter ----


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(5, 16), "walks up to 4 requests at a time; got max_batch 5; backend=sglang_folded serves any batch"),
        (Limits(1, 16, sampling=True), "is greedy only and cannot serve temperature > 0; backend=sglang_folded can"),
        (Limits(1, 33), "walks up to 32 steps a launch; got max_steps 33; backend=sglang_folded serves any"),
        (Limits(1, 0), "needs max_batch and max_steps of at least 1; got 1 and 0"),
    ],
)
def test_limits_beyond_the_chain(limits: Limits, message: str) -> None:
    with pytest.raises(Unsupported, match=f"pdl_chain {message}"):
        create("pdl_chain").prepare(MarkovHead.synthetic(100, 256), limits, H200)


def test_heads_and_devices_beyond_the_chain() -> None:
    with pytest.raises(Unsupported, match="pdl_chain serves rank 256 only; got rank 128"):
        create("pdl_chain").prepare(MarkovHead.synthetic(100, 128), Limits(), H200)
    with pytest.raises(Unsupported, match="pdl_chain needs sm_90a; device=b200 is sm_100a;"):
        create("pdl_chain").prepare(MarkovHead.synthetic(100, 256), Limits(), load("b200"))


@pytest.mark.parametrize(
    ("options", "vocab", "batch"), [({}, 3_000_000, 4), ({"stages": 6}, 151_936, 1), ({}, 132 * 65_536, 1), ({}, 132 * 65_520, 1)]
)
def test_what_does_not_fit_names_a_backend_that_serves_it(options: dict[str, Any], vocab: int, batch: int) -> None:
    with pytest.raises(Unsupported, match=r"need \d+ bytes of shared memory at batch \d; h200 has 231424 .*; backend=sglang_greedy serves"):
        chain(**options).place(vocab, batch, H200)


# ---- what is launched ----


class Recorder:
    """A kernel that only keeps what it was launched with."""

    def __init__(self, log: list[tuple[str, bool, StepParams]], kernel: Kernel, shape: LaunchShape) -> None:
        self.log, self.entry, self.shape = log, kernel.entry, shape

    def launch(self, params: StepParams) -> None:
        self.log.append((self.entry, self.shape.programmatic, StepParams.from_buffer_copy(params)))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool, StepParams]]:
    """Every launch: its kernel, whether it is chained to the one before, and its parameters."""
    launches: list[tuple[str, bool, StepParams]] = []
    monkeypatch.setattr(pdl_chain, "load", lambda kernel, shape: cast(Function, Recorder(launches, kernel, shape)))
    monkeypatch.setattr(pdl_chain, "build", lambda source, entry, arch, **_: Kernel(entry, arch, b"", 52, 0, 0, source, source))
    return launches


def prepare(options: dict[str, Any], head: MarkovHead, limits: Limits) -> PdlChainWalk:
    return cast(PdlChainWalk, create("pdl_chain", options).prepare(head, limits, H200))


@pytest.mark.parametrize("chained", [True, False])
def test_a_step_is_two_launches_and_the_first_of_a_walk_waits_for_the_stream(
    chained: bool, log: list[tuple[str, bool, StepParams]]
) -> None:
    walk, inputs = prepare({"chained": chained}, MarkovHead.synthetic(1_000, 256), Limits(2, 16)), synthetic_inputs(1_000, 5, 2)
    for _ in range(2):
        log.clear()
        walk.launch(inputs, Draft.like(inputs))
        assert [entry for entry, *_ in log] == ["walk_chain_score", "walk_chain_select"] * 5
        assert [params.step for *_, params in log] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        assert [programmatic for _, programmatic, _ in log] == [False, *[chained] * 9]


def test_all_kernels_may_share_an_sm(log: list[tuple[str, bool, StepParams]]) -> None:
    walk = prepare({}, MarkovHead.synthetic(1_000, 256), Limits(3, 16))
    first, score, select = (cast(Recorder, each).shape for each in (walk.first, walk.score, walk.select))
    assert replace(first, programmatic=True) == score
    assert (score.ctas, score.threads, score.dynamic_smem_bytes) == (walk.resources.ctas, 384, walk.resources.smem_bytes)
    assert (select.ctas, select.threads, select.dynamic_smem_bytes) == (1, 128, 0)
    assert all(shape.most_shared and not shape.cooperative for shape in (first, score, select))


@pytest.mark.parametrize("options", [{}, {"weights": "bf16"}], ids=str)
def test_a_launch_hands_over_every_address_and_number(options: dict[str, Any], log: list[tuple[str, bool, StepParams]]) -> None:
    """Strided base logits and drafts, a W1 with more rows than the vocabulary, fewer requests and steps than prepared for."""
    small = MarkovHead.synthetic(1_000, 256)
    walk = prepare(options, MarkovHead(torch.cat([small.w1, small.w1[:24]]), small.w2), Limits(4, 16))
    plain = synthetic_inputs(1_000, 2, 3)
    padded = torch.zeros(3, 4, 1_016, dtype=torch.bfloat16)
    inputs = replace(plain, base_logits=padded[:, :2, 8:1_008])
    tokens = torch.zeros(3, 9, dtype=torch.int64)[:, :2]
    walk.launch(inputs, Draft(tokens))
    kinds = {bytes(params.walk) for *_, params in log}
    assert len(kinds) == 1, "only the step differs"
    params = Params.from_buffer_copy(kinds.pop())
    weights = walk.weights
    assert (params.weights, params.latents) == (weights.packed.data_ptr(), weights.latents.data_ptr())
    assert params.row_scale == (None if weights.row_scale is None else weights.row_scale.data_ptr())
    assert (params.base, params.base_request_stride, params.base_step_stride) == (inputs.base_logits.data_ptr(), 4 * 1_016, 1_016)
    assert (params.anchor, params.tokens, params.tokens_request_stride) == (inputs.anchor.data_ptr(), tokens.data_ptr(), 9)
    assert (params.vocab, params.latent_vocab, params.steps, params.batch) == (1_000, 1_000, 2, 3)
    assert params.mail == walk.entries.data_ptr()
    assert walk.entries.shape == (4, 256)
    assert not walk.entries.any()


def test_a_launch_beyond_what_was_prepared_is_refused(log: list[tuple[str, bool, StepParams]]) -> None:
    walk = prepare({}, MarkovHead.synthetic(1_000, 256), Limits(1, 4))
    for batch, steps in ((2, 4), (1, 5)):
        inputs = synthetic_inputs(1_000, steps, batch)
        with pytest.raises(ValueError, match="pdl_chain was prepared for"):
            walk.launch(inputs, Draft.like(inputs))
    assert log == []


# ---- machine code ----


def instructions(kernel: Kernel, folder: Path) -> list[str]:
    file = folder / "kernel.cubin"
    file.write_bytes(kernel.cubin)
    return subprocess.run([NVDISASM[0], "-c", file], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("vocab", "batch"), [(151_936, 1), (1_000, 3)])
def test_kernels_compile_without_spills(vocab: int, batch: int, options: dict[str, Any]) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings; install it with: pip install -e '.[gpu]'")
    backend = chain(**options)
    layout = backend.place(vocab, batch, H200)
    score, select = backend.compile(layout, H200)
    assert (score.spill_bytes, select.spill_bytes, score.static_smem_bytes, select.static_smem_bytes) == (0, 0, 0, 0)
    registers = (score.registers + 7) // 8 * 8 * 32 * layout.warps + (select.registers + 7) // 8 * 8 * 32 * layout.requests
    assert 4 * registers <= H200.register_bytes_per_sm, "select finds room beside score"


@pytest.mark.skipif(not NVDISASM, reason="needs nvdisasm, which comes with Triton: pip install triton")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_nothing_is_handed_over_before_the_wait(options: dict[str, Any], tmp_path: Path) -> None:
    """ACQBULK is griddepcontrol.wait, PREEXIT is launch_dependents. Before the wait only copies of weights, scales and base logits; no exit."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings; install it with: pip install -e '.[gpu]'")
    backend = chain(**options)
    score, select = backend.compile(backend.place(151_936, 1, H200), H200)
    for kernel in (score, select):
        code = instructions(kernel, tmp_path)
        (wait,) = [place for place, line in enumerate(code) if "ACQBULK" in line]
        before, after = "\n".join(code[:wait]), "\n".join(code[wait:])
        assert not re.search(r"STRONG|STG|ATOM|RED|EXIT ;", before.replace("PREEXIT", "")), "words of other kernels, or an end"
        assert "STG" in after
        assert re.search(r"LDG\S*STRONG\.GPU", after)
        assert "@" not in code[wait].split("ACQBULK")[0], "every thread waits"
    code = "\n".join(instructions(score, tmp_path))
    assert (code.index("PREEXIT") < code.index("BRA")) == backend.options.early, "at once, whatever happens"
    assert code.count("PREEXIT") == 1 or not backend.options.early
    assert code.index("UBLKCP") < code.index("ACQBULK"), "weights are on their way before the wait"


# ---- on a GPU ----

ARMS = [
    Arm.chain(),
    Arm.chain(weights="bf16"),
    Arm.chain(chained=False),
    Arm.chain(early=False, stages=2),
    Arm.chain(2, stages=1, warps=8),
    Arm.chain(3),
    Arm.chain(4, weights="bf16", warps=18),
    Arm.chain(4, early=False),
]
VOCABS = [1, 17, 1_000, 49_153, 151_936, 200_058, 248_320]


@pytest.fixture(scope="module")
def compiled() -> None:
    compile_all((arm, vocab, H200) for arm in ARMS for vocab in VOCABS)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_every_batch_and_length_gives_the_oracles_tokens(arm: Arm, vocab: int) -> None:
    head, most = head_on_gpu(vocab), arm.limits.max_batch
    walk, largest = arm.prepare(head), inputs_on_gpu(vocab, 16, arm.temperatures, most)
    for batch, steps in ((most, 16), (most // 2 + 1, 3), (1, 1), (most, 7)):
        arm.assert_right(walk, head, first_of(largest, batch, steps))


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("weights", ["int8", "bf16"])
@pytest.mark.parametrize("vocab", [1_000, 49_153, 151_936])
def test_tokens_are_those_of_the_persistent_walk(weights: str, vocab: int) -> None:
    """Bit for bit, also where fp32 sums decide: both add in the same order."""
    head, fused, chained = head_on_gpu(vocab), Arm.streaming(weights=weights), Arm.chain(weights=weights)
    walks = [fused.prepare(head), chained.prepare(head)]
    for seed in range(8):
        inputs = inputs_on_gpu(vocab, 16, (0.0,), seed)
        drafts = [Draft.like(inputs) for _ in walks]
        for walk, draft in zip(walks, drafts, strict=True):
            walk.launch(inputs, draft)
        assert torch.equal(drafts[0].tokens, drafts[1].tokens), seed


def queued(walk: PreparedWalk, inputs: WalkInputs, count: int) -> list[Draft]:
    """Launches behind a sleeping GPU, so that nothing separates them."""
    drafts = [Draft.like(inputs) for _ in range(count)]
    torch.cuda._sleep(100_000_000)  # cycles: 50 ms
    for draft in drafts:
        walk.launch(inputs, draft)
    torch.cuda.synchronize()
    return drafts


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_walks_one_after_the_other_without_a_pause(arm: Arm) -> None:
    vocab = 151_936
    head = head_on_gpu(vocab)
    walk, inputs = arm.prepare(head), inputs_on_gpu(vocab, 7, arm.temperatures, 3)
    drafts = queued(walk, inputs, 60)
    agreement = arm.agreement(walk, head, inputs, drafts[0], 0)
    assert agreement.ok, agreement.reason
    assert all(torch.equal(draft.tokens, drafts[0].tokens) for draft in drafts)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_inputs_written_right_before_a_walk_are_those_it_reads(arm: Arm) -> None:
    """In one graph: base logits and anchors copied to their place, the walk, tokens copied away, new ones copied, the walk again."""
    vocab, steps = 151_936, 5
    head = head_on_gpu(vocab)
    walk = arm.prepare(head)
    sources = [inputs_on_gpu(vocab, steps, arm.temperatures, seed) for seed in (11, 12)]
    inputs = inputs_on_gpu(vocab, steps, arm.temperatures, 13)
    draft, kept = Draft.like(inputs), [Draft.like(inputs) for _ in sources]

    def both() -> None:
        for source, keep in zip(sources, kept, strict=True):
            inputs.base_logits.copy_(source.base_logits)
            inputs.anchor.copy_(source.anchor)
            walk.launch(inputs, draft)
            keep.tokens.copy_(draft.tokens)

    both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    for _ in range(20):
        for keep in kept:
            keep.tokens.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        for source, keep in zip(sources, kept, strict=True):
            agreement = arm.agreement(walk, head, source, keep, 0)
            assert agreement.ok, agreement.reason


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("chained", [True, False])
def test_a_step_is_two_kernels_on_the_gpu_in_a_replay_too(chained: bool) -> None:
    head, arm, steps = head_on_gpu(151_936), Arm.chain(chained=chained), 7
    walk, inputs = arm.prepare(head), inputs_on_gpu(151_936, steps)
    draft = Draft.like(inputs)
    walk.launch(inputs, draft)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        walk.launch(inputs, draft)
    for run in (lambda: walk.launch(inputs, draft), graph.replay):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        names = [event.name for event in profile.events() or [] if event.name.startswith("walk_chain")]
        assert sorted(names) == ["walk_chain_score"] * steps + ["walk_chain_select"] * steps
