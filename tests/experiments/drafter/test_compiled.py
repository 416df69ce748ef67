"""The compiler is asked only where a GPU trains, and a compiler that fails does not end the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.drafter import compiled as room
from experiments.drafter.compiled import compiled


def twice(x: Tensor) -> Tensor:
    return 2 * x


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., Any]]:
    """The functions that were given to the compiler."""
    given: list[Callable[..., Any]] = []
    monkeypatch.setattr(room, "_fused", lambda function: given.append(function) or function)
    return given


def test_a_cpu_compiles_nothing(asked: list[Callable[..., Any]]) -> None:
    assert compiled(twice)(torch.ones(2)).tolist() == [2, 2]
    assert not asked


def test_only_a_training_compiles(asked: list[Callable[..., Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_on_gpu", lambda args: True)
    with torch.no_grad():
        assert compiled(twice)(torch.ones(2)).tolist() == [2, 2]
    assert not asked
    assert compiled(twice)(torch.ones(2)).tolist() == [2, 2]
    assert asked == [twice]


def test_without_a_compiler_it_runs_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("no compiler")

    fused = torch.compile(twice, dynamic=False, backend=broken)
    with pytest.raises(RuntimeError, match="no compiler"):
        fused(torch.ones(2))
    monkeypatch.setattr(room, "_on_gpu", lambda args: True)
    monkeypatch.setattr(room, "_fused", lambda function: fused)
    assert compiled(twice)(torch.ones(2)).tolist() == [2, 2]
