"""Noise: error bounds, exact rounding, and the same bits from torch, from NVRTC's constant evaluation and from a host compiler."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Iterable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import noise
from kernels.noise import Stream, exp2_weight, exponential, fma, fma_sat, gumbel, log_positive, noise_counters, noise_words, uniform
from kernels.sampling import inverse_temperature

pytestmark = pytest.mark.usefixtures("one_thread")
HoldInCpp = Callable[[str, Iterable[str]], None]
HEADER = '#include "common/noise.cuh"'
LAST = 2**32 - 1
UNITS = noise.f32(noise.f32(1.44269504) / 126)  # RowTemperature.scale times T
EXTREME = [0, 1, 2, 3, 255, 256, 2**23, 2**24 - 1, 2**24, 2**24 + 1, 2**31 - 129, 2**31 - 1, 2**31, 2**31 + 1, 2**31 + 128]
EXTREME += [LAST - word for word in (0, 1, 2, 127, 128, 255, 256, 2**24, 2**29)]
EXTREME += [1257966796 + away for away in range(-300, 301, 75)]  # about 1 - sqrt(1/2), where the exponential changes its formula
EXTREME += [int(2**32 * (1 - math.exp(-1.0))) + away for away in range(-400, 401, 100)]  # E about 1, where a Gumbel is about 0


def words(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.tensor(EXTREME), torch.randint(2**32, (count,), generator=generator)])


def bits(x: Tensor) -> list[int]:
    return (x.view(torch.int32).long() & 0xFFFFFFFF).tolist()


def value_of(pattern: int) -> float:
    return struct.unpack(">f", struct.pack(">I", pattern))[0]


def literal(pattern: int) -> str:
    return f"cuda::std::bit_cast<float>({pattern:#x}u)"


def is_bits(expression: str, pattern: int) -> str:
    return f"cuda::std::bit_cast<uint32_t>({expression}) == {pattern:#x}u"


def nearest_f32(x: Fraction) -> float:
    """The fp32 nearest to x, ties to even; by the definition."""
    if x == 0:
        return 0.0
    exponent = math.frexp(abs(x))[1] if abs(x) < 2**900 else 1000
    quantum = Fraction(2) ** max(exponent - 24, -149)
    rounded = round(x / quantum) * quantum
    return math.inf * (1 if x > 0 else -1) if abs(rounded) >= Fraction(2) ** 128 else float(rounded)


FINITE = st.integers(0, LAST).map(value_of).filter(math.isfinite)
NEAR_ONE = st.tuples(st.integers(-(2**13), 2**13), st.integers(-14, 0)).map(lambda pair: value_of(0x3F800000 + pair[0]) * 2.0 ** pair[1])
TINY = st.tuples(st.sampled_from([-1.0, 1.0]), st.integers(-149, -40)).map(lambda pair: pair[0] * 2.0 ** pair[1])


@settings(max_examples=200)
@given(st.one_of(st.tuples(FINITE, FINITE, FINITE), st.tuples(NEAR_ONE, NEAR_ONE, TINY), st.tuples(NEAR_ONE, NEAR_ONE, NEAR_ONE)))
def test_fma_rounds_once(abc: tuple[float, float, float]) -> None:
    a, b, c = abc
    exact = nearest_f32(Fraction(a) * Fraction(b) + Fraction(c))
    assert fma(*(torch.tensor([x], dtype=torch.float32) for x in abc)).item() == exact
    assert fma(torch.tensor([a]), b, c).item() == exact


def test_fma_where_two_roundings_would_differ(hold_in_cpp: HoldInCpp) -> None:
    """The product is half way between two fp32; an addend that fp64 cannot hold beside it decides."""
    facts: list[str] = []
    small, large = 1 + 2.0**-12, 1 + 2.0**-23
    for a, b, below, above, tie in (
        (small, small, 1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-23, 1 + 2.0**-11),
        (large, 1.5, 1.5 + 2.0**-23, 1.5 + 2.0**-22, 1.5 + 2.0**-22),
    ):
        for c, exact in ((-(2.0**-80), below), (0.0, tie), (2.0**-80, above)):
            assert fma(torch.tensor([a]), b, c).item() == exact
            assert fma(torch.tensor([-a]), b, -c).item() == -exact
            facts += [f"wts::fma_rn({sign}{a.hex()}f, {b.hex()}f, {sign}({c.hex()}f)) == {sign}{exact.hex()}f" for sign in ("", "-")]
    hold_in_cpp(HEADER, facts)


@pytest.mark.parametrize("abc", [(math.inf, 1.0, 2.0), (-math.inf, 0.5, 1.0), (1.0, 1.0, math.inf), (3e38, 10.0, 0.0), (-3e38, 10.0, 0.0)])
def test_fma_of_infinities(abc: tuple[float, float, float]) -> None:
    a, b, c = abc
    assert fma(torch.tensor([a]), torch.tensor([b]), torch.tensor([c])).item() == (math.inf if a * b + c > 0 else -math.inf)
    assert fma(torch.tensor([math.nan]), 1.0, 0.0).isnan().item()


def test_exponentials_and_gumbels_are_accurate() -> None:
    w = words(200_000)
    u = (w.numpy().astype(np.float64) + 0.5) / 2**32
    exact = -np.log1p(-u)
    drawn = exponential(w).double().numpy()
    assert np.abs(drawn / exact - 1).max() < 4e-7
    assert drawn.min() > 1e-10
    assert drawn.max() < 23
    assert np.abs(gumbel(w).double().numpy() + np.log(exact)).max() < 1.1e-6
    assert gumbel(torch.tensor([0, LAST])).tolist() == pytest.approx([-math.log(2.0**-33), -math.log(33 * math.log(2))], rel=1e-6)


def test_logarithms_are_accurate() -> None:
    x = torch.cat([torch.logspace(-37, 38, 50_000), torch.linspace(0.5, 2.0, 50_000), 1 + torch.arange(-999, 999) * 2.0**-24])
    exact = np.log(x.double().numpy())
    inside = exact != 0
    assert (np.abs(log_positive(x).double().numpy() - exact)[inside] / np.abs(exact[inside])).max() < 3e-7
    assert log_positive(torch.ones(1)).item() == 0.0


def test_weights_are_accurate() -> None:
    t = torch.linspace(0, 1, 100_001)
    exact = np.exp2(126 * (t.double().numpy() - 1))
    assert np.abs(exp2_weight(t).double().numpy() / exact - 1).max() < 3e-6
    assert exp2_weight(torch.tensor([0.0, 1.0])).tolist() == [2.0**-126, 1.0]
    distance, scale = -torch.rand(100_000) * 80, torch.tensor(noise.f32(1.44269504 / 126))
    exact = np.exp(distance.double().numpy())
    assert np.abs(exp2_weight(fma_sat(distance, scale, 1.0)).double().numpy() / exact - 1).max() < 7e-6


def test_saturation() -> None:
    wild = torch.tensor([math.nan, math.inf, -math.inf, 1.0, -127.0, -3e38, 3e38, 0.25])
    assert fma_sat(wild, torch.tensor(2.0), 0.25).tolist() == [0, 1, 0, 1, 0, 0, 1, 0.75]


def test_uniforms_are_exact_and_strictly_inside() -> None:
    w = words(100_000)
    assert torch.equal(uniform(w).double(), ((w >> 9).double() + 0.5) / 2**23)
    assert (uniform(torch.tensor([0, LAST])).double() == torch.tensor([2.0**-24, 1 - 2.0**-24], dtype=torch.float64)).all()


def some_floats() -> Tensor:
    """Arguments for exp2_weight: its range, the ends, integers and halves of the exponent."""
    ends = torch.tensor([0.0, 1.0, 0.5, 2.0**-24, 1 - 2.0**-24, 1e-40, 125.5 / 126, 125 / 126, 0.25 / 126])
    return torch.cat([ends, torch.rand(100_000, generator=torch.Generator().manual_seed(1))])


def test_nvrtc_computes_the_same_bits(hold_in_cpp: HoldInCpp) -> None:
    w = words(20)
    facts: list[str] = []
    for name, function in (("exponential", exponential), ("gumbel", gumbel), ("uniform", uniform)):
        facts += [is_bits(f"wts::{name}({word}u)", expected) for word, expected in zip(w.tolist(), bits(function(w)), strict=True)]
    positive = torch.cat([exponential(w), torch.tensor([1.0, 16.0, 2.0**-126, 3e38, 0.70710677, 0.70710683, 1.4142135, 1.4142137])])
    weights = some_floats()[:60]
    for name, x, function in (("log_positive", positive, log_positive), ("exp2_weight", weights, exp2_weight)):
        facts += [is_bits(f"wts::{name}({literal(at)})", expected) for at, expected in zip(bits(x), bits(function(x)), strict=True)]
    hold_in_cpp(HEADER, facts)


def test_nvrtc_scores_like_the_host(hold_in_cpp: HoldInCpp) -> None:
    """The formulas of both rules that are more than one function. (Constant evaluation knows no infinities; test_sampling.py has them.)"""
    generator = torch.Generator().manual_seed(2)
    w = words(0, 3)
    logit = torch.randn(len(w), generator=generator).mul(4).bfloat16().float()
    logit[:2] = torch.tensor([-0.0, 0.0])
    inverse = inverse_temperature(torch.rand(len(w), generator=generator) * 2)
    score = fma(logit, inverse, gumbel(w))
    top, total = logit + 1.5, 1 + 15 * torch.rand(len(w), generator=generator)
    weight = exp2_weight(fma_sat(logit - top, inverse * UNITS, 1.0))
    group = fma(top, inverse, -log_positive(exponential(w) * (1 / total)))
    facts = [
        is_bits(f"wts::row_score({literal(at)}, {literal(i)}, wts::gumbel({word}u))", expected)
        for at, i, word, expected in zip(bits(logit), bits(inverse), w.tolist(), bits(score), strict=True)
    ]
    facts += [
        is_bits(f"wts::group_score({literal(t)}, {literal(s)}, {literal(i)}, {word}u)", expected)
        for t, s, i, word, expected in zip(bits(top), bits(total), bits(inverse), w.tolist(), bits(group), strict=True)
    ]
    facts += [
        is_bits(f"wts::row_threshold({literal(s)}, {word}u)", expected)
        for s, word, expected in zip(bits(total), w.tolist(), bits(uniform(w) * total), strict=True)
    ]
    facts += [
        is_bits(f"wts::row_weight({literal(at)}, {literal(t)}, wts::mul_rn({literal(i)}, 1.44269504f / wts::kWeightSpan))", expected)
        for at, t, i, expected in zip(bits(logit), bits(top), bits(inverse), bits(weight), strict=True)
    ]
    facts += [is_bits("wts::group_top(2.0f)", 0x40000000)]
    hold_in_cpp(HEADER, facts)


def test_nvrtc_reads_temperatures_like_the_host(hold_in_cpp: HoldInCpp) -> None:
    greedy, hot = [0.0, -0.0, -1.0, -3e38], [1e-45, 1e-6, 1e-5, 0.1, 0.3, 0.6, 0.7, 1.0, 1.1, 1.3, 2.0, 3.0, 9999.0, 1e4, 1e5, 3e38]
    t = torch.tensor(greedy + hot)
    inverse = inverse_temperature(t)
    assert inverse[: len(greedy)].tolist() == [1.0] * len(greedy)
    assert inverse_temperature(torch.tensor([math.nan, -math.inf, math.inf])).tolist() == [1.0, 1.0, noise.f32(1e-4)]
    facts = []
    for index, (at, i, s) in enumerate(zip(bits(t), bits(inverse), bits(inverse * UNITS), strict=True)):
        row = f"wts::RowTemperature::of({literal(at)})"
        facts += [f"{row}.greedy == {str(index < len(greedy)).lower()}", is_bits(f"{row}.inverse", i), is_bits(f"{row}.scale", s)]
    hold_in_cpp(HEADER, facts)


def test_words_and_constants_in_cuda(hold_in_cpp: HoldInCpp) -> None:
    facts = [
        f"wts::kDraftRows == {int(Stream.DRAFT_ROWS)}u && wts::kDraftGroups == {int(Stream.DRAFT_GROUPS)}u",
        f"wts::kVerify == {int(Stream.VERIFY)}u && wts::kGroupRows == {noise.GROUP_ROWS}",
        f"wts::kRowsPerWords == {noise.ROWS_PER_WORDS} && wts::kGroupsPerWords == {noise.GROUPS_PER_WORDS}",
    ]
    names = {Stream.DRAFT_ROWS: "kDraftRows", Stream.DRAFT_GROUPS: "kDraftGroups", Stream.VERIFY: "kVerify"}
    for slot, step, round, seed, stream in [
        (0, 0, 0, 0, 0),
        (63, 31, LAST, -1, 1),
        (5, 16, 2**32 + 7, 2**40 + 3, 2),
        (1, 2, 3, -(2**62), 0),
    ]:
        kind = list(Stream)[stream]
        drawn = noise_words(3, step, torch.tensor([slot]), round, kind, torch.tensor([seed]))[0].tolist()
        for index, four in enumerate(drawn):
            counter = f"wts::noise_counter({index}u, {step}u, {slot}u, {round % 2**32}u, wts::{names[kind]})"
            facts += [f"wts::philox({counter}, wts::philox_key({seed}ll)).w[{i}] == {word}u" for i, word in enumerate(four)]
    hold_in_cpp(HEADER, facts)


def test_a_host_compiler_computes_the_same_bits_on_many_words(host_library: Callable[[str], ctypes.CDLL]) -> None:
    of_words, of_floats = ("exponential", "gumbel", "uniform"), ("log_positive", "exp2_weight")
    loops = [(name, "uint32_t") for name in of_words] + [(name, "float") for name in of_floats]
    source = "\n".join(
        f'extern "C" void {name}s(const {kind}* in, float* out, int n) {{ for (int i = 0; i < n; i++) out[i] = wts::{name}(in[i]); }}'
        for name, kind in loops
    )
    library = host_library(f"{HEADER}\nusing wts::uint32_t;\n{source}")
    w = words(100_000, 5)
    floats = some_floats()
    positive = torch.cat([exponential(w), torch.logspace(-37, 38, 10_000)])
    for name, x, function in [
        *((name, w, getattr(noise, name)) for name in of_words),
        ("log_positive", positive, log_positive),
        ("exp2_weight", floats, exp2_weight),
    ]:
        given_ = x.numpy().astype(np.uint32) if x.dtype == torch.int64 else x.numpy()
        out = np.empty(len(x), np.float32)
        getattr(library, f"{name}s")(given_.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), len(x))
        assert np.array_equal(out.view(np.int32), function(x).numpy().view(np.int32)), name


def test_no_two_uses_of_noise_share_a_counter() -> None:
    """Every step, slot and stream, the verifier's included, and two rounds: all counters differ."""
    slots = torch.arange(64)
    counters = torch.cat(
        [noise_counters(9, step, slots, round, stream).flatten(0, 1) for step in range(32) for round in (0, 1) for stream in Stream]
    )
    assert len(counters.unique(dim=0)) == len(counters) == 64 * 9 * 32 * 2 * 3


def test_a_step_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="steps 0 to 255; got 256"):
        noise_words(1, 256, torch.zeros(1, dtype=torch.int64), 0, Stream.VERIFY, torch.zeros(1, dtype=torch.int64))


@pytest.mark.gpu
def test_a_gpu_computes_the_same_bits() -> None:
    w, floats = words(300_000, 6), some_floats()
    for function, x in ((exponential, w), (gumbel, w), (uniform, w), (exp2_weight, floats)):
        assert bits(function(x.cuda()).cpu()) == bits(function(x)), function.__name__
