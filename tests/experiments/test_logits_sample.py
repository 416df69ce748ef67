"""A sample gives back what it kept, bit for bit, and below that a tail with the row's own moments, the same each time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from experiments.logits_sample import filled, packed, sampled, unpacked

VOCAB, TOP = 5000, 300


def logits(seed: int = 0) -> Tensor:
    """[3, 2, VOCAB] bf16 of three spreads and means."""
    drawn = torch.randn(3, 2, VOCAB, generator=torch.Generator().manual_seed(seed))
    return (torch.tensor([1.0, 2.0, 4.0])[:, None, None] * drawn + torch.tensor([-3.0, 5.0])[:, None]).bfloat16()


@given(st.lists(st.integers(0, 2**24 - 1), min_size=1, max_size=50))
def test_ids_of_three_bytes_come_back(ids: list[int]) -> None:
    given = torch.tensor(ids).expand(2, 3, -1)
    bytes_of = packed(given)
    assert (bytes_of.shape, bytes_of.dtype) == ((2, 3, len(ids), 3), torch.uint8)
    assert torch.equal(unpacked(bytes_of), given)
    assert int.from_bytes(bytes_of[0, 0, 0].tolist(), "little") == ids[0]


def test_what_is_kept_comes_back_and_all_else_is_below() -> None:
    exact = logits()
    again = filled(sampled(exact, TOP), VOCAB)
    best, ids = exact.topk(TOP)
    assert torch.equal(again.gather(2, ids), best)
    rest = again.scatter(2, ids, -torch.inf)
    assert bool((rest < best[..., -1:]).all()), "strictly below the smallest one kept"
    assert torch.equal(again.argmax(dim=2), exact.argmax(dim=2))
    assert torch.equal(filled(sampled(exact, VOCAB), VOCAB), exact)


def test_the_tail_has_the_moments_of_the_row() -> None:
    exact = logits().float()
    again = filled(sampled(logits(), TOP), VOCAB).float()
    assert torch.allclose(again.mean(dim=2), exact.mean(dim=2), atol=0.1)
    assert torch.allclose(again.std(dim=2), exact.std(dim=2), rtol=0.05)
    assert torch.allclose(again.quantile(0.1, dim=2), exact.quantile(0.1, dim=2), atol=0.3)


def test_a_tail_depends_on_its_round_and_not_on_the_part_it_is_read_in() -> None:
    exact = logits()[:1].expand(3, -1, -1)
    whole = filled(sampled(exact, TOP), VOCAB, first=4)
    assert torch.equal(whole[1:], filled(sampled(exact[1:], TOP), VOCAB, first=5))
    assert not torch.equal(whole[0], whole[1])


def test_equal_logits_have_a_tail_too() -> None:
    again = filled(sampled(torch.full((1, 1, 8), 2.0, dtype=torch.bfloat16), 3), 8)
    assert again.sort().values[0, 0].tolist() == [1.9921875] * 5 + [2.0] * 3


@pytest.mark.parametrize("top", [0, VOCAB + 1])
def test_a_sample_that_cannot_be_is_refused(top: int) -> None:
    with pytest.raises(ValueError, match=f"keeps 1 to 5000 logits of a step; got {top}"):
        sampled(logits(), top)
    with pytest.raises(ValueError, match="a kept token is .*, and there are 100"):
        filled(sampled(logits(), TOP), 100)
