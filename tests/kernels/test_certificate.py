"""A step that is called proved is the oracle's, also where rows tie at the bound; and most steps of a trained drafter are proved by few rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from experiments.drafter.checkpoint import COMMITTED
from experiments.head_file import read
from experiments.recorded_rounds import recording
from kernels.certificate import Candidates, Step, bias_lists, candidates, certified_walk, nested_candidates, nested_lists, prove
from kernels.heads.markov import MarkovHead
from kernels.reference import walk
from kernels.sampling import Draws, gumbel_scores
from kernels.walk import NoiseRule, Rounding, WalkInputs

EXACT = (Rounding.TWICE, Rounding.ONCE, Rounding.NEVER)
CASES: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 2**32),
    "vocab": st.integers(2, 40),
    "count": st.integers(1, 12),
    "width": st.integers(1, 12),
    "rounding": st.sampled_from(EXACT),
}


def inputs(base: Tensor, anchor: Tensor) -> WalkInputs:
    return WalkInputs(base.bfloat16(), anchor, torch.zeros(len(base)), torch.arange(len(base)))


def drawn(seed: int, vocab: int, rank: int, spread: int) -> tuple[MarkovHead, WalkInputs]:
    """Small whole numbers: sums are exact and ties are everywhere, at the bound too."""
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-spread, spread + 1, shape, generator=generator).bfloat16()

    return MarkovHead(integers(vocab, rank), integers(vocab, rank)), inputs(
        integers(3, 5, vocab), torch.randint(vocab, (3,), generator=generator)
    )


@settings(max_examples=60, deadline=None)
@given(**CASES, rank=st.integers(1, 4), spread=st.integers(1, 9))
def test_what_is_proved_is_the_walks(seed: int, vocab: int, rank: int, spread: int, count: int, width: int, rounding: Rounding) -> None:
    head, given = drawn(seed, vocab, rank, spread)
    lists = bias_lists(head, min(width, vocab))
    exact = walk(head, given, rounding)
    for step in range(given.steps):
        previous = given.anchor if step == 0 else exact.tokens[:, step - 1]
        base = given.base_logits[:, step]
        token, proved = prove(head, previous, base, candidates(base, count), lists, rounding)
        assert torch.equal(token[proved], exact.tokens[:, step][proved])
    assert torch.equal(certified_walk(head, given, count, lists, rounding).tokens, exact.tokens)
    assert bool(certified_walk(head, given, vocab, lists, rounding).proved.all()), "with all rows named there is no other"


@settings(max_examples=40, deadline=None)
@given(**CASES, spread=st.integers(1, 40), temperature=st.sampled_from((0.05, 0.3, 1.0, 3.0)))
def test_what_is_proved_is_what_is_drawn(
    seed: int, vocab: int, spread: int, count: int, width: int, temperature: float, rounding: Rounding
) -> None:
    """One request is greedy, two are sampled."""
    head, given = drawn(seed, vocab, 2, spread)
    given = replace(given, temperature=torch.tensor([0.0, temperature, temperature]), base_logits=given.base_logits / 8)
    lists = bias_lists(head, min(width, vocab))
    exact = walk(head, given, rounding, noise=NoiseRule.GUMBEL, round=3)
    previous = torch.cat([given.anchor[:, None], exact.tokens[:, :-1]], dim=1)
    for step in range(given.steps):
        draws = Draws.of(given.temperature, given.seed, step, 3).rows(torch.tensor([1, 2]))
        base = given.base_logits[1:, step]
        token, proved = prove(head, previous[1:, step], base, candidates(base, count, draws), lists, rounding, draws)
        assert torch.equal(token[proved], exact.tokens[1:, step][proved])
    found = certified_walk(head, given, count, lists, rounding, round=3)
    assert torch.equal(found.tokens, exact.tokens)
    assert bool(certified_walk(head, given, vocab, lists, rounding, round=3).proved.all())


@pytest.mark.parametrize("rounding", EXACT)
def test_a_tie_at_the_bound_proves_nothing(rounding: Rounding) -> None:
    """Row 3 is named and has 5, which is the bound and what row 0 has: the oracle's token is 0."""
    head = MarkovHead(torch.ones(4, 1).bfloat16(), torch.tensor([[1.0], [1.0], [1.0], [0.0]]).bfloat16())
    base = torch.tensor([[4.0, 0.0, 0.0, 5.0]])
    lists = replace(bias_lists(head, 1), ids=torch.full((4, 1), 1), bound=torch.ones(4))
    previous = torch.zeros(1, dtype=torch.int64)
    token, proved = prove(head, previous, base, Candidates(torch.tensor([[3]]), torch.tensor([4.0])), lists, rounding)
    assert (token.tolist(), proved.tolist()) == ([3], [False])
    assert walk(head, inputs(base[:, None], previous), rounding).tokens.tolist() == [[0]]
    above = torch.nextafter(torch.tensor([5.0]).bfloat16(), torch.tensor([6.0]).bfloat16()).float()
    token, proved = prove(
        head,
        previous,
        base.index_fill(1, torch.tensor([3]), float(above)),
        Candidates(torch.tensor([[3]]), torch.tensor([4.0])),
        lists,
        rounding,
    )
    assert (token.tolist(), proved.tolist()) == ([3], [True])


def test_a_bound_on_fp32_sums_is_not_rounded_to_bf16() -> None:
    """Row 0 has 1 + 2^-10 by its bias alone, row 1 1 + 2^-11 by its base; row 2 is the list."""
    head = MarkovHead(torch.ones(3, 2).bfloat16(), torch.tensor([[1.0, 2.0**-10], [0.0, 0.0], [4.0, 0.0]]).bfloat16())
    base, previous = torch.tensor([[0.0, 1 + 2.0**-11, -100.0]]), torch.zeros(1, dtype=torch.int64)
    assert head.step_logits(previous, base, Rounding.NEVER).argmax() == 0
    token, proved = prove(head, previous, base, candidates(base, 1), bias_lists(head, 1), Rounding.NEVER)
    assert (token.tolist(), proved.tolist()) == ([1], [False])


def test_both_roundings_before_the_noise_are_in_the_bound() -> None:
    """Row 0 has the bias 257.0078, in bf16 258, and with its base of 5.03125 the logit 264, 1.96 above their sum. Row 1 has 262. Where the noise lifts row 1
    above all but that, row 0 is drawn and row 1 proves nothing. Row 2 is the list."""
    head = MarkovHead(torch.ones(3, 2).bfloat16(), torch.tensor([[256.0, 1.0078125], [256.0, 0.0], [256.0, 3.0]]).bfloat16())
    base, lists, previous, between = torch.tensor([[5.03125, 6.0, -6.0]]), bias_lists(head, 1), torch.zeros(1, dtype=torch.int64), 0
    assert head.step_logits(previous, base, Rounding.TWICE)[0, :2].tolist() == [264, 262]
    for seed in range(600):
        draws = Draws.of(torch.ones(1), torch.tensor([seed]), 0, 0)
        scores = gumbel_scores(head.step_logits(previous, base, Rounding.TWICE), draws)[0]
        if scores.argmax() == 0 and scores[1] > scores[0] - 0.9:
            between += 1
            token, proved = prove(head, previous, base, candidates(base, 1, draws), lists, Rounding.TWICE, draws)
            assert (token.tolist(), proved.tolist()) == ([1], [False])
    assert between > 10


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_numbers_are_walked_and_not_proved(value: float) -> None:
    head, given = drawn(1, 30, 3, 4)
    base = given.base_logits.clone()
    base[1, 2] = value
    base[2, 0, 7] = torch.nan
    base[0, 1, 5] = torch.inf
    given = replace(given, base_logits=base)
    found = certified_walk(head, given, 29, bias_lists(head, 29), Rounding.TWICE)
    assert torch.equal(found.tokens, walk(head, given, Rounding.TWICE).tokens)
    assert not found.proved[1, 2]
    assert not found.proved[2, 0]
    assert not found.proved[0, 1]


def test_lists_have_the_largest_biases_and_a_bound_on_the_rest() -> None:
    head = MarkovHead.synthetic(300, 32, 3)
    lists = bias_lists(head, 9)
    for token in (0, 131, 299):
        biases = head.w2.double() @ head.w1[token].double()
        assert set(lists.ids[token].tolist()) == set(biases.topk(9).indices.tolist())
        others = biases.scatter(0, lists.ids[token], -torch.inf)
        assert others.max() < lists.bound[token] < others.max() + 1e-4 * biases.abs().max()
    with pytest.raises(ValueError, match="a list has 1 to 300 rows; got width 301"):
        bias_lists(head, 301)


def test_winners_that_only_the_list_names_are_counted() -> None:
    """The bias of one row decides every step, whatever the base logits are."""
    generator = torch.Generator().manual_seed(0)
    w2 = torch.zeros(50, 2).bfloat16()
    w2[41] = 100.0
    given = inputs(torch.rand(2, 6, 50, generator=generator).index_fill(2, torch.tensor([41]), -1.0), torch.tensor([3, 9]))
    found = certified_walk(
        MarkovHead(torch.ones(50, 2).bfloat16(), w2), given, 4, bias_lists(MarkovHead(torch.ones(50, 2).bfloat16(), w2), 1), Rounding.TWICE
    )
    assert found.tokens.eq(41).all()
    assert found.listed.all()


def test_few_rows_prove_most_steps_of_a_trained_drafter() -> None:
    """The committed rounds of pair=tiny: 64 walks of 16 steps, V = 2,048."""
    head = read(str(COMMITTED / "tiny" / "drafter.safetensors"), "k").head
    with recording(str(COMMITTED / "tiny" / "rounds.safetensors"), "k", head.vocab, head.w1.shape[0]) as rounds:
        some = rounds.part(0, 64)
    given = inputs(some.base_logits, some.anchor)
    found = certified_walk(head, given, 64, bias_lists(head, 32), Rounding.TWICE)
    assert torch.equal(found.tokens, walk(head, given, Rounding.TWICE).tokens)
    assert 0.9 < float(found.proved.float().mean()) < 1


def test_lists_of_some_tokens_prove_nothing_after_any_other() -> None:
    head = MarkovHead.synthetic(70, 4, 3, w2_std=1.0)
    whole, some = bias_lists(head, 9), bias_lists(head, 9, torch.tensor([5, 69, 5]))
    asked = torch.zeros(70, dtype=torch.bool).index_fill(0, torch.tensor([5, 69]), True)
    assert torch.equal(some.ids[asked], whole.ids[asked])
    assert torch.equal(some.bound[asked], whole.bound[asked])
    assert (some.ids[~asked] == 70).all()
    assert (some.bound[~asked] == torch.inf).all()
    base = torch.zeros(70, 70).index_fill(1, torch.tensor([3]), 90.0)  # row 3 wins everywhere, by far
    for draws in (None, Draws.of(torch.ones(70), torch.arange(70), 0, 0)):
        found = candidates(base, 8, draws)
        token, proved = prove(head, torch.arange(70), base, found, some, Rounding.TWICE, draws)
        assert proved.tolist() == asked.tolist()
        assert token[asked].eq(3).all()


def test_lists_and_candidates_of_several_widths_are_those_of_each() -> None:
    head = MarkovHead.synthetic(70, 4, 3, w2_std=1.0)
    for width, lists in zip((20, 1, 70), nested_lists(head, (20, 1, 70)), strict=True):
        alone = bias_lists(head, width)
        assert torch.equal(lists.ids.sort(dim=1).values, alone.ids.sort(dim=1).values)
        assert torch.equal(lists.bound, alone.bound)
    base = torch.randn(3, 70, generator=torch.Generator().manual_seed(0))
    nested = nested_candidates(base, (6, 99, 2))
    for count, found in zip((6, 99, 2), nested, strict=True):
        assert torch.equal(found.ids.sort(dim=1).values, candidates(base, count).ids.sort(dim=1).values)
        assert torch.equal(found.bound, candidates(base, count).bound)
    with pytest.raises(ValueError, match="a list has 1 to 70 rows; got width 0"):
        nested_lists(head, (3, 0))


def test_a_search_has_the_rows_that_can_win_after_any_proof_that_fails() -> None:
    """The exact winner is among the rows whose bound reaches the best, or it is named."""
    head, given = drawn(5, 40, 3, 4)
    for noisy in (False, True):
        draws = Draws.of(torch.ones(3), given.seed, 0, 0) if noisy else None
        at = Step.of(head, given.anchor, given.base_logits[:, 0], Rounding.TWICE, draws)
        lists, (found,) = bias_lists(head, 1), nested_candidates(at.reach, (1,))
        proof = at.proof(found, lists)
        assert not proof.proved.all()
        reaching = at._bound(at.reach, lists) >= proof.best[:, None]
        assert torch.equal(at.survivors([proof], lists)[0], reaching.sum(dim=1) * ~proof.proved)
        for request in (~proof.proved).nonzero()[:, 0].tolist():
            token = at.token[request]
            assert reaching[request, token] or token in (found.ids[request], lists.ids[given.anchor[request]])
