"""Facts about the CUDA headers, asked of compilers: no GPU takes part. And one thread for tests of many small tensors."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from kernels.backends import resident_sm90
from kernels.backends.resident_sm90 import ResidentOptions, ResidentSm90
from kernels.build import BuildError, build, include_dirs
from kernels.device import load
from kernels.placement import BatchedPlacement, Placement

# offsetof is a macro, and a macro splits a type at its commas: the type comes last here.
_OFFSET = """#include <cuda/std/cstddef>
#define OFFSET(member, ...) ([] { using T = __VA_ARGS__; return offsetof(T, member); }())"""


@pytest.fixture(scope="session")
def hold_in_cpp() -> Callable[[str, Iterable[str]], None]:
    """`hold_in_cpp(preamble, conditions)` compiles every condition as a static_assert: a BuildError names those that are false.

    OFFSET(member, type) is the byte at which a member lies.
    """
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings; install it with: pip install -e '.[gpu]'")

    def check(preamble: str, conditions: Iterable[str]) -> None:
        asserts = "\n".join(f"static_assert({condition});" for condition in conditions)
        assert asserts, "nothing to check"
        build(f'{_OFFSET}\n{preamble}\n{asserts}\nextern "C" __global__ void facts() {{}}\n', "facts", "sm_90a")

    return check


@pytest.fixture(scope="session")
def cuda_shape() -> Callable[[Placement | BatchedPlacement], str]:
    """`cuda_shape(placement)` is the shape that resident_sm90 compiles for it: wts::ResidentShape{...} or wts::BatchedShape{...}."""

    def shape(placement: Placement | BatchedPlacement) -> str:
        sources: list[str] = []
        weights = placement.weights if isinstance(placement, Placement) else "int8"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resident_sm90, "build", lambda source, *_, **__: sources.append(source))
            ResidentSm90(ResidentOptions(weights=weights)).compile(placement, load("h200"))
        return re.findall(r"wts::\w+Shape\{.*?\}", sources[0])[0]

    return shape


@pytest.fixture(scope="session")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    """`host_library(source)` compiles C++ that includes headers of kernels/cuda with the machine's own compiler, and loads it."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler (g++ or clang++)")
    try:
        room, *system = include_dirs()
    except BuildError as error:
        pytest.skip(str(error))
    flags = ["-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-D__host__=", "-D__device__=", "-Wno-unknown-pragmas"]

    def load(source: str) -> ctypes.CDLL:
        folder: Path = tmp_path_factory.mktemp("host")
        (folder / "source.cpp").write_text(source)
        includes = [f"-I{room}", *(f"-isystem{path}" for path in system)]
        subprocess.run([compiler, *flags, *includes, "source.cpp", "-o", "library.so"], cwd=folder, check=True)
        return ctypes.CDLL(str(folder / "library.so"))

    return load


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors gain little from threads, and on busy cores threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
