"""Drawn tokens: the right distribution, fresh and repeatable noise, corner cases, and the CUDA header's functions in a plain loop as a twin."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.nn import functional

from kernels import sampling
from kernels.noise import Stream, f32, gumbel, noise_words, uniform
from kernels.sampling import (
    Draws,
    draw,
    group_score,
    group_shift,
    inverse_temperature,
    is_far,
    rare_weight,
    row_weight,
    running_sums,
    without_nan,
)
from kernels.walk import NoiseRule

pytestmark = pytest.mark.usefixtures("one_thread")
REPEATABLE = [NoiseRule.GUMBEL, NoiseRule.GROUPS]  # which tell requests apart by their slot too
LARGEST_BF16 = (2 - 2.0**-7) * 2.0**127
WEIGHED = ["shift", "near", "rare", "score", "threshold"]  # of the twin's struct
HOSTILE = [math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38, 1e-40]
EXTREME_T = [0.0, -1.0, math.nan, 1e-45, 1e-5, 0.6, 1.0, 2.0, 1e4, math.inf]

# The rules as a plain loop over the functions of the CUDA header: what every kernel does, in some order of its own.
TWIN = """
#include <cmath>
#include "common/noise.cuh"
using namespace wts;
static Words words(uint32_t i, uint32_t step, uint32_t slot, uint32_t round, NoiseStream s, int64_t seed) {
  return philox(noise_counter(i, step, slot, round, s), philox_key(seed));
}
extern "C" int by_rows(const float* logits, int vocab, float t, int64_t seed, uint32_t step, uint32_t slot, uint32_t round) {
  const RowTemperature row = RowTemperature::of(t);
  float best = -INFINITY;
  int token = 0;
  for (int v = 0; v < vocab; v++) {
    const float noise = row.greedy ? 0.0f : gumbel(words(v / 4, step, slot, round, kDraftRows, seed).w[v % 4]);
    const float score = row_score(logits[v], row.inverse, noise);
    if (score > best) best = score, token = v;
  }
  return token;
}
extern "C" int by_groups(const float* logits, int vocab, float t, int64_t seed, uint32_t step, uint32_t slot, uint32_t round) {
  const RowTemperature request = RowTemperature::of(t);
  if (request.greedy) return by_rows(logits, vocab, t, seed, step, slot, round);
  float best = -INFINITY;
  int token = 0;
  for (int g = 0; g < (vocab + 63) / 64 * 4; g++) {
    const auto word = [&](NoiseStream stream) { return words(g / 4, step, slot, round, stream, seed).w[g % 4]; };
    const auto row = [g](int v) { return g / 4 * 64 + v / 8 * 32 + g % 4 * 8 + v % 8; };
    float x[16], c[16], top = -INFINITY;
    for (int v = 0; v < 16; v++) x[v] = row(v) < vocab ? logits[row(v)] : -INFINITY, top = max_number(top, x[v]);
    const float scale = request.scale, shift = group_shift(top, scale);
    const auto add_up = [&](auto weight) {
      for (int v = 0; v < 16; v++) c[v] = add_rn(v ? c[v - 1] : 0.0f, weight(x[v]));
      return c[15];
    };
    // exp2_units ends at 2^128 here; on the device it does not, and a kernel may add up first.
    if (is_far(shift) || is_rare(shift, add_up([&](float logit) { return row_weight(logit, scale, shift); })))
      add_up([&](float logit) { return rare_weight(logit, top, scale, shift); });
    if (top == -INFINITY) continue;
    const float score = group_score(top, c[15], request.inverse, word(kDraftGroups));
    int winner = 0;
    while (c[winner] <= row_threshold(c[15], word(kDraftPlaces))) winner++;
    if (score > best || (score == best && score > -INFINITY && row(winner) < token)) best = score, token = row(winner);
  }
  return token;
}
struct Weighed {
  float shift, near, rare, score, threshold;
  int32_t far, is_rare;
};
extern "C" void weigh(const float* logit, const float* top, const float* t, const float* sum, const uint32_t* word, Weighed* out, int n) {
  for (int i = 0; i < n; i++) {
    const RowTemperature request = RowTemperature::of(t[i]);
    const float shift = group_shift(top[i], request.scale);
    const float near = is_far(shift) ? 0.0f : row_weight(logit[i], request.scale, shift);
    const float score = group_score(top[i], sum[i], request.inverse, word[i]), rare = rare_weight(logit[i], top[i], request.scale, shift);
    out[i] = {shift, near, rare, score, row_threshold(sum[i], word[i]), is_far(shift), is_rare(shift, near)};
  }
}
"""


def draw_one(logits: list[float], temperature: float, rule: NoiseRule, seed: int = 0, step: int = 0, round: int = 0) -> int:
    return int(draw(torch.tensor([logits]), torch.tensor([temperature]), torch.tensor([seed]), step, round, rule))


def draws_of(logits: Tensor, temperature: float, count: int, rule: NoiseRule, seed: int = 0, step: int = 0, round: int = 0) -> Tensor:
    """[count] tokens of `count` requests that share logits, temperature and seed and differ in their slots alone."""
    batch = logits.expand(count, -1)
    return draw(batch, torch.full((count,), temperature), torch.full((count,), seed), step, round, rule)


def chi_square(counts: Tensor, shares: Tensor) -> float:
    """The p-value of these counts under these shares; cells that expect fewer than 8 are one cell."""
    expected = shares.double() / shares.double().sum() * counts.sum()
    small = expected < 8
    observed, wanted = (torch.cat([x[~small], x[small].sum()[None]]).double() for x in (counts, expected))
    used = wanted > 0
    assert not observed[~used].any(), "a token of no probability was drawn"
    return float(stats.chisquare(observed[used].numpy(), wanted[used].numpy()).pvalue)


def some_logits(vocab: int, seed: int = 0) -> Tensor:
    return (1.5 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))).bfloat16().float()


@pytest.mark.parametrize("rule", REPEATABLE)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_tokens_follow_the_softmax(rule: NoiseRule, temperature: float) -> None:
    """Chi-square and total variation of 20,000 draws over 61 tokens: four groups, the last one not full, with holes."""
    count, logits = 20_000, some_logits(61)
    logits[[3, 17, 40]] = torch.tensor([math.nan, -math.inf, -math.inf])
    shares, wrong = ((sampling.without_nan(logits).double() / t).softmax(0) for t in (temperature, 1.15 * temperature))
    counts = draws_of(logits, temperature, count, rule).bincount(minlength=61)
    assert chi_square(counts, shares) > 1e-3
    assert chi_square(counts, wrong) < 1e-6, "the test has power"
    expected_variation = (2 * shares * (1 - shares) / (math.pi * count)).sqrt().sum() / 2
    assert (counts / count - shares).abs().sum() / 2 < 1.3 * expected_variation


@pytest.mark.parametrize("rule", REPEATABLE)
def test_groups_far_apart_and_alike_are_both_fair(rule: NoiseRule) -> None:
    """Equal logits everywhere, and one group whose every weight is small against another's."""
    assert chi_square(draws_of(torch.zeros(48), 1.0, 20_000, rule).bincount(minlength=48), torch.ones(48)) > 1e-3
    uneven = torch.cat([torch.full((16,), -4.0), torch.zeros(16), torch.full((5,), -2.0)])
    assert chi_square(draws_of(uneven, 1.0, 20_000, rule, seed=9).bincount(minlength=37), uneven.softmax(0)) > 1e-3


def scale_of(temperature: float) -> Tensor:
    return inverse_temperature(torch.tensor([temperature])) * f32(1.44269504)


def weights_of(members: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The weights of [..., 16] logits, rows of one group each, and whether the groups are far [..., 1]."""
    top = without_nan(members).amax(-1, keepdim=True)
    shift = group_shift(top, scale_of(temperature))
    return rare_weight(members, top, scale_of(temperature), shift), is_far(shift)


@pytest.mark.parametrize("temperature", [1e-5, 0.01, 0.6, 1.0, 2.0, 1e4])
@pytest.mark.parametrize("spread", [1.0, 20.0, None], ids=["logits about 1", "logits about 20", "logits about T"])
def test_weights_are_accurate(temperature: float, spread: float | None) -> None:
    """Against fp64, for bf16 logits. An exponent is rounded to units of 2^-12 in the sum, and before it, down, in the shift: up to one and a half
    units of 2^-12 ln 2 = 1.69e-4. The shift is the same for all of a group, so that their shares have half a unit each from weight and total.

    What the scale was rounded by adds up to 1.1e-5 at 2^-126, and little above 2^-30. As shares of their group the weights are as exact.
    A group whose largest logit is further than 7e2 T from 0 has a common factor on top, as exact as top / T is in fp32.
    """
    generator = torch.Generator().manual_seed(0)
    members = (torch.randn(20_000, 16, generator=generator) * (spread or 2 * temperature)).bfloat16().float()
    weights, t = weights_of(members, temperature)[0].double(), f32(temperature)
    top = members.amax(1, keepdim=True)
    exact = ((members - top).double() / t).exp()
    total, exact_total = (x.sum(1, keepdim=True) for x in (weights, exact))
    error, share_error, near = (weights / exact - 1).abs(), (weights / total * exact_total / exact - 1).abs(), top.abs() < 7e2 * t
    for smallest, bound in ((2.0**-30, 1.71e-4), (2.0**-125.9, 1.8e-4)):
        assert (share_error[exact > smallest] < bound).all()
        assert (error[near & (exact > smallest)] < 1.5 * bound).all()
    assert (weights[exact < 2.0**-126.1] == 0).all()
    common = (total.log() - exact_total.log()).abs()
    assert (common <= 2.7e-4 + 2.0**-23 * (top.double() / t).abs()).all()


GROUP = st.lists(st.sampled_from(HOSTILE) | st.floats(-30, 30, width=16) | st.floats(-1e8, 1e8, width=32), min_size=16, max_size=16)


@settings(max_examples=200)
@given(logits=GROUP, temperature=st.sampled_from(EXTREME_T[4:]))
def test_rare_weights_are_the_weights_of_groups_that_are_not_rare(logits: list[float], temperature: float) -> None:
    members = torch.tensor(logits).bfloat16().float()
    top, scale = without_nan(members).max(), scale_of(temperature)
    weights, far = weights_of(members, temperature)
    if far:
        assert torch.equal(weights, (members == top).float())
        assert weights.sum() > 0
        return
    plain = row_weight(members, scale, group_shift(top, scale))
    assert torch.equal(plain.isnan(), members.isnan()), "the sum says whether there is a NaN"
    assert torch.equal(weights, plain.nan_to_num(0.0))
    assert (weights[members == -math.inf] == 0).all()
    if top > -math.inf:
        assert 2 ** -(2**-4) <= weights[members == top].unique().item() <= 1, "no exponent is above 0, where nothing was recorded"
        assert weights.max() == weights[members == top][0]


def test_groups_without_a_number_score_minus_infinity() -> None:
    """Their weights sum up to 0, whose reciprocal is no number to go on with."""
    for nothing in (-math.inf, math.nan):
        for temperature in EXTREME_T[4:]:
            weights, far = weights_of(torch.full((16,), nothing), temperature)
            assert not far
            assert (weights == 0).all()
    words = torch.tensor([0, 1, 2**31, 2**32 - 1])
    for inverse in (1e-4, 1.0, 1e5):
        scores = group_score(torch.full((4,), -math.inf), torch.zeros(4), torch.tensor([inverse]), words)
        assert scores.tolist() == [-math.inf] * 4
        assert group_score(torch.full((4,), math.inf), torch.ones(4), torch.tensor([inverse]), words).tolist() == [math.inf] * 4
    logits = torch.full((64,), -math.inf)
    logits[8:16] = logits[40:48] = math.nan  # group 1
    assert draws_of(logits, 1.0, 20, NoiseRule.GROUPS).tolist() == [0] * 20
    logits[[16, 20]] = -1e5  # group 2
    assert set(draws_of(logits, 1.0, 20, NoiseRule.GROUPS).tolist()) == {16, 20}


@pytest.mark.parametrize("rule", REPEATABLE)
@pytest.mark.parametrize("large", [1e6, 1e30, LARGEST_BF16, math.inf])
@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e4])
def test_large_logits(rule: NoiseRule, large: float, temperature: float) -> None:
    logits = some_logits(80)
    large = torch.tensor(large).bfloat16().item()
    logits[[18, 20, 48]] = large  # of group 2
    logits[19], logits[21] = -large, math.nan
    drawn = draws_of(logits, temperature, 3_000, rule)
    assert set(drawn.tolist()) <= {18, 20, 48}
    if rule is NoiseRule.GROUPS:
        assert chi_square(drawn.bincount(minlength=80), torch.isin(torch.arange(80), torch.tensor([18, 20, 48])).float()) > 1e-3
    if math.isfinite(large) and (temperature <= 1 or large > 1e9):  # far: the next lower bf16, or the second next, has no chance
        logits[20] = logits[48] = torch.tensor(large * (1 - 2.0**-7)).bfloat16().item()
        assert (draws_of(logits, temperature, 200, rule) == 18).all()
    logits[:] = -math.inf
    logits[[30, 41]] = -large  # of groups 3 and 1
    assert set(draws_of(logits, temperature, 200, rule).tolist()) <= {30, 41} | ({0} if large / temperature > 3e38 else set())


@pytest.mark.parametrize("rule", REPEATABLE)
@pytest.mark.parametrize("other", ["slot", "step", "round", "seed"])
def test_draws_are_independent(rule: NoiseRule, other: str) -> None:
    """Two draws that differ in one coordinate only, 8,000 times: pairs fill the product distribution. The slots share one seed."""
    count, logits = 8_000, some_logits(20, 3)
    first = draws_of(logits, 1.0, count, rule)
    if other == "slot":
        first, second = first[::2], first[1::2]
    else:
        second = draws_of(logits, 1.0, count, rule, **{other: 1})
    shares = logits.double().softmax(0)
    pairs = (20 * first + second).bincount(minlength=400)
    assert chi_square(pairs, (shares[:, None] * shares).flatten()) > 1e-3


@pytest.mark.parametrize("rule", REPEATABLE)
def test_noise_repeats_and_renews(rule: NoiseRule) -> None:
    logits = some_logits(1000)
    tokens = draws_of(logits, 2.0, 64, rule, seed=-5, round=3)
    assert torch.equal(tokens, draws_of(logits, 2.0, 64, rule, seed=-5, round=3))
    assert torch.equal(tokens, draws_of(logits, 2.0, 64, rule, seed=-5, round=3 + 2**32)), "a round is a uint32"
    for change in ({"seed": -6}, {"round": 4}, {"step": 1}):
        different = draws_of(logits, 2.0, 64, rule, **{"seed": -5, "round": 3, **change}) != tokens
        assert different.float().mean() > 0.7, change
    assert len(tokens.unique()) > 20, "slots of one seed draw differently"


@pytest.mark.parametrize("rule", REPEATABLE)
def test_a_mixed_batch_is_its_rows(rule: NoiseRule) -> None:
    """Greedy rows are argmaxes, and what other rows hold does not matter."""
    temperature = torch.tensor([0.0, 1.0, math.nan, 0.6, -1.0, 2.0, 1e4])
    seed = torch.arange(7) * 2**33
    logits = torch.stack([some_logits(500, i) for i in range(7)])
    tokens = draw(logits, temperature, seed, 4, 2, rule)
    assert torch.equal(tokens[[0, 2, 4]], logits[[0, 2, 4]].argmax(1))
    for row in range(7):
        others = torch.where(torch.arange(7)[:, None] == row, logits, -1.0)
        flipped = torch.where(torch.arange(7) == row, temperature, 1.0 - temperature)
        assert draw(others, flipped, seed, 4, 2, rule)[row] == tokens[row]
    assert not torch.equal(tokens[[1, 3, 5, 6]], logits[[1, 3, 5, 6]].argmax(1))


@pytest.mark.parametrize("rule", REPEATABLE)
def test_extreme_temperatures(rule: NoiseRule) -> None:
    logits = some_logits(60)
    logits[7] = logits[50] = 9.0
    for greedy in (0.0, -1.0, -math.inf, math.nan):
        assert (draws_of(logits, greedy, 50, rule) == 7).all()
    coldest = draws_of(logits, 1e-5, 400, rule)
    assert set(coldest.tolist()) == {7, 50}, "exact ties stay ties; anything lower is 1e3 nats away"
    assert torch.equal(coldest, draws_of(logits, 1e-45, 400, rule)), "T counts from 1e-5"
    hottest = draws_of(logits, 1e4, 10_000, rule)
    assert chi_square(hottest.bincount(minlength=60), torch.ones(60)) > 1e-3
    assert torch.equal(hottest, draws_of(logits, math.inf, 10_000, rule)), "T counts up to 1e4"


@pytest.mark.parametrize("rule", REPEATABLE)
@pytest.mark.parametrize(
    ("place", "allowed"),
    [
        ({}, {0}),  # nobody above -inf
        ({5: math.nan, 30: math.nan}, {0}),
        ({5: math.nan, 30: -1e33}, {30}),  # NaN and -inf are never drawn
        ({20: 1.0}, {20}),  # a group alone
        ({18: math.inf, 35: 1.0}, {18}),
        ({18: 3e38, 19: 1.0}, {18}),
        ({3: math.nan, 18: -1e33, 19: -3e33}, {18}),
        ({39: 0.0}, {39}),  # the last row of a group that is not full
    ],
)
def test_corner_cases_of_the_logits(rule: NoiseRule, place: dict[int, float], allowed: set[int]) -> None:
    logits = torch.full((40,), -math.inf)
    for index, value in place.items():
        logits[index] = value
    for temperature in (0.0, 0.6, 1.0, 1e4):
        assert set(draws_of(logits, temperature, 100, rule).tolist()) == allowed


@pytest.mark.parametrize("rule", REPEATABLE)
def test_a_row_whose_every_score_overflows_gives_token_0(rule: NoiseRule) -> None:
    logits = torch.full((40,), -math.inf)
    for row in (5, 30):
        logits[row] = -3e38  # / 0.6 is below every fp32
        assert draws_of(logits, 0.6, 3, rule).tolist() == [0, 0, 0]
        assert draws_of(logits, 0.0, 3, rule).tolist() == [5, 5, 5]


def test_several_infinities() -> None:
    logits = torch.full((64,), 1.0)
    logits[[18, 20, 50]] = math.inf
    assert set(draws_of(logits, 1.0, 100, NoiseRule.GUMBEL).tolist()) == {18}
    assert set(draws_of(logits, 1.0, 200, NoiseRule.GROUPS).tolist()) <= {18, 20, 50}


@pytest.mark.parametrize("rule", REPEATABLE)
def test_vocabularies_of_any_size_stay_inside(rule: NoiseRule) -> None:
    for vocab in (1, 2, 3, 4, 5, 15, 16, 17, 31, 33):
        tokens = draws_of(torch.zeros(vocab), 1.0, 600, rule)
        assert set(tokens.tolist()) == set(range(vocab))


LOGITS = st.lists(st.one_of(st.sampled_from(HOSTILE), st.floats(-30, 30, width=32)), min_size=1, max_size=70)


@given(
    logits=LOGITS,
    temperature=st.sampled_from(EXTREME_T),
    seed=st.integers(-(2**63), 2**63 - 1),
    step=st.integers(0, 31),
    round=st.integers(0, 2**32 - 1),
)
def test_the_cuda_functions_in_a_loop_draw_the_same_tokens(
    twin: ctypes.CDLL, logits: list[float], temperature: float, seed: int, step: int, round: int
) -> None:
    values, slots = np.array(logits, np.float32), 3
    tensor = torch.from_numpy(values).expand(slots, -1)
    for rule, loop in ((NoiseRule.GUMBEL, twin.by_rows), (NoiseRule.GROUPS, twin.by_groups)):
        tokens = draw(tensor, torch.full((slots,), temperature), torch.full((slots,), seed), step, round, rule)
        pointer = values.ctypes.data_as(ctypes.c_void_p)
        for slot in range(slots):
            arguments = ctypes.c_float(temperature), ctypes.c_int64(seed), ctypes.c_uint32(step), slot, ctypes.c_uint32(round)
            assert loop(pointer, len(values), *arguments) == tokens[slot], (rule, slot)


@pytest.fixture(scope="module")
def twin(host_library: Callable[[str], ctypes.CDLL]) -> ctypes.CDLL:
    return host_library(TWIN)


def test_the_cuda_functions_weigh_groups_alike(twin: ctypes.CDLL) -> None:
    """Every function of rule GROUPS bit for bit, infinities and NaN included."""
    generator = torch.Generator().manual_seed(4)
    t = torch.tensor([1e-5, 0.01, 0.6, 1.0, 2.0, 1e4]).repeat_interleave(5_000)
    size = torch.tensor([1e-4, 1.0, 30.0, 1e6])[torch.randint(4, t.shape, generator=generator)]
    members = (torch.randn(len(t), 16, generator=generator) * size[:, None]).bfloat16().float()
    members[:, :2] = torch.tensor([*HOSTILE, LARGEST_BF16, 1.0])[torch.randint(len(HOSTILE) + 2, (len(t), 2), generator=generator)]
    members[::50] = torch.tensor([-math.inf, math.nan] * 8)
    logit, top = members[:, 0].contiguous(), without_nan(members).amax(1)
    word, inverse = torch.randint(2**32, t.shape, generator=generator), inverse_temperature(t)
    scale = inverse * f32(1.44269504)
    shift = group_shift(top, scale)
    total = running_sums(rare_weight(members, top[:, None], scale[:, None], shift[:, None]))[:, -1].contiguous()
    far = is_far(shift)
    near = row_weight(logit, scale, shift).masked_fill(far, 0.0)
    score = group_score(top, total, inverse, word)
    out = np.empty(len(t), [(name, np.float32) for name in WEIGHED] + [("far", np.int32), ("is_rare", np.int32)])
    inputs = [x.numpy() for x in (logit, top, t, total)] + [word.numpy().astype(np.uint32)]
    twin.weigh(*(x.ctypes.data_as(ctypes.c_void_p) for x in (*inputs, out)), len(t))
    expected = (shift, near, rare_weight(logit, top, scale, shift), score, uniform(word) * total)
    for name, ours in zip(WEIGHED, expected, strict=True):
        theirs = torch.from_numpy(out[name].copy())
        assert torch.equal(theirs.isnan(), ours.isnan()), name
        counts = top > -math.inf if name == "score" else ~ours.isnan()  # else "it means nothing"
        assert torch.equal(theirs[counts].view(torch.int32), ours[counts].view(torch.int32)), name
    assert np.array_equal(out["far"] != 0, far.numpy())
    assert np.array_equal(out["is_rare"] != 0, (far | near.isnan()).numpy())
    assert 0.1 < far.float().mean() < 0.9


def test_the_cuda_functions_in_a_loop_draw_the_same_tokens_of_a_real_vocabulary(twin: ctypes.CDLL) -> None:
    logits = torch.stack([some_logits(20_001, i) for i in range(6)])
    temperature, seed = torch.tensor([0.6, 1.0, 2.0, 0.0, 1e4, 0.3]), torch.tensor([0, 1, -1, 7, 2**40, 3])
    for rule, loop in ((NoiseRule.GUMBEL, twin.by_rows), (NoiseRule.GROUPS, twin.by_groups)):
        tokens = draw(logits, temperature, seed, 15, 99, rule)
        for row in range(6):
            pointer = ctypes.c_void_p(logits[row].data_ptr())
            assert (
                loop(pointer, 20_001, ctypes.c_float(temperature[row].item()), ctypes.c_int64(int(seed[row])), 15, row, 99) == tokens[row]
            )


def test_the_gumbel_rule_in_fp64() -> None:
    """Against argmax of logits / T + Gumbel in fp64, where that is not a close call."""
    logits = torch.stack([some_logits(3000, i) for i in range(40)])
    temperature, seed = torch.full((40,), 0.7), torch.arange(40)
    words = noise_words(750, 5, torch.arange(40), 1, Stream.DRAFT_ROWS, seed).flatten(1)
    u = (words.double() + 0.5) / 2**32
    scores = logits.double() / 0.7 - (-torch.log1p(-u)).log()
    best = scores.topk(2, dim=1)
    clear = best.values[:, 0] - best.values[:, 1] > 1e-5
    assert clear.sum() > 35
    assert torch.equal(draw(logits, temperature, seed, 5, 1, NoiseRule.GUMBEL)[clear], best.indices[clear, 0])


def test_the_groups_rule_in_fp64() -> None:
    """Against log-sum-exps, Gumbels and inverse CDFs in fp64, where these are not a close call."""
    logits = torch.stack([some_logits(3008, i) for i in range(60)])
    temperature, seed = torch.full((60,), 0.7), torch.arange(60)
    gumbels, places = (
        (noise_words(47, 5, torch.arange(60), 1, stream, seed).flatten(1).double() + 0.5) / 2**32
        for stream in (Stream.DRAFT_GROUPS, Stream.DRAFT_PLACES)
    )
    rows = torch.tensor([[64 * (g // 4) + 8 * (g % 4) + 32 * half + i for half in (0, 1) for i in range(8)] for g in range(188)])
    exponents = logits.double()[:, rows] / 0.7
    best = (exponents.logsumexp(2) - (-torch.log1p(-gumbels)).log()).topk(2, dim=1)
    request, group = torch.arange(60), best.indices[:, 0]
    running = exponents[request, group].softmax(1).cumsum(1)
    distance = places[request, group][:, None] - running
    clear = (best.values[:, 0] - best.values[:, 1] > 1e-3) & (distance.abs().amin(1) > 1e-3)
    assert clear.sum() > 50
    expected = rows[group, (distance < 0).long().argmax(1)]
    assert torch.equal(draw(logits, temperature, seed, 5, 1, NoiseRule.GROUPS)[clear], expected[clear])


def test_running_sums_round_at_every_row() -> None:
    weights = torch.rand(500, 16, generator=torch.Generator().manual_seed(0))
    for row, sums in zip(weights.numpy(), sampling.running_sums(weights).numpy(), strict=True):
        total = np.float32(0)
        for weight, running in zip(row, sums, strict=True):
            total = np.float32(total + weight)
            assert running == total


def test_a_row_whose_running_sum_equals_the_threshold_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three equal rows and u = 11184811 / 2^24: u 3 rounds to 2, the running sum of the second row."""
    logits = torch.full((1, 16), -math.inf)
    logits[0, [4, 7, 9]] = 1.0
    logits = functional.pad(logits.view(2, 8), (0, 24), value=-math.inf).view(1, 64)  # rows 0 to 7 and 32 to 39: group 0
    for k, token in ((5592404, 7), (5592405, 33)):
        word = torch.tensor([[[k << 9, 0, 0, 0]]])
        assert (uniform(word[0, 0, 0]) * 3.0).item() <= 2.0
        monkeypatch.setattr(sampling, "noise_words", lambda *_, word=word: word)
        assert draw(logits, torch.ones(1), torch.zeros(1, dtype=torch.int64), 0, 0, NoiseRule.GROUPS).item() == token


def test_of_groups_with_the_same_score_the_lowest_row_wins() -> None:
    """Rows 18 and 35 are in groups 2 and 0, and both are +inf."""
    logits = torch.zeros(100)
    logits[[18, 35]] = math.inf
    assert draw_one(logits.tolist(), 1.0, NoiseRule.GROUPS) == 18


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, temperature, seed = some_logits(50).expand(9, -1), torch.tensor([1.0, 0.0, 1.0] * 3), torch.arange(9)
    for rule in REPEATABLE:
        whole = draw(logits, temperature, seed, 0, 0, rule)
        monkeypatch.setattr(sampling, "_CHUNK_ELEMENTS", 100)
        assert torch.equal(draw(logits, temperature, seed, 0, 0, rule), whole)
        monkeypatch.undo()


def test_scores_keep_their_slots() -> None:
    """Rows picked out of a batch keep the noise of their slots."""
    seed = torch.arange(5)
    draws = Draws.of(torch.ones(5), seed, 0, 0)
    assert torch.equal(draws.rows(torch.tensor([3])).words(4, Stream.DRAFT_ROWS)[0], draws.words(4, Stream.DRAFT_ROWS)[3])
    words = noise_words(2, 0, torch.arange(5), 0, Stream.DRAFT_ROWS, seed)
    assert torch.equal(sampling.gumbel_scores(torch.zeros(5, 8), draws), gumbel(words).flatten(1))


def test_inverse_temperatures_are_clamped() -> None:
    assert inverse_temperature(torch.tensor([0.0, -2.0, math.nan, 1.0, 2.0, 1e-9, 1e9])).tolist() == pytest.approx(
        [1, 1, 1, 1, 0.5, 1e5, 1e-4]
    )


def test_a_rule_without_a_host_twin_is_an_error() -> None:
    with pytest.raises(ValueError, match="'library' cannot be repeated on the host; those that can: gumbel, groups"):
        draw_one([0.0], 1.0, NoiseRule.LIBRARY)


@pytest.mark.gpu
def test_a_gpu_draws_the_same_tokens() -> None:
    logits = torch.stack([some_logits(20_001, i) for i in range(4)])
    temperature, seed = torch.tensor([0.6, 1.0, 2.0, 0.0]), torch.tensor([0, 1, -1, 7])
    for rule in REPEATABLE:
        here = draw(logits, temperature, seed, 3, 5, rule)
        assert torch.equal(draw(logits.cuda(), temperature.cuda(), seed.cuda(), 3, 5, rule).cpu(), here)
