"""The only user of the CUDA driver API: load a kernel, ask what fits, launch it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from kernels.build import Kernel
from kernels.walk import Unsupported


class LaunchError(RuntimeError):
    """The driver refused a call. The message names the call and the driver's own word for the error."""


def _driver() -> Any:
    return import_module("cuda.bindings.driver")


def _checked(call: str, result: tuple) -> Any:
    code, *values = result
    if int(code) != 0:
        driver = _driver()
        _, text = driver.cuGetErrorString(code)
        raise LaunchError(f"{call}: {text.decode() if text else repr(code)}")
    return values[0] if len(values) == 1 else tuple(values)


@cache
def _load(cubin: bytes, entry: bytes) -> Any:
    """The function handle of `entry`, loaded once a process into torch's (primary) context."""
    import torch

    torch.cuda.current_stream().synchronize()  # makes the primary context current
    driver = _driver()
    module = _checked("cuModuleLoadData", driver.cuModuleLoadData(cubin))
    return _checked("cuModuleGetFunction", driver.cuModuleGetFunction(module, entry))


def _cooperative() -> Any:
    attribute = _driver().CUlaunchAttribute()
    attribute.id = _driver().CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    attribute.value.cooperative = 1
    return attribute


def _cluster(size: int) -> Any:
    attribute = _driver().CUlaunchAttribute()
    attribute.id = _driver().CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = size, 1, 1
    return attribute


def _programmatic() -> Any:
    attribute = _driver().CUlaunchAttribute()
    attribute.id = _driver().CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


@dataclass(frozen=True)
class LaunchShape:
    """How a kernel is launched: CTAs, threads per CTA, dynamic shared memory, whether all CTAs must be resident together, CTAs in a cluster.

    programmatic: may start before the kernel before it in the stream has ended, and waits for it by griddepcontrol.wait
    most_shared:  asks for SMs that are divided for the most shared memory, so that kernels with much and with none can share one
    """

    ctas: int
    threads: int
    dynamic_smem_bytes: int = 0
    cooperative: bool = False
    cluster: int = 1
    programmatic: bool = False
    most_shared: bool = False


class Function:
    """A loaded kernel with a fixed launch shape. Construction checks that the grid fits the device as it is now."""

    def __init__(self, kernel: Kernel, shape: LaunchShape) -> None:
        driver = _driver()
        self.shape = shape
        self._handle = _load(kernel.cubin, kernel.entry.encode())
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked("cuFuncSetAttribute", driver.cuFuncSetAttribute(self._handle, attribute, shape.dynamic_smem_bytes))
        if shape.most_shared:
            carveout = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            _checked("cuFuncSetAttribute", driver.cuFuncSetAttribute(self._handle, carveout, 100))  # percent
        self._config = driver.CUlaunchConfig()
        self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ = shape.ctas, 1, 1
        self._config.blockDimX, self._config.blockDimY, self._config.blockDimZ = shape.threads, 1, 1
        self._config.sharedMemBytes = shape.dynamic_smem_bytes
        attributes = [_cluster(shape.cluster)] if shape.cluster > 1 else []
        self._config.attrs, self._config.numAttrs = attributes, len(attributes)
        if shape.cluster > 1:
            self._check_clusters(kernel)
        if shape.cooperative:
            self._check_resident(kernel)
            attributes.append(_cooperative())
        if shape.programmatic:
            attributes.append(_programmatic())
        self._config.attrs, self._config.numAttrs = attributes, len(attributes)

    def _check_clusters(self, kernel: Kernel) -> None:
        """A cluster lives in one GPC, so the SMs left over in each of them hold none."""
        if self.shape.ctas % self.shape.cluster:
            raise Unsupported(f"{kernel.entry}: {self.shape.ctas} CTAs are no whole number of clusters of {self.shape.cluster}.")
        resident = _checked("cuOccupancyMaxActiveClusters", _driver().cuOccupancyMaxActiveClusters(self._handle, self._config))
        if resident * self.shape.cluster < self.shape.ctas:
            raise Unsupported(
                f"{kernel.entry} needs {self.shape.ctas // self.shape.cluster} clusters of {self.shape.cluster} resident at once; "
                f"this GPU holds {resident} of them; take smaller clusters, or fewer CTAs."
            )

    def _check_resident(self, kernel: Kernel) -> None:
        import torch

        driver = _driver()
        per_sm = _checked(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._handle, self.shape.threads, self.shape.dynamic_smem_bytes),
        )
        sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        if per_sm * sms < self.shape.ctas:
            raise Unsupported(
                f"{kernel.entry} needs {self.shape.ctas} CTAs resident at once; this GPU holds {per_sm} a SM on {sms} SMs "
                f"({kernel.registers} registers x {self.shape.threads} threads, {self.shape.dynamic_smem_bytes} bytes of shared memory); "
                "take a whole GPU (no MIG slice, no MPS share), or a vocabulary or options that need less of an SM."
            )

    def launch(self, params: ctypes.Structure) -> None:
        """Enqueue on torch's current stream. `params` is copied by the driver before this returns."""
        import torch

        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self._config.hStream = torch.cuda.current_stream().cuda_stream
        _checked("cuLaunchKernelEx", _driver().cuLaunchKernelEx(self._config, self._handle, ctypes.addressof(pointers), 0))
