"""The lists of a head name its largest biases, and their bound holds in any order of sums."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import bias_lists
from kernels.bias_lists import kernel_lists, list_bytes, make_lists
from kernels.heads.markov import MarkovHead
from kernels.rounding import corrected
from kernels.walk import Rounding, Unsupported

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_rows_and_biases_are_the_largest() -> None:
    head = MarkovHead.synthetic(200, 16, 1, DEVICE, w2_std=0.3)
    lists = make_lists(head, 32)
    exact = head.w1.double() @ head.w2.double().T
    assert (lists.rows.dtype, lists.biases.dtype, lists.bound.dtype) == (torch.int32, torch.bfloat16, torch.float32)
    assert torch.equal(lists.rows.long().sort(1).values, exact.topk(32, dim=1).indices.sort(1).values)
    assert torch.allclose(lists.biases.double(), exact.gather(1, lists.rows.long()), rtol=2**-8)
    assert sum(each.nbytes for each in (lists.rows, lists.biases, lists.bound)) == list_bytes(200, 32)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), std=st.sampled_from([0.01, 0.3, 4.0]), rank=st.sampled_from([1, 16, 64]))
def test_no_other_row_exceeds_the_bound(seed: int, std: float, rank: int) -> None:
    """Not even the highest that fp32 sums may give; and the bound costs no more than four such margins."""
    head = MarkovHead.synthetic(90, rank, seed, w2_std=std)
    lists = make_lists(head, 32)
    nothing = torch.zeros(90, 90)
    _, highest = head.step_interval(torch.arange(90), nothing, Rounding.NEVER)
    others = highest.scatter(1, lists.rows.long(), -torch.inf).amax(1)
    assert bool((others <= lists.bound).all())
    room = 8 * (rank + 2) * 2.0**-23 * head.w2.float().norm(dim=1).max() * head.w1.float().norm(dim=1) + 2.0**-20 * others.abs()
    assert bool((lists.bound - others <= room).all())


def test_a_small_vocabulary_is_listed_whole() -> None:
    head = MarkovHead.synthetic(5, 16, 0, DEVICE)
    lists = make_lists(head, 8)
    assert torch.equal(lists.rows[:, :5].long().sort(1).values, torch.arange(5, device=DEVICE).expand(5, 5))
    assert torch.equal(lists.rows[:, 5:], lists.rows[:, 4:5].expand(5, 3))
    assert bool(lists.bound.isneginf().all())


def test_equal_biases() -> None:
    """Which of them are listed is the top-k's affair; the bound is theirs."""
    head = MarkovHead(torch.ones(70, 4, dtype=torch.bfloat16), torch.ones(70, 4, dtype=torch.bfloat16))
    lists = make_lists(head, 32)
    assert bool((corrected(torch.zeros(70, 1), lists.bound[:, None], Rounding.TWICE) == 4).all())
    assert bool((lists.bound >= 4).all())


@pytest.mark.parametrize("width", [1, 64])
def test_every_token_has_a_list_of_that_width(width: int) -> None:
    assert make_lists(MarkovHead.synthetic(130, 8), width).rows.shape == (130, width)


def test_they_are_kept_on_disk_by_head_and_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WTS_LIST_CACHE", str(tmp_path))
    head = MarkovHead.synthetic(40, 8)
    first = kernel_lists(head, 8)
    monkeypatch.setattr(bias_lists, "make_lists", lambda *_: pytest.fail("made again"))
    again = kernel_lists(MarkovHead.synthetic(40, 8), 8)
    assert torch.equal(first.rows, again.rows)
    assert torch.equal(first.biases, again.biases)
    assert torch.equal(first.bound, again.bound)
    for other, width in ((MarkovHead.synthetic(40, 8, seed=1), 8), (head, 4)):
        with pytest.raises(pytest.fail.Exception, match="made again"):
            kernel_lists(other, width)
    assert len(list(tmp_path.iterdir())) == 1, "nothing half-written stays"


@pytest.mark.parametrize("damage", [b"", b"not lists"])
def test_a_damaged_file_is_made_again(damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WTS_LIST_CACHE", str(tmp_path))
    head = MarkovHead.synthetic(40, 8)
    first = kernel_lists(head, 8)
    next(tmp_path.iterdir()).write_bytes(damage)
    assert torch.equal(kernel_lists(head, 8).rows, first.rows)


def test_lists_that_do_not_fit_are_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    head = MagicMock(vocab=151_936, device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**9, 10**11))
    with pytest.raises(Unsupported, match=r"need 3.3 GB while they are made \(59 MB after\) and the GPU has 1.0 GB free"):
        bias_lists._assert_room(head, 64, 1766)
