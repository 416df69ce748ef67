"""Values and gradients of the chunked losses are autograd's own, whatever the chunks, and near them in bf16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from experiments.drafter.chunked_loss import Guesses, draft_loss, next_token_entropy

N, WIDTH, RANK, VOCAB = 11, 6, 4, 37


def drawn(dtype: torch.dtype = torch.float64, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"hidden": (N, WIDTH), "latent": (N, RANK), "head": (VOCAB, WIDTH), "w2": (VOCAB, RANK), "teacher": (N, WIDTH)}
    return {name: torch.randn(size, generator=generator).to(device, dtype).requires_grad_() for name, size in sizes.items()}


LABELS = torch.randint(VOCAB, (N,), generator=torch.Generator().manual_seed(1))
OF_ENTROPY, OF_DISTANCE = torch.rand(2, N, generator=torch.Generator().manual_seed(2))


def next_token(parts: dict[str, Tensor], rows: int) -> Tensor:
    return next_token_entropy(parts["hidden"], parts["head"], LABELS.to(parts["head"].device), rows)


def plain_next_token(parts: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(parts["hidden"] @ parts["head"].T, LABELS.to(parts["head"].device))


def draft(parts: dict[str, Tensor], rows: int) -> Tensor:
    labels, of_entropy, of_distance = (each.to(parts["head"].device) for each in (LABELS, OF_ENTROPY, OF_DISTANCE))
    guesses = Guesses(parts["hidden"], parts["latent"], parts["teacher"], labels)
    return draft_loss(guesses, parts["head"], parts["w2"], of_entropy, of_distance, rows).total


def plain_draft(parts: dict[str, Tensor]) -> Tensor:
    labels, of_entropy, of_distance = (each.to(parts["head"].device) for each in (LABELS, OF_ENTROPY, OF_DISTANCE))
    head = parts["head"].detach()
    logits = parts["hidden"] @ head.T + parts["latent"] @ parts["w2"].T
    distance = (logits.softmax(1) - (parts["teacher"].detach() @ head.T).softmax(1)).abs().sum(1)
    return (of_entropy * functional.cross_entropy(logits, labels, reduction="none") + of_distance * distance).sum()


KINDS = pytest.mark.parametrize(
    ("loss", "plain", "learn"), [(next_token, plain_next_token, ["hidden", "head"]), (draft, plain_draft, ["hidden", "latent", "w2"])]
)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rows", [1, 4, 11, 100])
def test_value_and_gradients_are_autograds(
    loss: Callable[..., Tensor], plain: Callable[..., Tensor], learn: list[str], dtype: torch.dtype, rows: int
) -> None:
    own, other = drawn(dtype), drawn(dtype)
    found, wanted = loss(own, rows), plain(other)
    assert_close(found.double(), wanted.double(), rtol=1e-6, atol=0)
    (3 * found).backward()  # a loss may be one of several terms
    (3 * wanted).backward()
    rtol, atol = (1e-9, 1e-12) if dtype == torch.float64 else (1e-4, 1e-6)
    for name in learn:
        assert_close(own[name].grad, other[name].grad, rtol=rtol, atol=atol)
    assert {name for name, part in own.items() if part.grad is not None} == set(learn), "teacher and frozen head learn nothing"


def close_in_bf16(loss: Callable[..., Tensor], plain: Callable[..., Tensor], learn: list[str], device: str) -> None:
    own, other = drawn(torch.float32, device), drawn(torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        found = loss(own, 4)
    wanted = plain(other)
    assert found.dtype == torch.float32
    assert_close(found, wanted, rtol=0.01, atol=0)
    found.backward()
    wanted.backward()
    for name in learn:
        one, two = own[name].grad, other[name].grad
        assert one is not None
        assert two is not None
        assert one.dtype == torch.float32
        assert float((one - two).norm() / two.norm()) < 0.05, name


@KINDS
def test_under_autocast_they_are_near(loss: Callable[..., Tensor], plain: Callable[..., Tensor], learn: list[str]) -> None:
    close_in_bf16(loss, plain, learn, "cpu")


@pytest.mark.gpu
@KINDS
def test_compiled_they_are_near(loss: Callable[..., Tensor], plain: Callable[..., Tensor], learn: list[str]) -> None:
    close_in_bf16(loss, plain, learn, "cuda")
