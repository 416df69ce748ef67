"""Where there is no CUDA: Triton kernels run in its interpreter, GPU tests are skipped, and the suite stays short."""

from __future__ import annotations

import os
from contextlib import suppress

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


def _take_one_thread() -> None:
    """Tensors of tests are small: their threads wait for each other more than they work, and parallel tests have the cores already."""
    os.environ["OMP_NUM_THREADS"] = "1"  # what tests start
    with suppress(ImportError):
        import torch

        torch.set_num_threads(1)


HAS_CUDA = _has_cuda()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any test imports Triton
    _take_one_thread()


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be missing
def pytest_xdist_auto_num_workers() -> int | None:
    """`-n auto`: a worker for every core, and none beside this process where there is a GPU, which tests must not share."""
    return 0 if HAS_CUDA else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU and this machine has none; see `make help` for ways to run it elsewhere")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
