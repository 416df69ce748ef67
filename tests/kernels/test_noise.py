"""Noise: error bounds, exact rounding, and the same bits from torch, from NVRTC's constant evaluation and from a host compiler."""

from __future__ import annotations

import ctypes
import math
import re
import struct
import zlib
from collections.abc import Callable, Iterable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import noise
from kernels.build import CUDA_ROOM, Kernel, build
from kernels.driver import Function, LaunchShape
from kernels.noise import Stream, exp2_units, exponential, fma, fma_down, gumbel, log_positive, noise_counters, noise_words, uniform
from kernels.sampling import group_score, group_shift, inverse_temperature, is_far, rare_weight, row_weight

pytestmark = pytest.mark.usefixtures("one_thread")
HoldInCpp = Callable[[str, Iterable[str]], None]
HEADER = '#include "common/noise.cuh"'
LAST = 2**32 - 1
LOG2_E = noise.f32(1.44269504)  # RowTemperature.scale times T
UNIT = 2.0**-12  # of the exponents of weights
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


NAN = literal(0x7FC00000)


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
    below = fma_down(torch.tensor([a]), b, c).double()
    assert math.isinf(exact) or Fraction(below.item()) <= Fraction(a) * Fraction(b) + Fraction(c)
    assert below.item() in (exact, np.nextafter(np.float32(exact), np.float32(-math.inf)).item())


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
            assert fma_down(torch.tensor([a, -a]), b, torch.tensor([c, -c])).tolist() == [below, -above]
            facts += [f"wts::fma_rd({a.hex()}f, {b.hex()}f, {c.hex()}f) == {below.hex()}f"]
            facts += [f"wts::fma_rd(-{a.hex()}f, {b.hex()}f, -({c.hex()}f)) == -{above.hex()}f"]
            facts += [f"wts::fma_rn({sign}{a.hex()}f, {b.hex()}f, {sign}({c.hex()}f)) == {sign}{exact.hex()}f" for sign in ("", "-")]
    hold_in_cpp(HEADER, facts)


@pytest.mark.parametrize("abc", [(math.inf, 1.0, 2.0), (-math.inf, 0.5, 1.0), (1.0, 1.0, math.inf), (3e38, 10.0, 0.0), (-3e38, 10.0, 0.0)])
def test_fma_of_infinities(abc: tuple[float, float, float]) -> None:
    a, b, c = abc
    assert fma(torch.tensor([a]), torch.tensor([b]), torch.tensor([c])).item() == (math.inf if a * b + c > 0 else -math.inf)
    assert fma(torch.tensor([math.nan]), 1.0, 0.0).isnan().item()
    assert fma_down(torch.tensor([math.inf, -math.inf]), 0.5, 1.0).tolist() == [math.inf, -math.inf]
    assert fma_down(torch.tensor([2.0**-149, -(2.0**-149)]), 0.25, 0.0).tolist() == [0.0, -(2.0**-149)], "the next below 0 is the smallest"


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


def test_the_table_of_powers_rises_and_is_nearly_exact() -> None:
    text = (CUDA_ROOM / "common" / "exp2_table.inc").read_text()
    table = np.array([int(word, 16) for word in re.findall(r"0x[0-9a-f]{6}", text)])
    assert len(table) == text.count(",") == 4096
    assert table[0] == 0
    assert (np.diff(table) > 0).all()
    below = np.rint((np.exp2(np.arange(4096) / 4096) - 1) * 2**23).astype(int) - table
    assert below.min() == 0
    assert below.max() <= 2
    assert zlib.crc32(table.astype("<u4").tobytes()) == 0x9E0D8E36, "other mantissas need another recording: both sides read this file"


def test_powers_of_two() -> None:
    """Exact at integers, within 2.4e-7 elsewhere, rising; 0 below the smallest normal number."""
    x = every_exponent()
    power, exact = exp2_units(x).double().numpy(), np.exp2(x.double().numpy())
    assert (power[::4096] == exact[::4096]).all()
    assert (np.diff(power) > 0).all()
    assert np.abs(power / exact - 1).max() < 2.4e-7
    assert power[0] == 2.0**-126
    assert exp2_units(torch.tensor([-126 - UNIT, -127.0, -4096.0, -3e38, -math.inf])).tolist() == [0.0] * 5
    assert exp2_units(torch.tensor([math.nan, 0.0])).isnan().tolist() == [True, False]


def test_uniforms_are_exact_and_strictly_inside() -> None:
    w = words(100_000)
    assert torch.equal(uniform(w).double(), ((w >> 9).double() + 0.5) / 2**23)
    assert (uniform(torch.tensor([0, LAST])).double() == torch.tensor([2.0**-24, 1 - 2.0**-24], dtype=torch.float64)).all()


def every_exponent() -> Tensor:
    """[126 * 4096 + 1] fp32 -126, -126 + 2^-12, ..., 0: all that a weight's exponent can be."""
    return torch.arange(-126 * 4096, 1) * UNIT


def some_exponents() -> Tensor:
    """Arguments for exp2_units: ends, integers, and multiples of 2^-12 on both sides of -126."""
    ends = torch.tensor([0.0, -0.0, -UNIT, -1.0, -125.0, -126.0, -126 + UNIT, -126 - UNIT, -127.0, -3000.0])
    return torch.cat([ends, torch.randint(-127 * 4096, 1, (2_000,), generator=torch.Generator().manual_seed(1)) * UNIT])


def test_nvrtc_computes_the_same_bits(hold_in_cpp: HoldInCpp) -> None:
    w = words(20)
    facts: list[str] = []
    for name, function in (("exponential", exponential), ("gumbel", gumbel), ("uniform", uniform)):
        facts += [is_bits(f"wts::{name}({word}u)", expected) for word, expected in zip(w.tolist(), bits(function(w)), strict=True)]
    positive = torch.cat([exponential(w), torch.tensor([1.0, 16.0, 2.0**-126, 3e38, 0.70710677, 0.70710683, 1.4142135, 1.4142137])])
    for name, x, function in (("log_positive", positive, log_positive), ("exp2_units", some_exponents()[:100], exp2_units)):
        facts += [is_bits(f"wts::{name}({literal(at)})", expected) for at, expected in zip(bits(x), bits(function(x)), strict=True)]
    hold_in_cpp(HEADER, facts)


def test_nvrtc_scores_like_the_host(hold_in_cpp: HoldInCpp) -> None:
    """The formulas of both rules that are more than one function. (Constant evaluation knows no infinities; the host compiler has them.)"""
    generator = torch.Generator().manual_seed(2)
    w = words(0, 3)
    logit = torch.randn(len(w), generator=generator).mul(4).bfloat16().float()
    logit[:2] = torch.tensor([-0.0, 0.0])
    inverse = inverse_temperature(torch.rand(len(w), generator=generator) * 2)
    scale, top, total = inverse * LOG2_E, logit + 1.5, 1 + 15 * torch.rand(len(w), generator=generator)
    logit[2::5], top[3::5] = top[2::5], 3e6  # rows that are their group's top, and groups that are far
    shift = group_shift(top, scale)
    far = is_far(shift)
    assert 0.1 < far.float().mean() < 0.5
    x, t, i, s, sh, sums = (list(map(literal, bits(each))) for each in (logit, top, inverse, scale, shift, total))
    word, noises = [f"{each}u" for each in w.tolist()], [f"wts::gumbel({each}u)" for each in w.tolist()]
    facts: list[str] = []
    for name, arguments, expected in (
        ("row_score", (x, i, noises), fma(logit, inverse, gumbel(w))),
        ("group_score", (t, sums, i, word), group_score(top, total, inverse, w)),
        ("row_threshold", (sums, word), uniform(w) * total),
        ("group_shift", (t, s), shift),
        ("rare_weight", (x, t, s, sh), rare_weight(logit, top, scale, shift)),
    ):
        calls = (f"wts::{name}({', '.join(each)})" for each in zip(*arguments, strict=True))
        facts += [is_bits(call, pattern) for call, pattern in zip(calls, bits(expected), strict=True)]
    near = (~far).nonzero()[:, 0].tolist()
    weights = bits(row_weight(logit, scale, shift))
    facts += [is_bits(f"wts::row_weight({x[row]}, {s[row]}, {sh[row]})", weights[row]) for row in near]
    for each, is_it in zip(sh, far.tolist(), strict=True):
        facts.append(f"wts::is_far({each}) == {is_it:d} && wts::is_rare({each}, 1.0f) == {is_it:d} && wts::is_rare({each}, {NAN})")
    for edge, is_it in ((2.0**20, True), (2.0**20 - 0.0625, False), (math.inf, True)):
        for sign in (-1, 1):
            facts.append(f"wts::is_far({literal(bits(torch.tensor([sign * edge]))[0])}) == {is_it:d}")
            assert is_far(torch.tensor(sign * edge)).item() == is_it
    facts += [f"wts::rare_weight({NAN}, 1.0f, 2.0f, {sh[near[0]]}) == 0.0f", f"wts::rare_weight({NAN}, 1e7f, 2.0f, -2e7f) == 0.0f"]
    hold_in_cpp(HEADER, facts)


def test_nvrtc_reads_temperatures_like_the_host(hold_in_cpp: HoldInCpp) -> None:
    greedy, hot = [0.0, -0.0, -1.0, -3e38], [1e-45, 1e-6, 1e-5, 0.1, 0.3, 0.6, 0.7, 1.0, 1.1, 1.3, 2.0, 3.0, 9999.0, 1e4, 1e5, 3e38]
    t = torch.tensor(greedy + hot)
    inverse = inverse_temperature(t)
    assert inverse[: len(greedy)].tolist() == [1.0] * len(greedy)
    assert inverse_temperature(torch.tensor([math.nan, -math.inf, math.inf])).tolist() == [1.0, 1.0, noise.f32(1e-4)]
    facts = []
    for index, (at, i, s) in enumerate(zip(bits(t), bits(inverse), bits(inverse * LOG2_E), strict=True)):
        row = f"wts::RowTemperature::of({literal(at)})"
        facts += [f"{row}.greedy == {str(index < len(greedy)).lower()}", is_bits(f"{row}.inverse", i), is_bits(f"{row}.scale", s)]
    hold_in_cpp(HEADER, facts)


def test_words_and_constants_in_cuda(hold_in_cpp: HoldInCpp) -> None:
    facts = [
        f"wts::kDraftRows == {int(Stream.DRAFT_ROWS)}u && wts::kDraftGroups == {int(Stream.DRAFT_GROUPS)}u",
        f"wts::kDraftPlaces == {int(Stream.DRAFT_PLACES)}u && wts::kVerify == {int(Stream.VERIFY)}u",
        f"wts::kGroupRows == {noise.GROUP_ROWS}",
        f"wts::kRowsPerWords == {noise.ROWS_PER_WORDS} && wts::kGroupsPerWords == {noise.GROUPS_PER_WORDS}",
    ]
    names = dict(zip(Stream, ("kDraftRows", "kDraftGroups", "kDraftPlaces", "kVerify"), strict=True))
    for slot, step, round, seed, stream in [
        (0, 0, 0, 0, 0),
        (63, 31, LAST, -1, 1),
        (5, 16, 2**32 + 7, 2**40 + 3, 2),
        (1, 2, 3, -(2**62), 3),
    ]:
        kind = list(Stream)[stream]
        drawn = noise_words(3, step, torch.tensor([slot]), round, kind, torch.tensor([seed]))[0].tolist()
        for index, four in enumerate(drawn):
            counter = f"wts::noise_counter({index}u, {step}u, {slot}u, {round % 2**32}u, wts::{names[kind]})"
            facts += [f"wts::philox({counter}, wts::philox_key({seed}ll)).w[{i}] == {word}u" for i, word in enumerate(four)]
    hold_in_cpp(HEADER, facts)


def test_a_host_compiler_computes_the_same_bits_on_many_words(host_library: Callable[[str], ctypes.CDLL]) -> None:
    of_words, of_floats = ("exponential", "gumbel", "uniform"), ("log_positive", "exp2_units")
    loops = [(name, "uint32_t") for name in of_words] + [(name, "float") for name in of_floats]
    source = "\n".join(
        f'extern "C" void {name}s(const {kind}* in, float* out, int n) {{ for (int i = 0; i < n; i++) out[i] = wts::{name}(in[i]); }}'
        for name, kind in loops
    )
    library = host_library(f"{HEADER}\nusing wts::uint32_t;\n{source}")
    w = words(100_000, 5)
    positive = torch.cat([exponential(w), torch.logspace(-37, 38, 10_000)])
    for name, x, function in [
        *((name, w, getattr(noise, name)) for name in of_words),
        ("log_positive", positive, log_positive),
        ("exp2_units", torch.cat([every_exponent(), some_exponents(), torch.tensor([-math.inf])]), exp2_units),
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
    assert len(counters.unique(dim=0)) == len(counters) == 64 * 9 * 32 * 2 * len(Stream)


def test_a_step_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="steps 0 to 255; got 256"):
        noise_words(1, 256, torch.zeros(1, dtype=torch.int64), 0, Stream.VERIFY, torch.zeros(1, dtype=torch.int64))


@pytest.mark.gpu
def test_a_gpu_computes_the_same_bits() -> None:
    w = words(300_000, 6)
    for function, x in ((exponential, w), (gumbel, w), (uniform, w), (exp2_units, some_exponents())):
        assert bits(function(x.cuda()).cpu()) == bits(function(x)), function.__name__


# The header's own function on the device: one instruction of the hardware.
EXP2 = """#include "common/noise.cuh"
struct Exp2Params {
  const float* x;
  float* power;
  int count;
};
extern "C" __global__ void exp2_probe(const __grid_constant__ Exp2Params p) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += gridDim.x * blockDim.x) p.power[i] = wts::exp2_units(p.x[i]);
}
"""


class Exp2Params(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("power", ctypes.c_void_p), ("count", ctypes.c_int))


def exp2_probe(arch: str) -> Kernel:
    return build(EXP2, "exp2_probe", arch)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_probe_of_the_hardwares_powers_compiles(arch: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings; install it with: pip install -e '.[gpu]'")
    assert exp2_probe(arch).spill_bytes == 0


@pytest.mark.gpu
def test_the_hardwares_powers_are_the_tables() -> None:
    """ex2.approx.ftz at every exponent that a weight can have, and below -126: what decides tokens is not promised by PTX."""
    below = -126 - torch.arange(1, 3_000_000, 997) * UNIT
    x = torch.cat([every_exponent(), below, torch.tensor([-3e38, -math.inf, -0.0, math.nan])])
    on_gpu, power = x.cuda(), torch.empty(len(x), device="cuda")
    major, minor = torch.cuda.get_device_capability()
    params = Exp2Params(x=on_gpu.data_ptr(), power=power.data_ptr(), count=len(x))
    Function(exp2_probe(f"sm_{major}{minor}"), LaunchShape(ctas=64, threads=256)).launch(params)
    hardware, ours = power.cpu(), exp2_units(x)
    assert hardware[-1].isnan()
    assert ours[-1].isnan()
    wrong = (hardware[:-1].view(torch.int32) != ours[:-1].view(torch.int32)).nonzero()[:, 0]
    assert len(wrong) == 0, f"{len(wrong)} of {len(x)} differ, first at x = {float(x[wrong[0]]).hex()}"
