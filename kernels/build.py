"""CUDA source to cubin with NVRTC: no GPU, no toolkit, no host compiler. Results live in a content-addressed cache.

A kernel is named by a line of source that instantiates a template of `kernels/cuda/`, for example
``#include "walk_resident.cuh"`` and an ``extern "C"`` entry. The cache key covers that line, every header it includes
from `kernels/cuda`, the options and the compiler's version, so an edited header can never serve an old cubin.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CUDA_ROOM = Path(__file__).resolve().parent / "cuda"
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


class BuildError(RuntimeError):
    """A kernel that does not compile, or spills without leave. The message holds the compiler's words."""


class SpillError(BuildError):
    """A kernel that needs more registers than there are."""


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel and what ptxas says of it. Sizes in bytes; registers and spills per thread."""

    entry: str
    arch: str
    cubin: bytes
    registers: int
    spill_bytes: int
    static_smem_bytes: int
    source_sha256: str
    cubin_sha256: str


def build(source: str, entry: str, arch: str, *, allow_spills: bool = False) -> Kernel:
    """Compile `source` for `arch` ("sm_90a") and return its kernel `entry`.

    Raises:
        BuildError: NVRTC is missing or the source does not compile.
        SpillError: registers spill while `allow_spills` is false.
    """
    options = _options(arch)
    closure = source_closure(source)
    source_sha256 = hashlib.sha256(closure.encode()).hexdigest()
    key = hashlib.sha256("\0".join([closure, entry, *options, _compiler_version()]).encode()).hexdigest()
    cached = _cache_dir() / key
    kernel = _load(cached) or _store(cached, _compile(source, entry, arch, options, source_sha256))
    if kernel.spill_bytes and not allow_spills:
        raise SpillError(
            f"{entry} for {arch} spills {kernel.spill_bytes} bytes a thread at {kernel.registers} registers; "
            "ask for less (resident_sm90: a smaller rf_tiles; streaming_sm90: a smaller depth), or allow it with allow_spills=true."
        )
    return kernel


def source_closure(source: str) -> str:
    """`source` and, once each, every header of `kernels/cuda` it includes, in order of first inclusion."""
    seen: dict[str, str] = {}

    def visit(text: str) -> None:
        for name in _INCLUDE.findall(text):
            if name not in seen:
                header = CUDA_ROOM / name
                if not header.exists():
                    raise BuildError(f"kernels/cuda has no header {name!r}")
                seen[name] = header.read_text()
                visit(seen[name])

    visit(source)
    return "\n".join([source, *(f"// {name}\n{text}" for name, text in seen.items())])


def _options(arch: str) -> list[str]:
    return [
        f"--gpu-architecture={arch}",
        "--std=c++20",
        "--device-as-default-execution-space",
        "--ptxas-options=-v",
        "--extra-device-vectorization",
    ]


@cache
def _compiler_version() -> str:
    """NVRTC's and CCCL's versions: headers of another CCCL make another kernel."""
    major, minor = _checked(_nvrtc().nvrtcVersion())
    headers = (path / "cuda" / "std" / "__cccl" / "version.h" for path in include_dirs())
    stated = next((path.read_text() for path in headers if path.exists()), "")
    cccl = re.search(r"define CCCL_VERSION (\d+)", stated)
    return f"nvrtc {major}.{minor} cccl {cccl[1] if cccl else 'unknown'}"


def _nvrtc() -> Any:
    """The module cuda.bindings.nvrtc, proven to have its library."""
    try:
        nvrtc = import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # no bindings, or bindings without libnvrtc
        raise BuildError(
            f"compiling kernels needs cuda-bindings and NVRTC; install them with: pip install -e '.[gpu]' ({error})"
        ) from error
    return nvrtc


def _checked(result: tuple) -> tuple:
    code, *values = result
    if int(code) != 0:
        raise BuildError(f"NVRTC failed: {code!r}")
    return tuple(values)


def include_dirs() -> list[Path]:
    """`kernels/cuda`, then the CUDA and CCCL headers of the pip packages or of a toolkit."""
    roots = [Path(p) / "cu13" / "include" for p in (getattr(find_spec("nvidia"), "submodule_search_locations", None) or [])]
    roots += [Path(p) / "include" for p in (os.environ.get("CUDA_HOME", "/usr/local/cuda"),)]
    found = [path for root in roots for path in (root, root / "cccl") if path.is_dir()]
    if not any((path / "cuda" / "ptx").exists() for path in found):
        raise BuildError("no CCCL headers (cuda/ptx) found; install them with: pip install nvidia-cuda-cccl, or set CUDA_HOME to a toolkit")
    return [CUDA_ROOM, *found]


def _compile(source: str, entry: str, arch: str, options: list[str], source_sha256: str) -> Kernel:
    nvrtc = _nvrtc()
    # Without --no-cache a kernel that NVRTC finds in the driver's compute cache comes without ptxas's report. It changes no cubin, so no hash has it.
    flags = [*options, "--no-cache", *(f"--include-path={path}" for path in include_dirs())]
    (program,) = _checked(nvrtc.nvrtcCreateProgram(source.encode(), f"{entry}.cu".encode(), 0, [], []))
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace").strip("\0\n ")
        if int(code) != 0:
            raise BuildError(f"{entry} does not compile for {arch}:\n{log}")
        cubin = _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return replace(
        _report(log, entry, arch),
        cubin=cubin,
        source_sha256=source_sha256,
        cubin_sha256=hashlib.sha256(cubin).hexdigest(),
    )


def _read(size_of, read, program) -> bytes:
    (size,) = _checked(size_of(program))
    data = bytes(max(size, 2))  # NVRTC writes into it, and Python shares bytes of length 0 and 1
    _checked(read(program, data))
    return data[:size]


def _report(log: str, entry: str, arch: str) -> Kernel:
    """Registers, spills and shared memory from the ptxas report of `entry`; a spill is a stack frame too, so the larger of the two counts."""
    own = re.search(rf"Compiling entry function '{re.escape(entry)}'(.*?)(?=Compiling entry function|\Z)", log, re.DOTALL)
    section = own[1] if own else ""
    used = re.search(r"Used (\d+) registers", section)
    if used is None:
        raise BuildError(f"ptxas reported nothing on {entry}; its log was:\n{log}")
    spill = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", section)
    smem = re.search(r"(\d+) bytes smem", section)
    return Kernel(
        entry=entry,
        arch=arch,
        cubin=b"",
        registers=int(used[1]),
        spill_bytes=max(int(spill[1]), int(spill[2])) if spill else 0,
        static_smem_bytes=int(smem[1]) if smem else 0,
        source_sha256="",
        cubin_sha256="",
    )


def _cache_dir() -> Path:
    return Path(os.environ.get("WTS_KERNEL_CACHE") or Path.home() / ".cache" / "weights-that-stay")


def _load(folder: Path) -> Kernel | None:
    """What an earlier build left, or None where that is nothing, or not whole."""
    try:
        cubin = (folder / "kernel.cubin").read_bytes()
        kernel = Kernel(cubin=cubin, **json.loads((folder / "kernel.json").read_bytes()))
    except (OSError, ValueError, TypeError):  # missing, not JSON, other fields
        return None
    return kernel if hashlib.sha256(cubin).hexdigest() == kernel.cubin_sha256 else None


def _store(folder: Path, kernel: Kernel) -> Kernel:
    """Each file comes whole into its place, over whatever is there. The JSON names the cubin's hash, so a mixture of two builds does not load."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = asdict(kernel)
    del facts["cubin"]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for name, data in (("kernel.cubin", kernel.cubin), ("kernel.json", json.dumps(facts).encode())):
            partial = Path(scratch) / name
            partial.write_bytes(data)
            partial.replace(folder / name)
    return kernel
