"""CUDA kernels on the CPU: the very source that NVRTC gets, compiled by the machine's own compiler, its threads as fibers (cuda_on_cpu/emulator.h).

Only kernels whose instructions cuda_on_cpu/ptx.cuh has can run. Slow: a walk of three CTAs takes tenths of a second.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType
from typing import Any

import pytest

from kernels.build import BuildError, Kernel, include_dirs, source_closure
from kernels.device import DeviceSpec, load
from kernels.driver import LaunchShape

HERE = Path(__file__).parent / "cuda_on_cpu"
_SHARED = re.compile(r"extern __shared__ __align__\(128\) uint8_t (\w+)\[\];")
_FLAGS = ["-std=c++20", "-O2", "-ffp-contract=off", "-frounding-math", "-shared", "-fPIC", "-D__host__=", "-D__device__=", "-w"]


def few_sms(sms: int = 3) -> DeviceSpec:
    """An H200 of so few SMs that every CTA has several tasks."""
    return replace(load("h200"), sms=sms)


@dataclass(frozen=True)
class Emulated:
    """Stands in for `kernels.driver.Function`."""

    run: Any
    shape: LaunchShape

    def launch(self, params: ctypes.Structure) -> None:
        assert self.run(ctypes.byref(params), self.shape.ctas, self.shape.threads, self.shape.dynamic_smem_bytes), (
            "the CTAs wait for one another for ever"
        )


def emulate(patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """From here on kernels that `modules` build and load run on the CPU. Skips where there is no compiler."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    sources: dict[str, str] = {}

    def build(source: str, entry: str, arch: str, *, allow_spills: bool = False) -> Kernel:
        key = hashlib.sha256(source_closure(source).encode()).hexdigest()
        sources[key] = source
        return Kernel(entry, arch, b"", 0, 0, 0, key, key)

    def loaded(kernel: Kernel, shape: LaunchShape) -> Emulated:
        return Emulated(_library(sources[kernel.source_sha256], kernel.entry, kernel.source_sha256), shape)

    for module in modules:
        patch.setattr(module, "build", build)
        patch.setattr(module, "load", loaded)


@cache
def _library(source: str, entry: str, key: str) -> Any:
    """The kernel as a host function of a pointer to its parameters, CTAs, threads and bytes of shared memory; false where it hangs."""
    try:
        room, *system = include_dirs()
    except BuildError as error:
        pytest.skip(str(error))
    folder = Path(mkdtemp(prefix=f"emulated-{key[:8]}-"))
    shutil.copytree(room, folder / "cuda")
    for header in (folder / "cuda").rglob("*.cuh"):
        header.write_text(_SHARED.sub(r"uint8_t* \1 = emulator::shared();", header.read_text()))
    shutil.copy(HERE / "ptx.cuh", folder / "cuda" / "common" / "ptx.cuh")
    shutil.copy(HERE / "emulator.h", folder / "cuda" / "emulator.h")
    (folder / "source.cpp").write_text(
        f'#include "emulator.h"\n{source}\n'
        'extern "C" int launch(const void* params, int ctas, int threads, int smem_bytes) {\n'
        f"  return emulator::launch({entry}, params, ctas, threads, smem_bytes);\n}}\n"
    )
    includes = [f"-I{folder / 'cuda'}", *(f"-isystem{path}" for path in system)]
    made = subprocess.run(["g++", *_FLAGS, *includes, "source.cpp", "-o", "library.so"], cwd=folder, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[:4000]
    library = ctypes.CDLL(str(folder / "library.so"))
    shutil.rmtree(folder)
    return library.launch
