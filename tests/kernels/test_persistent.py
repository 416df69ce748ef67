"""Whom the Hopper walks admit, and what a launch hands to the kernel; no GPU, the kernel is a recorder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from kernels.backends import resident_sm90, streaming_sm90
from kernels.device import load
from kernels.driver import Function
from kernels.heads.markov import MarkovHead
from kernels.params import Params
from kernels.persistent import PersistentWalk, cpp, entry_source
from kernels.placement import plan
from kernels.registry import create
from kernels.synthetic import synthetic_inputs
from kernels.walk import ClockedWalk, Draft, Limits, PreparedWalk, Unsupported

WALKS = ["resident_sm90", "streaming_sm90"]
H200 = load("h200")


class Recorder:
    """A kernel that only keeps what it was launched with."""

    def __init__(self) -> None:
        self.launches: list[Params] = []

    def launch(self, params: Params) -> None:
        self.launches.append(Params.from_buffer_copy(params))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Both backends prepare with this instead of a kernel on a GPU."""
    recorder = Recorder()
    for room in (resident_sm90, streaming_sm90):
        monkeypatch.setattr(room, "load", lambda kernel, shape: cast(Function, recorder))
    return recorder


def prepare(name: str, head: MarkovHead, options: dict[str, Any] | None = None, limits: Limits = Limits(1, 16)) -> PreparedWalk:  # noqa: B008 - frozen
    return create(name, options).prepare(head, limits, H200)


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


@pytest.mark.parametrize("name", WALKS)
@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(2, 16), "walks one request at a time; got max_batch 2; backend=sglang_greedy serves batches"),
        (Limits(1, 33), "walks up to 32 steps a launch; got max_steps 33; backend=sglang_greedy serves any"),
        (Limits(1, 0), "needs max_batch and max_steps of at least 1; got 1 and 0"),
        (Limits(1, 16, sampling=True), "is greedy only and cannot serve temperature > 0; backend=sglang_folded can"),
    ],
)
def test_limits_beyond_the_walks(name: str, limits: Limits, message: str, head: MarkovHead) -> None:
    with pytest.raises(Unsupported, match=f"{name} {message}"):
        prepare(name, head, limits=limits)


@pytest.mark.parametrize("name", WALKS)
def test_heads_and_devices_beyond_the_walks(name: str, head: MarkovHead) -> None:
    with pytest.raises(Unsupported, match=f"{name} serves rank 256 only; got rank 128; backend=sglang_greedy serves every rank"):
        prepare(name, MarkovHead.synthetic(100, 128))
    for device, arch in (("b200", "sm_100a"), ("cpu", "cpu")):
        with pytest.raises(Unsupported, match=f"{name} needs sm_90a; device={device} is {arch}."):
            create(name).prepare(head, Limits(), load(device))


def wide_head(vocab: int) -> MarkovHead:
    """A head of this vocabulary that costs no memory: one row, seen again and again."""
    row = torch.ones(1, 256, dtype=torch.bfloat16)
    return MarkovHead(row.expand(vocab, 256), row.expand(vocab, 256))


def test_vocabularies_beyond_the_chip_name_the_backend_that_serves_them() -> None:
    with pytest.raises(Unsupported, match=r"needs 17\.7 MB more than h200 keeps on chip .*backend=streaming_sm90 serves it"):
        prepare("resident_sm90", wide_head(248_320))
    with pytest.raises(
        Unsupported, match=r"32 steps of base logits of 4608 rows need 316112 bytes .*; h200 has 232448; backend=sglang_greedy"
    ):
        prepare("streaming_sm90", wide_head(600_000), limits=Limits(1, 32))


@pytest.mark.parametrize(("name", "options"), [("resident_sm90", {}), ("streaming_sm90", {}), ("streaming_sm90", {"weights": "bf16"})])
def test_a_launch_hands_over_every_address_and_number(name: str, options: dict[str, Any], recorder: Recorder) -> None:
    """Strided base logits, a W1 with more rows than the vocabulary, fewer steps than prepared for."""
    small = MarkovHead.synthetic(1_000, 256)
    head = MarkovHead(torch.cat([small.w1, small.w1[:24]]), small.w2)
    walk = prepare(name, head, options)
    assert isinstance(walk, PersistentWalk)
    inputs = synthetic_inputs(1_000, 5, 1)
    padded = torch.zeros(1, 5, 1_016, dtype=torch.bfloat16)
    inputs = replace(inputs, base_logits=padded[:, :, 8:1_008])
    draft = Draft.like(inputs)
    walk.launch(inputs, draft)
    walk.launch(inputs, draft)
    (params, again) = recorder.launches
    assert bytes(params) == bytes(again)
    assert params.weights == walk.weights.packed.data_ptr()
    assert params.row_scale == (None if walk.weights.row_scale is None else walk.weights.row_scale.data_ptr())
    assert (params.row_scale is None) == (options == {"weights": "bf16"})
    assert params.latents == walk.weights.latents.data_ptr()
    assert params.base == padded.data_ptr() + 16
    assert params.base_step_stride == 1_016
    assert (params.anchor, params.tokens) == (inputs.anchor.data_ptr(), draft.tokens.data_ptr())
    assert (params.mail, params.round, params.clocks) == (walk.mail.data_ptr(), walk.round.data_ptr(), None)
    assert (params.vocab, params.steps) == (1_000, 5)
    assert params.latent_vocab == 1_000, "anchors are clamped into the vocabulary, as everywhere, and not into W1"
    assert not walk.mail.any()
    assert not walk.round.any()


@pytest.mark.parametrize("name", WALKS)
def test_two_prepared_walks_share_no_state(name: str, head: MarkovHead, recorder: Recorder) -> None:
    first, second = prepare(name, head), prepare(name, head)
    assert isinstance(first, PersistentWalk)
    assert isinstance(second, PersistentWalk)
    assert first.mail.data_ptr() != second.mail.data_ptr()
    assert first.round.data_ptr() != second.round.data_ptr()


@pytest.mark.parametrize("name", WALKS)
def test_a_launch_beyond_what_was_prepared_is_refused(name: str, head: MarkovHead, recorder: Recorder) -> None:
    walk = prepare(name, head, limits=Limits(1, 4))
    for vocab, steps, batch, message in ((1_000, 5, 1, "steps 5"), (1_000, 4, 2, "batch 2"), (999, 4, 1, "vocab 999")):
        inputs = synthetic_inputs(vocab, steps, batch)
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
    assert (resident.smem_bytes, resident.ctas, resident.spill_bytes) == (placed.smem_bytes_per_cta, 8, 0)
    assert resident.resident_bytes == resident.entry_bytes == 1_000 * (256 + 4)
    assert resident.streamed_bytes == 0
    int8, bf16 = (prepare("streaming_sm90", head, {"weights": weights}).resources for weights in ("int8", "bf16"))
    assert (int8.streamed_bytes, bf16.streamed_bytes) == (1_000 * 256, 1_000 * 512)
    assert (int8.entry_bytes, bf16.entry_bytes) == (4_000, 0)
    assert int8.resident_bytes == bf16.resident_bytes == 0
    assert (int8.ctas, bf16.ctas) == (3, 2), "of 384 and 576 rows"
    assert len({resident.cubin_sha256, int8.cubin_sha256, bf16.cubin_sha256}) == 3


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
