"""The shares are those of `certificate.prove`, pair by pair, whatever is made once for all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import certified_shares as module
from experiments.certified_shares import Widths, certified_shares
from kernels.certificate import bias_lists, candidates, prove
from kernels.heads.markov import MarkovHead
from kernels.reference import walk
from kernels.rounding import corrected
from kernels.sampling import Draws, gumbel_scores
from kernels.synthetic import synthetic_inputs
from kernels.walk import NoiseRule, Rounding, WalkInputs

STEPS, SETS, WIDTHS = 3, 4, Widths((1, 6, 17), (3, 11))


def _sets(vocab: int, seed: int, base_std: float, count: int = SETS) -> list[WalkInputs]:
    return [synthetic_inputs(vocab, STEPS, 1, seed + number, base_std=base_std) for number in range(count)]


def _together(sets: list[WalkInputs], temperature: float) -> WalkInputs:
    """The sets as requests of one launch."""
    base, anchor, seed = (torch.cat([getattr(given, name) for given in sets]) for name in ("base_logits", "anchor", "seed"))
    return WalkInputs(base, anchor, torch.full((len(sets),), temperature), seed)


def _by_key(rows: Any) -> dict[tuple[int, ...], dict[str, Any]]:
    found = {tuple(row[key] for key in ("candidates", "listed", "set", "step")): row for row in rows}
    assert len(found) == len(WIDTHS.candidates) * len(WIDTHS.listed) * SETS * STEPS
    return found


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    vocab=st.integers(11, 90),
    base_std=st.sampled_from((0.1, 2.0, 20.0)),
    w2_std=st.sampled_from((0.05, 1.0)),
    temperature=st.sampled_from((0.0, 0.3, 1.0)),
)
def test_every_pair_of_widths_has_what_prove_says_of_it(seed: int, vocab: int, base_std: float, w2_std: float, temperature: float) -> None:
    head, sets = MarkovHead.synthetic(vocab, 5, seed, w2_std=w2_std), _sets(vocab, seed, base_std)
    rows = _by_key(certified_shares(head, sets, temperature, WIDTHS))
    both = _together(sets, temperature)
    exact = walk(head, both, Rounding.TWICE, noise=NoiseRule.GUMBEL).tokens
    for step in range(STEPS):
        previous, base = both.anchor if step == 0 else exact[:, step - 1], both.base_logits[:, step]
        draws = Draws.of(both.temperature, both.seed, step, 0) if temperature else None
        reach = base.float() if draws is None else gumbel_scores(base.float(), draws)
        for count in WIDTHS.candidates:
            named = candidates(base, count, draws)
            for width in WIDTHS.listed:
                token, proved = prove(head, previous, base, named, bias_lists(head, width), Rounding.TWICE, draws)
                for which in range(SETS):
                    row = rows[count, width, which, step]
                    assert row["proved"] == bool(proved[which])
                    if not proved[which]:
                        assert not row["lifted"]
                        continue
                    assert token[which] == exact[which, step]
                    if reach[which, token[which]] != named.bound[which]:  # of those who tie with the bound any may be candidates
                        assert row["lifted"] == (token[which] not in named.ids[which])


def test_survivors_are_the_rows_whose_bounds_reach_the_best_of_those_named() -> None:
    head, sets = MarkovHead.synthetic(80, 5, 3, w2_std=0.5), _sets(80, 3, 1.0)
    rows = _by_key(certified_shares(head, sets, 0.0, WIDTHS))
    both = _together(sets, 0.0)
    exact = walk(head, both, Rounding.TWICE).tokens
    seen: set[bool] = set()
    for (count, width, which, step), row in rows.items():
        previous, base = (both.anchor[which] if step == 0 else exact[which, step - 1])[None], both.base_logits[which, None, step]
        lists, named = bias_lists(head, width), candidates(base, count)
        token, proved = prove(head, previous, base, named, lists, Rounding.TWICE)
        best = head.step_logits(previous, base, Rounding.TWICE)[0, token]
        reaching = sum(float(corrected(logit[None, None], lists.bound[previous][:, None], Rounding.TWICE)) >= best for logit in base[0])
        assert row["survivors"] == (0 if proved else reaching)
        seen.add(bool(proved))
    assert seen == {True, False}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_is_proved_or_leaves_rows_to_search(temperature: float) -> None:
    """All cases are here: steps that one candidate does not prove, that it does, and that only the list's row decides."""
    head, sets = MarkovHead.synthetic(90, 5, 1, w2_std=0.5), _sets(90, 1, 0.3)
    rows = _by_key(certified_shares(head, sets, temperature, WIDTHS)).values()
    assert all((row["survivors"] > 0) != row["proved"] for row in rows)
    assert {row["proved"] for row in rows} == {True, False}
    assert any(row["lifted"] for row in rows)


def test_how_many_sets_are_walked_at_once_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    head, sets = MarkovHead.synthetic(40, 5, 2), _sets(40, 2, 2.0)
    whole = _by_key(certified_shares(head, sets, 1.0, WIDTHS))
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 3 * 40)
    assert _by_key(certified_shares(head, sets, 1.0, WIDTHS)) == whole


def test_sets_of_the_same_request_have_noise_of_their_own() -> None:
    """The same base logits four times: greedy walks prove the same, sampled ones need not."""
    head, sets = MarkovHead.synthetic(60, 5, 2, w2_std=0.5), _sets(60, 2, 0.5, 1) * SETS
    for temperature, alike in ((0.0, True), (1.0, False)):
        rows = _by_key(certified_shares(head, sets, temperature, WIDTHS))
        told = [
            [(key, row["survivors"]) for *key, row in ((m, j, k, r) for (m, j, n, k), r in rows.items() if n == which)]
            for which in range(SETS)
        ]
        assert all(one == told[0] for one in told) == alike
