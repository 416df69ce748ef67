"""Drawn tokens: the right distribution, fresh and repeatable noise, corner cases, and the CUDA header's functions in a plain loop as a twin."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.nn import functional

from kernels import sampling
from kernels.noise import Stream, gumbel, noise_words, uniform
from kernels.sampling import Draws, draw, inverse_temperature
from kernels.walk import NoiseRule

pytestmark = pytest.mark.usefixtures("one_thread")
REPEATABLE = [NoiseRule.GUMBEL, NoiseRule.GROUPS]
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
    const Words w = words(g / 2, step, slot, round, kDraftGroups, seed);
    float x[16], c[16], top = -INFINITY;
    const auto row = [g](int v) { return g / 4 * 64 + v / 8 * 32 + g % 4 * 8 + v % 8; };
    for (int v = 0; v < 16; v++) x[v] = row(v) < vocab ? logits[row(v)] : -INFINITY, top = max_number(top, x[v]);
    top = group_top(top);
    for (int v = 0; v < 16; v++) c[v] = add_rn(v ? c[v - 1] : 0.0f, row_weight(x[v], top, request.scale));
    const float score = group_score(top, c[15], request.inverse, w.w[2 * (g % 2)]);
    int winner = 0;
    while (c[winner] <= row_threshold(c[15], w.w[2 * (g % 2) + 1])) winner++;
    if (score > best || (score == best && score > -INFINITY && row(winner) < token)) best = score, token = row(winner);
  }
  return token;
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
        word = torch.tensor([[[7, k << 9, 0, 0], [7, 0, 0, 0]]])
        assert (uniform(word[0, 0, 1]) * 3.0).item() <= 2.0
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
