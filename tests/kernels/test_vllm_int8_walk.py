"""Where the int8 walk without register tiles keeps W2, what it refuses, and that every batch gets the kernel for many requests."""

from __future__ import annotations

import pytest
import torch

from kernels.agreement import check
from kernels.backends import resident_sm90
from kernels.backends.resident_sm90 import ResidentOptions, ResidentSm90
from kernels.backends.vllm_int8_walk import VllmInt8Walk
from kernels.build import Kernel
from kernels.device import load
from kernels.heads.markov import MarkovHead
from kernels.placement import BATCHED_TILE_ROWS, RANK, BatchedPlacement
from kernels.registry import create
from kernels.synthetic import synthetic_inputs
from kernels.walk import Draft, Limits, Rounding, Unsupported, WalkInputs

H100, H200 = load("h100"), load("h200")
VOCABS = (129_280, 151_936, 248_320, 270_336)


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that hands back its source as the cubin, and never spills."""

    def build(source: str, entry: str, arch: str, *, allow_spills: bool = False) -> Kernel:
        return Kernel(entry, arch, source.encode(), 100, 0, 0, "", "")

    monkeypatch.setattr(resident_sm90, "build", build)


def walk() -> VllmInt8Walk:
    backend = create("vllm_int8_walk")
    assert isinstance(backend, VllmInt8Walk)
    return backend


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 64])
def test_nothing_lives_in_registers_and_what_does_not_fit_is_streamed(vocab: int, batch: int, sampling: bool) -> None:
    placement, kernel = walk().fit(vocab, RANK, Limits(batch, 16, sampling), H100)
    assert isinstance(placement, BatchedPlacement)
    assert placement.register_bytes == 0
    padded = placement.ctas * placement.rows_per_cta * RANK
    assert vocab * RANK <= padded < vocab * RANK + placement.rows_per_cta * RANK
    assert placement.smem_weight_bytes + placement.streamed_bytes == padded
    assert 0 < placement.smem_weight_bytes < placement.streamed_bytes * 1.01, "about half of it or less: the others are streamed"
    assert placement.smem_bytes_per_cta <= H100.smem_bytes_per_cta
    one_more = placement.members * BATCHED_TILE_ROWS * RANK
    assert placement.smem_bytes_per_cta + one_more > H100.smem_bytes_per_cta, "no place is left unused"
    assert b"walk_batched" in kernel.cubin


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize(("vocab", "kept", "of"), [(129_280, 16.6, 33.1), (151_936, 15.6, 38.9), (248_320, 16.0, 63.6)])
def test_the_bytes_that_the_docstring_names(vocab: int, kept: float, of: float) -> None:
    placement, _ = walk().fit(vocab, RANK, Limits(1, 16), H100)
    assert placement.smem_weight_bytes / 1e6 == pytest.approx(kept, abs=0.05)
    assert vocab * RANK / 1e6 == pytest.approx(of, abs=0.05)


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize(
    ("batch", "sampling", "alike"), [(1, False, 9), (4, True, 9), (8, False, 9), (9, False, 9), (16, True, 16), (64, True, 64)]
)
def test_every_batch_gets_the_kernel_that_resident_sm90_has_for_many(batch: int, sampling: bool, alike: int) -> None:
    of_many = ResidentSm90(ResidentOptions()).fit(151_936, RANK, Limits(alike, 16, sampling), H200)
    assert walk().fit(151_936, RANK, Limits(batch, 16, sampling), H200) == of_many


@pytest.mark.parametrize(
    ("vocab", "limits", "message"),
    [
        (1_000, Limits(1, 17), "up to 16 steps; got max_steps 17"),
        (270_337, Limits(1, 16), "up to 2048 rows a SM, 270336 on h100; got vocab 270337"),
        (1_000, Limits(65, 16), "up to 64 requests; got batch 65"),
    ],
)
def test_the_originals_limits(vocab: int, limits: Limits, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        walk().fit(vocab, RANK, limits, H100)


@pytest.mark.parametrize(
    ("rank", "limits", "device", "message"),
    [
        (128, Limits(), "h100", "vllm_int8_walk serves rank 256 only; got rank 128"),
        (256, Limits(65, 4), "h100", "vllm_int8_walk walks up to 64 requests"),
        (256, Limits(1, 17), "h100", "vllm_int8_walk walks up to 16 steps"),
        (256, Limits(), "b200", "vllm_int8_walk needs sm_90a; device=b200"),
    ],
)
def test_prepare_refuses_in_its_own_name(rank: int, limits: Limits, device: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        walk().prepare(MarkovHead.synthetic(64, rank), limits, load(device))


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "temperatures"), [(1, [0.0]), (3, [0.0, 1.0, 0.6]), (9, [0.0])])
def test_tokens_are_the_oracles_on_the_gpu(batch: int, temperatures: list[float]) -> None:
    head = MarkovHead.synthetic(151_936, RANK, 0, "cuda")
    plain = synthetic_inputs(151_936, 7, batch, 1, "cuda")
    drawn = torch.tensor((temperatures * batch)[:batch], device="cuda")
    inputs, limits = WalkInputs(plain.base_logits, plain.anchor, drawn, plain.seed), Limits(batch, 7, any(temperatures))
    prepared, draft = walk().prepare(head, limits, H200), Draft.like(plain)
    assert (prepared.name, prepared.resources.spill_bytes) == ("vllm_int8_walk", 0)
    for round in range(2):
        assert prepared.round() == round
        prepared.launch(inputs, draft)
        agreement = check(draft.tokens, head, inputs, Rounding.INT8, noise=prepared.noise if limits.sampling else None, round=round)
        assert agreement.ok, agreement.reason
