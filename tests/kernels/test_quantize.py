"""The INT8 rule: error bounds, exact integers, odd rows, and the same bits as numpy with one rounding an operation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.quantize import MAX_RANK, exact_sums, int8_bias, quantize_rows, two_planes

SHAPES = st.tuples(st.integers(1, 40), st.sampled_from([1, 3, 16, 64, 256]))
SCALES = st.sampled_from([1e-38, 1e-20, 1e-3, 1.0, 37.0, 1e20, 1e36])


def matrix(shape: tuple[int, int], scale: float, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@given(shape=SHAPES, scale=SCALES, seed=st.integers(0, 2**31), dtype=st.sampled_from([torch.bfloat16, torch.float32]))
def test_rows_err_by_at_most_half_a_step(shape: tuple[int, int], scale: float, seed: int, dtype: torch.dtype) -> None:
    w = matrix(shape, scale, seed, dtype)
    rows = quantize_rows(w)
    assert rows.q.dtype == torch.int8
    assert rows.q.abs().max() <= 127
    error = (w.double() - rows.dequantized()).abs()
    assert (error <= rows.scale.double()[:, None] * 0.50001).all()
    assert (rows.q.abs().amax(1) == 127).all(), "the largest weight of a row uses the whole range"


@given(shape=SHAPES, scale=SCALES, seed=st.integers(0, 2**31))
def test_planes_err_by_less_than_1e_4_of_the_largest(shape: tuple[int, int], scale: float, seed: int) -> None:
    u = matrix(shape, scale, seed)
    planes = two_planes(u)
    assert planes.hi.abs().max() <= 127
    error = (u.double() - planes.dequantized()).abs().amax(1)
    subnormal = 2.0**-149 * 127 * 256  # a scale below 2^-126 is itself rounded to steps of 2^-149
    assert (error <= 1e-4 * u.double().abs().amax(1) + subnormal).all()


def test_planes_are_exact_where_scale_and_codes_are() -> None:
    u = torch.tensor([[127.0, -64.0, 0.0, 1.0], [254.0, 1.0, -1.0, 0.0]], dtype=torch.bfloat16)
    planes = two_planes(u)
    assert planes.hi.tolist() == [[127, -64, 0, 1], [127, 0, 0, 0]]  # 1/2 is a tie and rounds to even
    assert planes.lo.tolist() == [[0, 0, 0, 0], [0, 127, -128, 0]]  # +128 clamps, -128 fits
    assert planes.scale_lo.tolist() == [1 / 256, 2 / 256]


@given(seed=st.integers(0, 2**31), rank=st.sampled_from([1, 16, 256]))
def test_quantizing_codes_again_changes_nothing(seed: int, rank: int) -> None:
    q = quantize_rows(matrix((9, rank), 1.0, seed)).q
    again = quantize_rows(q.float())
    assert torch.equal(again.q, q)
    assert again.scale.eq(1.0).all()


def test_zero_and_broken_rows() -> None:
    w = torch.tensor([[0.0, -0.0], [torch.nan, 1.0], [torch.inf, 1.0], [-torch.inf, torch.inf], [2.0, 1.0]], dtype=torch.bfloat16)
    rows, planes = quantize_rows(w), two_planes(w)
    assert rows.q[:4].eq(0).all()
    assert planes.hi[:4].eq(0).all()
    assert planes.lo[:4].eq(0).all()
    assert rows.scale[0] == 0
    assert planes.scale_lo[0] == 0
    assert rows.scale[1:4].isnan().all()
    assert planes.scale_lo[1:4].isnan().all()
    bias = int8_bias(rows, planes)
    assert bias[4, 4] > 0
    assert bias[0, [0, 4]].eq(0).all()
    assert bias[:, 1:4].isnan().all()
    assert bias[1:4].isnan().all()


def test_smallest_bf16_keeps_its_codes() -> None:
    tiny = torch.tensor([[2.0**-133, -(2.0**-133), 0.0]], dtype=torch.bfloat16)
    assert quantize_rows(tiny).q.tolist() == [[127, -127, 0]]
    assert quantize_rows(tiny).scale.item() > 0


@given(seed=st.integers(0, 2**31), rank=st.sampled_from([1, 5, 256, MAX_RANK]), wide=st.booleans())
def test_sums_are_the_int64_sums(seed: int, rank: int, wide: bool) -> None:
    w, u = matrix((33, rank), 0.05, seed), matrix((2, rank), 1.0, seed + 1)
    if wide:
        w, u = w.sign(), u.sign()  # every code at the end of its range
    rows, planes = quantize_rows(w), two_planes(u)
    latents = 256 * planes.hi.long() + planes.lo.long()
    expected = (latents[:, None, :] * rows.q.long()[None]).sum(2)
    assert torch.equal(exact_sums(rows, planes).long(), expected)
    assert expected.abs().max() < 2**31


@given(seed=st.integers(0, 2**31), scale=SCALES)
def test_every_bit_is_numpys_with_one_rounding_an_operation(seed: int, scale: float) -> None:
    w, u = matrix((40, 64), 0.05, seed), matrix((3, 64), scale, seed + 1)
    rows, planes = quantize_rows(w), two_planes(u)
    f = np.float32

    def scale_of(m: np.ndarray) -> np.ndarray:
        return np.abs(m).max(axis=1) / f(127)

    w32, u32 = w.float().numpy(), u.float().numpy()
    s_w, s_hi = scale_of(w32), scale_of(u32)
    q_w = np.clip(np.rint(w32 / s_w[:, None]), -127, 127).astype(np.int8)
    hi = np.clip(np.rint(u32 / s_hi[:, None]), -127, 127).astype(np.int8)
    s_lo = s_hi / f(256)
    rest = u32 - s_hi[:, None] * hi.astype(f)
    lo = np.clip(np.rint(rest / s_lo[:, None]), -128, 127).astype(np.int8)
    x = 256 * (hi.astype(np.int32) @ q_w.T.astype(np.int32)) + lo.astype(np.int32) @ q_w.T.astype(np.int32)
    bias = (s_lo[:, None] * s_w[None, :]) * x.astype(f)
    np.testing.assert_array_equal(rows.q.numpy(), q_w)
    np.testing.assert_array_equal(planes.hi.numpy(), hi)
    np.testing.assert_array_equal(planes.lo.numpy(), lo)
    np.testing.assert_array_equal(planes.scale_lo.numpy(), s_lo)
    np.testing.assert_array_equal(int8_bias(rows, planes).numpy(), bias)


def test_chunks_do_not_show() -> None:
    w = matrix((40_000, 4), 1.0, 0)
    rows, planes = quantize_rows(w), two_planes(w)
    for start in (0, 16_380, 39_990):
        part = w[start : start + 10]
        assert torch.equal(quantize_rows(part).q, rows.q[start : start + 10])
        assert torch.equal(two_planes(part).lo, planes.lo[start : start + 10])
    assert torch.equal(
        int8_bias(rows, two_planes(w[:1]))[0, 20_000:20_010], int8_bias(quantize_rows(w[20_000:20_010]), two_planes(w[:1]))[0]
    )


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(3, 4, dtype=torch.int8), torch.zeros(2, MAX_RANK + 1), torch.zeros(2, 0)])
def test_bad_input_is_one_sentence(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"got .*\.$"):
        quantize_rows(bad)


@pytest.mark.gpu
def test_gpu_gives_the_same_bits() -> None:
    for scale in (1e-38, 1.0, 1e36):
        w, u = matrix((50_000, 256), 0.05, 1), matrix((50_000, 256), scale, 2)
        cpu, gpu = quantize_rows(w), quantize_rows(w.cuda())
        planes, planes_gpu = two_planes(u), two_planes(u.cuda())
        pairs = [(cpu.q, gpu.q), (cpu.scale, gpu.scale), (planes.hi, planes_gpu.hi), (planes.lo, planes_gpu.lo)]
        for here, there in [*pairs, (planes.scale_lo, planes_gpu.scale_lo)]:
            assert torch.equal(here, there.cpu())
        first, first_gpu = two_planes(u[:2]), two_planes(u[:2].cuda())
        assert torch.equal(int8_bias(cpu, first), int8_bias(gpu, first_gpu).cpu())
