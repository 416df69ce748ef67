"""Loading and launching against a driver that only writes down what it is asked; the real one is met by the GPU tests."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import driver as room
from kernels.build import Kernel
from kernels.driver import Function, LaunchError, LaunchShape
from kernels.params import Params
from kernels.walk import Unsupported

REAL = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings; install it with: pip install -e '.[gpu]'")
STREAM = 0x5EED
OK, INVALID = 0, 1


@dataclass
class PaperDriver:
    """The calls `kernels.driver` makes, in order; types and enumerations are the real ones."""

    ctas_per_sm: int = 1
    clusters: int = 66
    fails: str = ""
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(REAL, name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            if name == "cuGetErrorString":
                return OK, b"invalid argument"
            self.calls.append((name, arguments))
            answers = {
                "cuModuleLoadData": "module",
                "cuModuleGetFunction": "function",
                "cuOccupancyMaxActiveBlocksPerMultiprocessor": self.ctas_per_sm,
                "cuOccupancyMaxActiveClusters": self.clusters,
            }
            code = INVALID if name == self.fails else OK
            if name == "cuLaunchKernelEx" and code == OK:
                params = ctypes.cast(arguments[2], ctypes.POINTER(ctypes.c_void_p))[0]
                self.launched.append(bytes(ctypes.string_at(params, ctypes.sizeof(Params))))
            return (code, answers[name]) if name in answers else (code,)

        return call

    launched: list[bytes] = field(default_factory=list)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments in self.calls if called == name]


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> PaperDriver:
    driver = PaperDriver()
    monkeypatch.setattr(room, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM, synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    room._load.cache_clear()
    return driver


@pytest.fixture(autouse=True)
def _forget_paper_handles():
    yield
    room._load.cache_clear()


def kernel(cubin: bytes = b"cubin") -> Kernel:
    return Kernel("walk", "sm_90a", cubin, registers=255, spill_bytes=0, static_smem_bytes=0, source_sha256="", cubin_sha256="")


def test_a_launch_shape_reaches_the_driver(paper: PaperDriver) -> None:
    function = Function(kernel(), LaunchShape(ctas=132, threads=256, dynamic_smem_bytes=142_544, cooperative=True))
    (attribute,) = paper.named("cuFuncSetAttribute")
    assert attribute == ("function", REAL.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 142_544)
    assert paper.named("cuOccupancyMaxActiveBlocksPerMultiprocessor") == [("function", 256, 142_544)]
    function.launch(Params())
    ((config, handle, _, extra),) = paper.named("cuLaunchKernelEx")
    assert (handle, extra) == ("function", 0)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (132, 1, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (256, 1, 1)
    assert config.sharedMemBytes == 142_544
    assert config.numAttrs == 1
    assert config.attrs[0].id == REAL.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    assert config.attrs[0].value.cooperative == 1
    assert int(config.hStream) == STREAM, "torch's current stream"


def test_a_plain_launch_is_not_cooperative_and_asks_no_occupancy(paper: PaperDriver) -> None:
    Function(kernel(), LaunchShape(1, 1)).launch(Params())
    assert paper.named("cuLaunchKernelEx")[0][0].numAttrs == 0
    assert paper.named("cuOccupancyMaxActiveBlocksPerMultiprocessor") == []


def test_a_cluster_launch_is_cooperative_too(paper: PaperDriver) -> None:
    Function(kernel(), LaunchShape(132, 256, 1000, cooperative=True, cluster=2)).launch(Params())
    ((config, *_),) = paper.named("cuLaunchKernelEx")
    cluster, cooperative = config.attrs
    assert config.numAttrs == 2
    assert cluster.id == REAL.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    assert (cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z) == (2, 1, 1)
    assert cooperative.id == REAL.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    assert cooperative.value.cooperative == 1


def test_a_programmatic_launch_says_so_and_only_then(paper: PaperDriver) -> None:
    for programmatic in (True, False):
        Function(kernel(), LaunchShape(132, 256, programmatic=programmatic)).launch(Params())
    chained, plain = (config for config, *_ in paper.named("cuLaunchKernelEx"))
    (attribute,) = chained.attrs
    assert (chained.numAttrs, plain.numAttrs) == (1, 0)
    assert attribute.id == REAL.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert attribute.value.programmaticStreamSerializationAllowed == 1


def test_most_shared_memory_is_asked_of_the_function(paper: PaperDriver) -> None:
    Function(kernel(), LaunchShape(1, 32, most_shared=True))
    carveout = REAL.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    assert paper.named("cuFuncSetAttribute")[1:] == [("function", carveout, 100)]


def test_clusters_that_do_not_fit_are_refused_before_launch(paper: PaperDriver) -> None:
    paper.clusters = 32
    with pytest.raises(
        Unsupported, match=r"^walk needs 33 clusters of 4 resident at once; this GPU holds 32 of them; take smaller clusters"
    ):
        Function(kernel(), LaunchShape(132, 256, cluster=4))
    with pytest.raises(Unsupported, match=r"^walk: 66 CTAs are no whole number of clusters of 4\.$"):
        Function(kernel(), LaunchShape(66, 256, cluster=4))
    Function(kernel(), LaunchShape(128, 256, cluster=4))


def test_the_kernel_is_given_the_bytes_of_the_params(paper: PaperDriver) -> None:
    function = Function(kernel(), LaunchShape(1, 1))
    params = [Params(weights=0xABC, steps=7, vocab=151_936), Params(weights=0xDEF, steps=1)]
    for each in params:
        function.launch(each)
    assert paper.launched == [bytes(each) for each in params]


@pytest.mark.parametrize(("ctas_per_sm", "ctas"), [(1, 133), (0, 1), (2, 265)])
def test_a_grid_that_does_not_fit_is_refused_before_launch(ctas_per_sm: int, ctas: int, paper: PaperDriver) -> None:
    paper.ctas_per_sm = ctas_per_sm
    with pytest.raises(Unsupported) as refused:
        Function(kernel(), LaunchShape(ctas, 256, 1000, cooperative=True))
    assert str(refused.value) == (
        f"walk needs {ctas} CTAs resident at once; this GPU holds {ctas_per_sm} a SM on 132 SMs "
        "(255 registers x 256 threads, 1000 bytes of shared memory); "
        "take a whole GPU (no MIG slice, no MPS share), or a vocabulary or options that need less of an SM."
    )
    if ctas_per_sm:
        Function(kernel(), LaunchShape(ctas - 1, 256, 1000, cooperative=True))


@pytest.mark.parametrize(
    "call",
    ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuLaunchKernelEx"],
)
def test_a_refused_call_is_named_with_the_drivers_words(call: str, paper: PaperDriver) -> None:
    paper.fails = call
    with pytest.raises(LaunchError, match=f"^{call}: invalid argument$"):
        Function(kernel(), LaunchShape(1, 1, cooperative=True)).launch(Params())


def test_a_cubin_is_loaded_once_a_process(paper: PaperDriver) -> None:
    for cubin in (b"one", b"one", b"two", b"one"):
        Function(kernel(cubin), LaunchShape(1, 1))
    assert [arguments[0] for arguments in paper.named("cuModuleLoadData")] == [b"one", b"two"]
