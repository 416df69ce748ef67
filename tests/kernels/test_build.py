"""NVRTC builds without a GPU: one compilation a content, nothing half-written, spills refused, numbers as ptxas says, sentences for errors."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import build as room
from kernels.build import BuildError, Kernel, build, include_dirs, source_closure

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings; install it with: pip install -e '.[gpu]'")
ROOT = Path(__file__).resolve().parent.parent.parent

KEY = '#include "common/key.cuh"\nextern "C" __global__ void key(unsigned* p) { p[0] = wts::candidate_key(p[1], p[2]); }\n'
# 128 values live across a barrier in 64 registers; a small neighbour before and after it, with numbers of their own.
SPILLS = """
extern "C" __global__ void before(float* p) { __shared__ float s[64]; s[threadIdx.x] = p[0]; __syncthreads(); p[1] = s[7]; }
extern "C" __global__ void __launch_bounds__(1024, 1) spills(volatile float* p) {
  float v[128];
#pragma unroll
  for (int i = 0; i < 128; i++) v[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 128; i++) p[i * 1024 + threadIdx.x] = v[127 - i] * v[i * 5 % 128];
}
extern "C" __global__ void after(float* p) { __shared__ float s[32]; s[threadIdx.x] = p[0]; __syncthreads(); p[1] = s[7]; }
"""


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache of this test's own."""
    monkeypatch.setenv("WTS_KERNEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The entries compiled since the test began: cache hits leave no mark."""
    entries: list[str] = []
    compile_source = room._compile

    def recording(source: str, entry: str, *rest: Any) -> Kernel:
        entries.append(entry)
        return compile_source(source, entry, *rest)

    monkeypatch.setattr(room, "_compile", recording)
    return entries


@pytest.fixture
def cuda_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of kernels/cuda that may be edited."""
    shutil.copytree(room.CUDA_ROOM, tmp_path / "cuda")
    monkeypatch.setattr(room, "CUDA_ROOM", tmp_path / "cuda")
    return tmp_path / "cuda"


def entry_of(cache_dir: Path) -> Path:
    (folder,) = cache_dir.iterdir()
    return folder


def test_a_second_build_comes_from_the_cache(cache_dir: Path, compiled: list[str]) -> None:
    first, second = build(KEY, "key", "sm_90a"), build(KEY, "key", "sm_90a")
    assert second == first
    assert compiled == ["key"]
    assert first.cubin.startswith(b"\x7fELF")
    assert sorted(path.name for path in entry_of(cache_dir).iterdir()) == ["kernel.cubin", "kernel.json"]


@pytest.mark.usefixtures("cache_dir")
def test_another_source_entry_or_arch_is_another_kernel(compiled: list[str]) -> None:
    both = KEY + 'extern "C" __global__ void row(unsigned* p) { p[0] = wts::key_row(p[1]); }\n'
    kernels = [build(KEY, "key", "sm_90a"), build(both, "key", "sm_90a"), build(both, "row", "sm_90a"), build(KEY, "key", "sm_100a")]
    assert compiled == ["key", "key", "row", "key"]
    assert len({kernel.cubin_sha256 for kernel in kernels}) == 4
    assert [kernel.arch for kernel in kernels] == ["sm_90a", "sm_90a", "sm_90a", "sm_100a"]


@pytest.mark.usefixtures("cache_dir")
@pytest.mark.parametrize("header", ["common/key.cuh", "common/ptx.cuh"])
def test_an_edited_header_is_another_kernel_however_deep(header: str, cuda_room: Path, compiled: list[str]) -> None:
    first = build(KEY, "key", "sm_90a")
    (cuda_room / "common" / "params.cuh").write_text("#error not included by this source\n")
    assert build(KEY, "key", "sm_90a") == first
    (cuda_room / header).write_text((cuda_room / header).read_text() + "// edited\n")
    edited = build(KEY, "key", "sm_90a")
    assert compiled == ["key", "key"]
    assert edited.source_sha256 != first.source_sha256
    assert edited.cubin_sha256 == first.cubin_sha256, "a comment changes no instruction"


def test_the_closure_holds_every_header_once_and_survives_cycles(cuda_room: Path) -> None:
    (cuda_room / "a.cuh").write_text('#include "b.cuh"\n#include <cuda/ptx>\n// text of a\n')
    (cuda_room / "b.cuh").write_text('  #include "a.cuh"\n// text of b\n')
    closure = source_closure('#include "a.cuh"\n#include "b.cuh"\n')
    assert closure.count("// text of a") == closure.count("// text of b") == 1
    assert closure.index("// text of a") < closure.index("// text of b")


def _truncate_cubin(folder: Path) -> None:
    (folder / "kernel.cubin").write_bytes((folder / "kernel.cubin").read_bytes()[:-1])


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _other_fields(folder: Path) -> None:
    facts = json.loads((folder / "kernel.json").read_text())
    (folder / "kernel.json").write_text(json.dumps({**facts, "warps": 8}))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cubin cut short": _truncate_cubin,
    "cubin of another build": lambda folder: (folder / "kernel.cubin").write_bytes(b"\x7fELF"),
    "no cubin": lambda folder: (folder / "kernel.cubin").unlink(),
    "json cut short": lambda folder: (folder / "kernel.json").write_bytes((folder / "kernel.json").read_bytes()[:-9]),
    "json is bytes": lambda folder: (folder / "kernel.json").write_bytes(b"\xff\xfe\x00"),
    "json with other fields": _other_fields,
    "no json": lambda folder: (folder / "kernel.json").unlink(),
    "nothing": _empty,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_built_again_once(damage: str, cache_dir: Path, compiled: list[str]) -> None:
    first = build(KEY, "key", "sm_90a")
    DAMAGES[damage](entry_of(cache_dir))
    assert [build(KEY, "key", "sm_90a") for _ in range(2)] == [first, first]
    assert compiled == ["key", "key"], "the rebuilt entry serves from then on"


def test_a_build_killed_while_it_writes_leaves_nothing_that_loads(
    cache_dir: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bytes = Path.write_bytes

    def dies_at_json(path: Path, data: bytes) -> int:
        if path.name == "kernel.json":
            raise KeyboardInterrupt
        return write_bytes(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", dies_at_json)
        with pytest.raises(KeyboardInterrupt):
            build(KEY, "key", "sm_90a")
    build(KEY, "key", "sm_90a")
    assert compiled == ["key", "key"]
    assert sorted(path.name for path in entry_of(cache_dir).iterdir()) == ["kernel.cubin", "kernel.json"]


def test_two_processes_may_build_the_same_kernel_at_once(cache_dir: Path, compiled: list[str]) -> None:
    program = "import sys; from kernels.build import build; print(build(sys.argv[1], 'key', 'sm_90a').cubin_sha256)"
    racers = [subprocess.Popen([sys.executable, "-c", program, KEY], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [racer.communicate(timeout=60)[0].strip() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert answers == [build(KEY, "key", "sm_90a").cubin_sha256] * 2
    assert compiled == [], "this process finds what they left"
    assert len(list(cache_dir.iterdir())) == 1


@pytest.mark.usefixtures("cache_dir")
def test_the_slower_of_two_builders_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_source = room._compile

    def overtaken(*arguments: Any) -> Kernel:
        monkeypatch.setattr(room, "_compile", compile_source)
        build(KEY, "key", "sm_90a")
        return replace(compile_source(*arguments), cubin=b"other bits", cubin_sha256=room.hashlib.sha256(b"other bits").hexdigest())

    monkeypatch.setattr(room, "_compile", overtaken)
    slower = build(KEY, "key", "sm_90a")
    assert build(KEY, "key", "sm_90a") == slower


@pytest.mark.usefixtures("cache_dir")
def test_spills_need_leave_and_cached_ones_too(compiled: list[str]) -> None:
    refusal = r"spills for sm_90a spills \d+ bytes a thread at 64 registers; .*rf_tiles.*allow_spills=true"
    with pytest.raises(BuildError, match=refusal):
        build(SPILLS, "spills", "sm_90a")
    allowed = build(SPILLS, "spills", "sm_90a", allow_spills=True)
    assert allowed.spill_bytes >= 4 * (128 - 64), "64 registers cannot hold 128 values"
    with pytest.raises(BuildError, match=refusal):
        build(SPILLS, "spills", "sm_90a")
    assert compiled == ["spills"]


@pytest.mark.usefixtures("cache_dir")
def test_the_report_is_of_the_entry_and_not_of_its_neighbours() -> None:
    before, spills, after = (build(SPILLS, entry, "sm_90a", allow_spills=True) for entry in ("before", "spills", "after"))
    assert [kernel.static_smem_bytes for kernel in (before, spills, after)] == [256, 0, 128]
    assert before.spill_bytes == after.spill_bytes == 0
    assert spills.registers == 64
    assert before.registers < 32


def test_the_report_is_read_as_ptxas_writes_it() -> None:
    log = (
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : Compiling entry function 'walk_2' for 'sm_90a'\n"
        "ptxas info    : Function properties for walk_2\n"
        "ptxas         .     48 bytes stack frame, 52 bytes spill stores, 40 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 3 barriers, 48 bytes cumulative stack size, 1056 bytes smem, 624 bytes cmem[0]\n"
        "ptxas info    : Compiling entry function 'walk' for 'sm_90a'\n"
        "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 8 registers, used 0 barriers\n"
    )
    first, second = room._report(log, "walk_2", "sm_90a"), room._report(log, "walk", "sm_90a")
    assert (first.registers, first.spill_bytes, first.static_smem_bytes) == (255, 52, 1056)
    assert (second.registers, second.spill_bytes, second.static_smem_bytes) == (8, 0, 0)
    with pytest.raises(BuildError, match="ptxas reported nothing on alk"):
        room._report(log, "alk", "sm_90a")


@pytest.mark.parametrize(
    ("source", "entry", "arch", "message"),
    [
        (
            'extern "C" __global__ void key() { oops; }',
            "key",
            "sm_90a",
            r'key does not compile for sm_90a:\n.*identifier "oops" is undefined',
        ),
        ('#include "walk_missing.cuh"', "key", "sm_90a", r"kernels/cuda has no header 'walk_missing.cuh'"),
        ("#include <no_such_header>", "key", "sm_90a", r"key does not compile for sm_90a:\n.*no_such_header"),
        (KEY, "lock", "sm_90a", r"ptxas reported nothing on lock"),
        (KEY, "key", "sm_9", r"key does not compile for sm_9:\n.*invalid value for --gpu-architecture"),
    ],
)
def test_what_does_not_compile_is_one_clear_error(source: str, entry: str, arch: str, message: str, cache_dir: Path) -> None:
    with pytest.raises(BuildError, match=re.compile(message, re.DOTALL)) as refusal:
        build(source, entry, arch)
    assert "\0" not in str(refusal.value)
    assert not cache_dir.exists(), "an error is not cached"


@pytest.mark.usefixtures("cache_dir")
@pytest.mark.parametrize("broken", [ImportError("No module named 'cuda'"), RuntimeError("Failure finding libnvrtc.so")])
def test_a_missing_compiler_is_a_sentence(broken: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise broken

    room._compiler_version.cache_clear()
    monkeypatch.setattr(room, "import_module", missing)
    with pytest.raises(BuildError, match=r"needs cuda-bindings and NVRTC; install them with: pip install -e '\.\[gpu\]' \(.*(cuda|nvrtc)"):
        build(KEY, "key", "sm_90a")


def test_missing_cccl_headers_are_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "find_spec", lambda name: None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BuildError, match="no CCCL headers .*nvidia-cuda-cccl, or set CUDA_HOME"):
        include_dirs()
    (tmp_path / "include" / "cccl" / "cuda" / "ptx").mkdir(parents=True)  # a toolkit keeps them here
    assert include_dirs() == [room.CUDA_ROOM, tmp_path / "include", tmp_path / "include" / "cccl"]


@pytest.mark.gpu
def test_what_the_drivers_own_cache_holds_has_its_report_all_the_same(cache_dir: Path) -> None:
    torch.cuda.init()  # without a context NVRTC has no such cache
    first = build(KEY, "key", "sm_90a")
    shutil.rmtree(cache_dir)
    assert build(KEY, "key", "sm_90a") == first
