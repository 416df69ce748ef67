"""Where there is no CUDA: Triton kernels run in its interpreter, GPU tests are skipped, and the suite stays short."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("short", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("short")


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:  # drawing and analysis need no torch
        return False
    return torch.cuda.is_available()


HAS_CUDA = _has_cuda()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any test imports Triton


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU and this machine has none; see `make help` for ways to run it elsewhere")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
