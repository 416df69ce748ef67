"""The paired cluster bootstrap: scipy's draws, the coverage that it states, and why clusters are drawn whole."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from analysis import bootstrap
from analysis.clusters import NARROW, RatioChange, ratio_change

STEPS, MEAN_ROUNDS, MEAN_RATE, TRUE_EXTRA = 7, 40.0, 0.6, 0.01
STUDIES, PROMPTS, DRAWS = 1000, 120, 800  # with 60 prompts a percentile interval covers a point less


def _study(rng: np.random.Generator, prompts: int = PROMPTS) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[prompts, passes, arms, 2] tokens and rounds of a study; a prompt has its length, its rate and its own effect of our arm in both passes.

    Length, rate and effect are independent, so the true change is known: STEPS r e / (1 + STEPS r) with mean rate r and mean effect e.
    """
    rounds = rng.integers(10, int(2 * MEAN_ROUNDS) - 9, prompts)
    rate = rng.uniform(MEAN_RATE - 0.2, MEAN_RATE + 0.2, prompts)
    effect = rng.uniform(TRUE_EXTRA - 0.15, TRUE_EXTRA + 0.15, prompts)
    arms = []
    for each, taken in ((rate * (1 + effect), rounds + rng.integers(0, 9, prompts)), (rate, rounds)):  # arms end in other numbers of rounds
        accepted = rng.binomial(STEPS * taken[:, None], each[:, None], (prompts, 2))
        arms.append(np.stack([accepted + taken[:, None], np.broadcast_to(taken[:, None], accepted.shape)], axis=2))
    return arms[0].astype(np.float64), arms[1].astype(np.float64)


TRUTH = 100 * STEPS * MEAN_RATE * TRUE_EXTRA / (1 + STEPS * MEAN_RATE)


def _covered(found: list[RatioChange], narrow: bool = False) -> float:
    estimates = [each.narrow if narrow else each.wide for each in found]
    return sum(each.low <= TRUTH <= each.high for each in estimates) / len(estimates)


@pytest.fixture(scope="module")
def studies() -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    rng = np.random.default_rng(3)
    return [_study(rng) for _ in range(STUDIES)]


def test_the_intervals_cover_the_truth_as_often_as_they_say(studies: list[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> None:
    found = [
        ratio_change(ours.sum(axis=1), default.sum(axis=1), draws=DRAWS, seed=number) for number, (ours, default) in enumerate(studies)
    ]
    assert 0.93 <= _covered(found) <= 0.97
    assert 0.87 <= _covered(found, narrow=True) <= 0.93
    assert np.mean([each.value for each in found]) == pytest.approx(TRUTH, abs=0.1)
    spread = np.std([each.value for each in found])
    assert np.mean([each.standard_error for each in found]) == pytest.approx(spread, rel=0.08)


def test_passes_drawn_one_by_one_would_cover_too_little(studies: list[tuple[NDArray[np.float64], NDArray[np.float64]]]) -> None:
    """What the cluster is for: a prompt's second pass is hardly news."""
    apart = [ratio_change(ours.reshape(-1, 2), default.reshape(-1, 2), draws=DRAWS, seed=1) for ours, default in studies[:150]]
    assert _covered(apart) < 0.9


def _summed(seed: int, prompts: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    ours, default = _study(np.random.default_rng(seed), prompts)
    return ours.sum(axis=1), default.sum(axis=1)


@pytest.mark.parametrize(("prompts", "held"), [(605, bootstrap.HELD), (37, bootstrap.HELD), (37, 148 * 7)])
def test_value_intervals_and_error_are_scipys(prompts: int, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same generator gives scipy the same draws, so all agree to rounding; in small pieces too."""
    monkeypatch.setattr(bootstrap, "HELD", held)
    ours, default = _summed(5, prompts)
    found = ratio_change(ours, default, draws=1500, seed=9)

    def change(*columns: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
        tokens, rounds, tokens_default, rounds_default = (column.sum(axis=axis) for column in columns)
        return 100 * (tokens * rounds_default / (rounds * tokens_default) - 1)

    columns = (*ours.T, *default.T)
    assert found.value == pytest.approx(float(change(*columns)))
    for level, estimate in ((0.95, found.wide), (NARROW, found.narrow)):
        scipys = stats.bootstrap(
            columns, change, paired=True, method="percentile", n_resamples=1500, confidence_level=level, rng=np.random.default_rng(9)
        )
        assert (estimate.low, estimate.high) == pytest.approx(tuple(scipys.confidence_interval), rel=1e-9, abs=1e-9)
        assert found.standard_error == pytest.approx(scipys.standard_error)
    assert (found.clusters, found.wide.value) == (prompts, found.narrow.value)


def test_a_seed_gives_the_same_interval_again_and_another_seed_another() -> None:
    ours, default = _summed(5, 50)
    assert ratio_change(ours, default, draws=500, seed=4) == ratio_change(ours, default, draws=500, seed=4)
    assert ratio_change(ours, default, draws=500, seed=4) != ratio_change(ours, default, draws=500, seed=5)


def test_arms_are_paired_so_what_both_share_does_not_widen_the_interval() -> None:
    ours, default = _summed(5, 50)
    same = ratio_change(default, default)
    assert (same.wide.low, same.value, same.wide.high, same.standard_error) == pytest.approx((0, 0, 0, 0), abs=1e-9)
    shuffled = ratio_change(np.random.default_rng(0).permutation(ours), default)
    assert shuffled.value == pytest.approx(ratio_change(ours, default).value)
    assert shuffled.standard_error > 2 * ratio_change(ours, default).standard_error


def test_long_prompts_weigh_more_than_short_ones() -> None:
    """A ratio of sums, not a mean of ratios."""
    default = np.array([[20.0, 10.0], [4000.0, 1000.0]])
    ours = np.array([[40.0, 10.0], [4000.0, 1000.0]])
    assert ratio_change(ours, default).value == pytest.approx(100 * (4040 / 4020 - 1))


def test_one_cluster_gives_a_value_and_no_interval() -> None:
    found = ratio_change(np.array([[33.0, 10.0]]), np.array([[30.0, 10.0]]))
    assert found.value == pytest.approx(10)
    assert np.isnan([found.wide.low, found.narrow.high, found.standard_error]).all()


@pytest.mark.parametrize(
    ("ours", "default", "words"),
    [
        (np.ones((3, 2)), np.ones((4, 2)), r"got \(3, 2\) and \(4, 2\)"),
        (np.ones((0, 2)), np.ones((0, 2)), "at least 1"),
        (np.array([[3.0, 1.0], [3.0, 0.0]]), np.ones((2, 2)), r"cluster 1 has \[3.0, 0.0, 1.0, 1.0\]"),
        (np.array([[3.0, 1.0]]), np.array([[np.nan, 1.0]]), "cluster 0"),
    ],
)
def test_what_does_not_pair_is_refused(ours: NDArray[np.float64], default: NDArray[np.float64], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ratio_change(ours, default)
