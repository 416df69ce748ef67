"""Corrected logits of a walk whose tokens are settled, in one pass over W2: what a verifier that resamples needs of rows with temperature > 0."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.build import Kernel, build
from kernels.device import DeviceSpec
from kernels.driver import Function, LaunchShape
from kernels.params import Params
from kernels.persistent import cpp, entry_source, load
from kernels.walk import Unsupported

_HEADER, _ENTRY, _THREADS = "settled_logits.cuh", "walk_settled_logits", 512
_COLUMN_BYTES = 576 + 16  # of shared memory
_STAGE_BYTES = 16 * 8 * 512  # of eight rows a warp
_MOST_TILES, _MOST_STAGES = 14, 3  # of 16 columns, 133 KB of shared memory


@dataclass(frozen=True)
class LogitsLayout:
    """See LogitsShape of settled_logits.cuh."""

    tiles: int
    groups: int
    stages: int

    @classmethod
    def of(cls, columns: int, device: DeviceSpec) -> LogitsLayout:
        """For so many (request, step) pairs: as few passes over W2 as shared memory allows, with columns evenly among them.

        Raises:
            Unsupported: a GPU with too little shared memory.
        """
        tiles, room = -(-columns // 16), device.smem_bytes_per_cta - _STAGE_BYTES
        most = min(_MOST_TILES, room // (16 * _COLUMN_BYTES))
        if most < 1:
            raise Unsupported(
                f"logits of a settled walk need {_STAGE_BYTES + 16 * _COLUMN_BYTES:,} bytes of shared memory and {device.name} has "
                f"{device.smem_bytes_per_cta:,}; backend=sglang_folded serves it."
            )
        groups = -(-tiles // most)
        tiles = -(-tiles // groups)
        return cls(tiles, groups, min(_MOST_STAGES, 1 + (room - 16 * tiles * _COLUMN_BYTES) // _STAGE_BYTES))

    @property
    def smem_bytes(self) -> int:
        return 16 * self.tiles * _COLUMN_BYTES + self.stages * _STAGE_BYTES


@dataclass(frozen=True)
class SettledLogits:
    """The pass, ready to run after a walk on its stream."""

    function: Function
    kernel: Kernel

    @classmethod
    def prepare(cls, columns: int, device: DeviceSpec) -> SettledLogits:
        layout = LogitsLayout.of(columns, device)
        kernel = compile_logits(layout, device)
        return cls(load(kernel, LaunchShape(device.sms * layout.groups, _THREADS, layout.smem_bytes)), kernel)

    def launch(self, walk: Params) -> None:
        """`walk`: of the walk before, with the logits to write. Its weights and latents are W2 and W1 as they are."""
        self.function.launch(walk)


def compile_logits(layout: LogitsLayout, device: DeviceSpec) -> Kernel:
    """Needs no GPU."""
    fields = cpp(tiles=layout.tiles, groups=layout.groups, stages=layout.stages)
    return build(entry_source(_HEADER, _ENTRY, _THREADS, f"wts::LogitsShape{{{fields}}}"), _ENTRY, device.arch)
