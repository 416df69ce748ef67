"""Functions that TorchInductor fuses where a GPU trains."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_T = TypeVar("_T")


def compiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`function`, compiled when gradients are on and it is given tensors of a GPU; else as it stands.

    Only there do shapes stay the same: each new one is compiled anew, which takes many seconds. Where the compiler fails, `function` runs as it
    stands too, and torch logs a warning.
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not (torch.is_grad_enabled() and _on_gpu(args)):
            return function(*args, **kwargs)
        with torch._dynamo.config.patch(suppress_errors=True):
            return _fused(function)(*args, **kwargs)

    return call


def _on_gpu(args: tuple[object, ...]) -> bool:
    return any(isinstance(each, Tensor) and each.is_cuda for each in args)


@cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Made when it is first needed: the import of the compiler takes seconds."""
    return torch.compile(function, dynamic=False)
