"""float8 rows: error bounds, the nearest level of the format, odd rows, and the same bits on CPU and GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.float8 import E4M3, E5M2, quantize_float8

SHAPES = st.tuples(st.integers(1, 40), st.sampled_from([1, 3, 16, 64, 256]))
SCALES = st.sampled_from([1e-20, 1e-3, 1.0, 37.0, 1e20, 1e36])
FORMATS = {
    E4M3: (448.0, 3, 2.0**-9),
    E5M2: (57_344.0, 2, 2.0**-16),
}  # the largest value, bits of mantissa, the smallest value (OCP 8-bit floats)
EACH = pytest.mark.parametrize("dtype", FORMATS)


def matrix(shape: tuple[int, int], scale: float, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def levels(dtype: torch.dtype) -> np.ndarray:
    """All finite values, from the 256 bit patterns."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double().numpy()
    return np.unique(values[np.isfinite(values)])


@EACH
@given(shape=SHAPES, scale=SCALES, seed=st.integers(0, 2**31), of=st.sampled_from([torch.bfloat16, torch.float32]))
def test_every_element_errs_by_half_a_step_at_most(
    dtype: torch.dtype, shape: tuple[int, int], scale: float, seed: int, of: torch.dtype
) -> None:
    top, mantissa, tiny = FORMATS[dtype]
    w = matrix(shape, scale, seed, of)
    rows = quantize_float8(w, dtype)
    assert (rows.q.dtype, rows.scale.dtype) == (dtype, torch.float32)
    assert rows.q.double().abs().amax(1).eq(top).all(), "the largest weight of a row uses the whole range"
    error, steps = (w.double() - rows.dequantized()).abs(), rows.scale.double()[:, None]
    bound = torch.maximum(w.double().abs() * 2.0 ** -(mantissa + 1), steps * tiny / 2)
    assert (error <= bound * 1.00001).all()


@EACH
@given(seed=st.integers(0, 2**31))
def test_every_code_is_the_level_nearest_to_the_quotient(dtype: torch.dtype, seed: int) -> None:
    w = matrix((20, 64), 1.0, seed)
    rows, known = quantize_float8(w, dtype), levels(dtype)
    quotient = (w.float() / rows.scale[:, None]).double().numpy()
    nearest = np.abs(quotient[..., None] - known).min(axis=-1)
    assert (np.abs(quotient - rows.q.double().numpy()) == nearest).all()


@EACH
@given(seed=st.integers(0, 2**31), rank=st.sampled_from([1, 16, 256]))
def test_quantizing_codes_again_changes_nothing(dtype: torch.dtype, seed: int, rank: int) -> None:
    q = quantize_float8(matrix((9, rank), 1.0, seed), dtype).q.float()
    again = quantize_float8(q, dtype)
    assert torch.equal(again.q.float(), q)
    assert again.scale.eq(1.0).all()


@EACH
def test_zero_and_broken_rows(dtype: torch.dtype) -> None:
    w = torch.tensor([[0.0, -0.0], [torch.nan, 1.0], [torch.inf, 1.0], [-torch.inf, torch.inf], [2.0, 1.0]], dtype=torch.bfloat16)
    rows = quantize_float8(w, dtype)
    assert rows.q[:4].double().eq(0).all()
    assert rows.scale[0] == 0
    assert rows.scale[1:4].isnan().all()
    assert rows.dequantized()[0].tolist() == [0.0, 0.0]
    assert rows.dequantized()[4].tolist() == pytest.approx([2.0, 1.0], rel=1e-7)
    assert rows.dequantized()[1:4].isnan().all()


@EACH
def test_a_scale_that_was_rounded_down_never_leaves_the_range(dtype: torch.dtype) -> None:
    """Subnormal scales are rounded coarsely: the quotient of the largest weight may lie far above the top."""
    w = torch.cat([torch.tensor([[2.0**-133, -(2.0**-133)]]), torch.arange(1.0, 400.0)[:, None] * torch.tensor([2.0**-133, -(2.0**-134)])])
    rows = quantize_float8(w, dtype)
    assert rows.q.double().isfinite().all()
    assert rows.q.double().abs().max() <= FORMATS[dtype][0]
    assert (rows.scale > 0).all()


@EACH
def test_chunks_do_not_show(dtype: torch.dtype) -> None:
    w = matrix((40_000, 4), 1.0, 0)
    rows = quantize_float8(w, dtype)
    for start in (0, 16_380, 39_990):
        part = quantize_float8(w[start : start + 10], dtype)
        assert torch.equal(part.q.float(), rows.q[start : start + 10].float())
        assert torch.equal(part.scale, rows.scale[start : start + 10])


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(3, 4, dtype=torch.int8), torch.zeros(2, 0), torch.zeros(0, 2)])
def test_bad_input_is_one_sentence(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"got .*\.$"):
        quantize_float8(bad, E4M3)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got torch.float8_e4m3fnuz\.$"):
        quantize_float8(torch.zeros(2, 2), torch.float8_e4m3fnuz)


@pytest.mark.gpu
@EACH
def test_gpu_gives_the_same_bits(dtype: torch.dtype) -> None:
    for scale in (1e-38, 1.0, 1e36):
        w = matrix((50_000, 256), scale, 1)
        cpu, gpu = quantize_float8(w, dtype), quantize_float8(w.cuda(), dtype)
        assert torch.equal(cpu.q.view(torch.uint8), gpu.q.cpu().view(torch.uint8))
        assert torch.equal(cpu.scale, gpu.scale.cpu())
