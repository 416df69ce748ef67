"""Whom the Hopper walks admit, and what a launch hands to the kernel; no GPU, the kernel is a recorder."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from kernels.backends import resident_sm90, streaming_sm90
from kernels.build import Kernel
from kernels.device import load
from kernels.driver import Function
from kernels.heads.markov import MarkovHead
from kernels.params import Params
from kernels.persistent import PersistentWalk, Weights, cpp, entry_source
from kernels.placement import GREEDY_BATCH, MAX_BATCH, SMALL_BATCH, BatchedPlacement, Placement, plan
from kernels.registry import create
from kernels.synthetic import synthetic_inputs
from kernels.walk import ClockedWalk, Draft, Limits, NoiseRule, SampledWalk, Unsupported, WalkInputs

WALKS = ["resident_sm90", "streaming_sm90"]
H200 = load("h200")
Prepared = tuple[str, dict[str, Any], Limits]
PREPARED: list[Prepared] = [
    ("resident_sm90", {}, Limits(1, 16)),
    ("resident_sm90", {}, Limits(3, 7, sampling=True)),
    ("resident_sm90", {"weights": "bf16"}, Limits(2, 16, sampling=True)),
    ("resident_sm90", {}, Limits(GREEDY_BATCH, 16)),
    ("resident_sm90", {}, Limits(GREEDY_BATCH + 1, 16)),
    ("resident_sm90", {}, Limits(SMALL_BATCH + 1, 16, sampling=True)),
    ("resident_sm90", {}, Limits(64, 16, sampling=True)),
    ("streaming_sm90", {}, Limits(1, 16)),
    ("streaming_sm90", {"weights": "bf16"}, Limits(1, 16)),
]


class Recorder:
    """A kernel that only keeps what it was launched with."""

    def __init__(self) -> None:
        self.launches: list[Params] = []

    def launch(self, params: Params) -> None:
        self.launches.append(Params.from_buffer_copy(params))


def not_compiled(source: str, entry: str, arch: str, *, allow_spills: bool = False) -> Kernel:
    digest = hashlib.sha256(source.encode()).hexdigest()
    return Kernel(entry, arch, b"", 250, 0, 0, digest, digest)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Both backends prepare with this instead of a kernel on a GPU, and compile nothing."""
    recorder = Recorder()
    for room in (resident_sm90, streaming_sm90):
        monkeypatch.setattr(room, "load", lambda kernel, shape: cast(Function, recorder))
        monkeypatch.setattr(room, "build", not_compiled)
    return recorder


def prepare(name: str, head: MarkovHead, options: dict[str, Any] | None = None, limits: Limits = Limits(1, 16)) -> PersistentWalk:  # noqa: B008 - frozen
    return cast(PersistentWalk, create(name, options).prepare(head, limits, H200))


@pytest.fixture(scope="module")
def head() -> MarkovHead:
    return MarkovHead.synthetic(1_000, 256)


@pytest.mark.parametrize("name", WALKS)
def test_without_a_gpu_the_kernel_compiles_and_then_says_what_is_missing(
    name: str, head: MarkovHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        Unsupported, match="running a sm_90a kernel needs a CUDA GPU and this machine has none; send a plan to a GPU machine"
    ):
        prepare(name, head)


@pytest.mark.parametrize(
    ("name", "limits", "message"),
    [
        ("streaming_sm90", Limits(2, 16), "walks one request at a time; got max_batch 2; backend=sglang_folded serves any batch"),
        ("streaming_sm90", Limits(1, 16, sampling=True), "is greedy only and cannot serve temperature > 0; backend=sglang_folded can"),
        ("resident_sm90", Limits(65, 16), "walks up to 64 requests at a time; got max_batch 65; backend=sglang_folded serves any batch"),
        *((name, Limits(1, 33), "walks up to 32 steps a launch; got max_steps 33; backend=sglang_folded serves any") for name in WALKS),
        *((name, Limits(1, 0), "needs max_batch and max_steps of at least 1; got 1 and 0") for name in WALKS),
        *((name, Limits(0, 1), "needs max_batch and max_steps of at least 1; got 0 and 1") for name in WALKS),
    ],
)
def test_limits_beyond_the_walks(name: str, limits: Limits, message: str, head: MarkovHead) -> None:
    with pytest.raises(Unsupported, match=f"{name} {message}"):
        prepare(name, head, limits=limits)


@pytest.mark.parametrize("name", WALKS)
def test_heads_and_devices_beyond_the_walks(name: str, head: MarkovHead) -> None:
    with pytest.raises(Unsupported, match=f"{name} serves rank 256 only; got rank 128; backend=sglang_folded serves every rank"):
        prepare(name, MarkovHead.synthetic(100, 128))
    for device, arch in (("b200", "sm_100a"), ("cpu", "cpu")):
        with pytest.raises(Unsupported, match=f"{name} needs sm_90a; device={device} is {arch}."):
            create(name).prepare(head, Limits(), load(device))


def wide_head(vocab: int) -> MarkovHead:
    """A head of this vocabulary that costs no memory: one row, seen again and again."""
    row = torch.ones(1, 256, dtype=torch.bfloat16)
    return MarkovHead(row.expand(vocab, 256), row.expand(vocab, 256))


def test_vocabularies_beyond_the_chip_name_a_backend_that_serves_them() -> None:
    with pytest.raises(
        Unsupported, match=r"vocab 3000000 needs \d+ bytes of shared memory a CTA .*; h200 has 232448; backend=sglang_\w+ serves it"
    ):
        prepare("resident_sm90", wide_head(3_000_000), limits=Limits(4, 16))
    with pytest.raises(
        Unsupported, match=r"32 steps of base logits of 4608 rows need 316112 bytes .*; h200 has 232448; backend=sglang_greedy"
    ):
        prepare("streaming_sm90", wide_head(600_000), limits=Limits(1, 32))


def strided(inputs: WalkInputs) -> WalkInputs:
    """The same inputs whose base logits lie in wider, padded rows."""
    batch, steps, vocab = inputs.base_logits.shape
    padded = torch.zeros(batch, steps + 2, vocab + 16, dtype=torch.bfloat16)
    padded[:, :steps, 8 : vocab + 8] = inputs.base_logits
    return replace(inputs, base_logits=padded[:, :steps, 8 : vocab + 8])


@pytest.mark.parametrize(("name", "options", "limits"), PREPARED)
def test_a_launch_hands_over_every_address_and_number(name: str, options: dict[str, Any], limits: Limits, recorder: Recorder) -> None:
    """Strided base logits and drafts, a W1 with more rows than the vocabulary, fewer steps than prepared for."""
    small = MarkovHead.synthetic(1_000, 256)
    head = MarkovHead(torch.cat([small.w1, small.w1[:24]]), small.w2)
    walk = prepare(name, head, options, limits)
    batch, steps = limits.max_batch, 5
    inputs = strided(synthetic_inputs(1_000, steps, batch))
    tokens = torch.zeros(batch, 9, dtype=torch.int64)[:, :steps]
    draft = Draft(tokens, strided(inputs).base_logits)
    for _ in range(2):
        walk.launch(inputs, draft)
    (params, again) = recorder.launches
    assert bytes(params) == bytes(again)
    weights, kept = walk.weights, draft.logits
    assert kept is not None
    assert (params.weights, params.latents) == (weights.packed.data_ptr(), weights.latents.data_ptr())
    assert params.row_scale == (None if weights.row_scale is None else weights.row_scale.data_ptr())
    assert (params.row_scale is None) == (options.get("weights") == "bf16")
    assert params.base == inputs.base_logits.data_ptr()
    assert (params.base_request_stride, params.base_step_stride) == (7 * 1_016, 1_016)
    assert (params.anchor, params.temperature, params.seed) == tuple(t.data_ptr() for t in (inputs.anchor, inputs.temperature, inputs.seed))
    assert (params.tokens, params.tokens_request_stride) == (tokens.data_ptr(), 9)
    if limits.sampling:
        assert (params.logits, params.logits_request_stride, params.logits_step_stride) == (kept.data_ptr(), 7 * 1_016, 1_016)
    else:
        assert params.logits is None, "a greedy walk keeps none"
    assert (params.mail, params.round, params.clocks) == (walk.mail.data_ptr(), walk.launches.data_ptr(), None)
    assert (params.vocab, params.steps, params.batch) == (1_000, steps, batch)
    assert params.base_slots == min(walk.base_slots, steps), "a shorter walk needs no more slots than steps"
    assert params.latent_vocab == 1_000, "anchors are clamped into the vocabulary, as everywhere, and not into W1"
    assert not walk.mail.any()
    assert walk.round() == 0


def test_a_launch_without_a_place_for_logits_keeps_none(head: MarkovHead, recorder: Recorder) -> None:
    walk = prepare("resident_sm90", head, limits=Limits(2, 4, sampling=True))
    inputs = synthetic_inputs(1_000, 4, 2, temperature=1.0)
    walk.launch(inputs, Draft.like(inputs))
    assert (recorder.launches[0].logits, recorder.launches[0].logits_step_stride) == (None, 0)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, MAX_BATCH])
@pytest.mark.parametrize("sampling", [False, True])
def test_state_and_noise_fit_the_batch(batch: int, sampling: bool, head: MarkovHead, recorder: Recorder) -> None:
    """Two banks of a 128-byte line a step and request, and the rule that the planned kernel draws by."""
    walk = prepare("resident_sm90", head, limits=Limits(batch, 16, sampling))
    placement = plan(1_000, 256, H200, batch=batch, sampling=sampling)
    assert isinstance(walk, SampledWalk)
    assert walk.mail.numel() >= 2 * 32 * 16 * batch
    assert walk.noise is (NoiseRule.GROUPS if isinstance(placement, BatchedPlacement) else NoiseRule.GUMBEL)
    if isinstance(placement, Placement):
        assert walk.base_slots == placement.base_slots


def test_the_round_is_that_of_an_unsigned_counter(head: MarkovHead, recorder: Recorder) -> None:
    walk = prepare("resident_sm90", head)
    walk.launches.fill_(-1)
    assert walk.round() == 2**32 - 1


@pytest.mark.parametrize(("name", "options", "limits"), PREPARED)
def test_two_prepared_walks_share_no_state(
    name: str, options: dict[str, Any], limits: Limits, head: MarkovHead, recorder: Recorder
) -> None:
    first, second = prepare(name, head, options, limits), prepare(name, head, options, limits)
    assert first.mail.data_ptr() != second.mail.data_ptr()
    assert first.launches.data_ptr() != second.launches.data_ptr()


@pytest.mark.parametrize(("name", "batch"), [("resident_sm90", 1), ("resident_sm90", 3), ("resident_sm90", 33), ("streaming_sm90", 1)])
def test_a_launch_beyond_what_was_prepared_is_refused(name: str, batch: int, head: MarkovHead, recorder: Recorder) -> None:
    walk = prepare(name, head, limits=Limits(batch, 4))
    for vocab, steps, asked, message in (
        (1_000, 5, batch, "steps 5"),
        (1_000, 4, batch + 1, f"batch {batch + 1}"),
        (999, 4, batch, "vocab 999"),
    ):
        inputs = synthetic_inputs(vocab, steps, asked)
        with pytest.raises(ValueError, match=message):
            walk.launch(inputs, Draft.like(inputs))
    assert recorder.launches == []


@pytest.mark.parametrize("name", WALKS)
def test_clocks_only_where_they_were_asked_for(name: str, head: MarkovHead, recorder: Recorder) -> None:
    plain, clocked = (prepare(name, head, {"clocks": clocks}, Limits(1, 7)) for clocks in (False, True))
    assert isinstance(plain, ClockedWalk)
    assert isinstance(clocked, ClockedWalk)
    with pytest.raises(ValueError, match=f"{name} was prepared without in-kernel clocks; pass backend.options.clocks=true"):
        plain.step_stamps()
    assert clocked.step_stamps().tolist() == [[0, 0]] * 8
    inputs = synthetic_inputs(1_000, 7, 1)
    clocked.launch(inputs, Draft.like(inputs))
    assert recorder.launches[0].clocks == clocked.step_stamps().data_ptr()


def test_resources_of_the_walks(head: MarkovHead, recorder: Recorder) -> None:
    resident = prepare("resident_sm90", head).resources
    placed = plan(1_000, 256, H200)
    assert (resident.smem_bytes, resident.ctas, resident.registers, resident.spill_bytes) == (placed.smem_bytes_per_cta, 8, 250, 0)
    assert (resident.resident_bytes, resident.streamed_bytes) == (8 * 128 * 256, 0), "with the rows that fill up the last CTA"
    int8, bf16 = (prepare("streaming_sm90", head, {"weights": weights}).resources for weights in ("int8", "bf16"))
    assert (int8.streamed_bytes, bf16.streamed_bytes) == (1_000 * 256, 1_000 * 512)
    assert (int8.entry_bytes, bf16.entry_bytes) == (4_000, 0)
    assert int8.resident_bytes == bf16.resident_bytes == 0
    assert (int8.ctas, bf16.ctas) == (3, 2), "of 384 and 576 rows"
    assert len({resident.cubin_sha256, int8.cubin_sha256, bf16.cubin_sha256}) == 3


@pytest.mark.parametrize(
    ("options", "limits"), [({}, Limits(1, 15)), ({}, Limits(64, 15, sampling=True)), ({"weights": "bf16"}, Limits(1, 15))]
)
def test_resources_of_a_walk_that_streams_a_part(
    options: dict[str, Any], limits: Limits, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = torch.zeros(1)
    monkeypatch.setattr(resident_sm90, "resident_head", lambda *_: Weights(nothing, nothing, nothing))  # packing takes seconds
    vocab, row_bytes = 248_320, 512 if options else 256
    resources = prepare("resident_sm90", wide_head(vocab), options, limits).resources
    placement = plan(vocab, 256, H200, steps=15, batch=limits.max_batch, sampling=limits.sampling, weights=options.get("weights", "int8"))
    assert resources.streamed_bytes == placement.streamed_bytes > 0
    assert resources.resident_bytes == placement.register_bytes + placement.smem_weight_bytes
    assert vocab * row_bytes <= resources.resident_bytes + resources.streamed_bytes < vocab * row_bytes * 1.04
    assert 0 < resources.entry_bytes <= vocab * (row_bytes + 4)
    assert resources.smem_bytes == placement.smem_bytes_per_cta <= H200.smem_bytes_per_cta


def test_the_translation_unit_is_readable() -> None:
    source = entry_source(
        "walk_resident.cuh", "walk_resident", 256, f"wts::ResidentShape{{{cpp(tiles_rf=6, clocks=False)}}}", "mailboxes", 1000
    )
    assert source == (
        '#define WTS_SPIN_LIMIT 1000\n#include "walk_resident.cuh"\n'
        'extern "C" __global__ void __launch_bounds__(256, 1) walk_resident(const __grid_constant__ wts::Params p) {\n'
        "  wts::walk_resident<wts::ResidentShape{.tiles_rf = 6, .clocks = false}, wts::Mailboxes>(p);\n}\n"
    )
    assert "WTS_SPIN_LIMIT" not in entry_source("x.cuh", "x", 32, "S{}", "pair", 0)
    assert "wts::x<S{}>(p);" in entry_source("x.cuh", "x", 32, "S{}")
