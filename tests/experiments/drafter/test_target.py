"""The target: causal, read piece by piece as at once, and cut back."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from experiments.drafter.checkpoint import Pair
from experiments.drafter.target import Cache, next_token_loss


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(300, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_no_token_sees_a_later_one(pair: Pair) -> None:
    first, second = tokens(1, 10), tokens(1, 10)
    second[0, 6:] = tokens(1, 4, 1)
    one, other = pair.target(first), pair.target(second)
    assert_close(one.hidden[:, :6], other.hidden[:, :6])
    assert_close(one.taps[:, :6], other.taps[:, :6])
    assert not torch.allclose(one.hidden[:, 6], other.hidden[:, 6])


def test_taps_are_the_layers_of_the_config(pair: Pair) -> None:
    assert pair.target(tokens(2, 5)).taps.shape == (2, 5, 2 * 16)


def test_pieces_give_what_the_whole_gives_and_a_rejected_piece_leaves_nothing(pair: Pair) -> None:
    text, wrong = tokens(2, 12), tokens(2, 3, 7)
    whole, cache = pair.target(text), Cache(pair.target, 2, 16)
    first = pair.target.extend(text[:, :5], cache)
    pair.target.extend(wrong, cache)
    cache.length -= 3
    second = pair.target.extend(text[:, 5:], cache)
    assert_close(torch.cat([first.hidden, second.hidden], dim=1), whole.hidden)
    assert_close(torch.cat([first.taps, second.taps], dim=1), whole.taps)


def test_requests_of_a_batch_may_have_read_different_lengths(pair: Pair) -> None:
    text, cache = tokens(2, 10), Cache(pair.target, 2, 16)
    pair.target.extend(text[:, :6], cache)
    cache.length -= torch.tensor([0, 3])
    found = pair.target.extend(torch.stack([text[0, 6:9], text[1, 3:6]]), cache)
    for row, (start, stop) in enumerate(((6, 9), (3, 6))):
        assert_close(found.hidden[row], pair.target(text[row : row + 1]).hidden[0, start:stop])


def test_the_loss_is_that_of_the_next_token(pair: Pair) -> None:
    text = tokens(2, 6)
    logits = pair.target.logits(pair.target(text[:, :5]).hidden)
    expected = -logits.log_softmax(2).gather(2, text[:, 1:, None]).mean()
    assert_close(next_token_loss(pair.target, text), expected)
