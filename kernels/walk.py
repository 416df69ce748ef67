"""The contract between a walk, the ways to run it, and whoever times or checks them.

A *head* is a tiny recurrence that ends in a vocabulary-wide matrix; a *walk* runs it for ``steps`` tokens, one after
the other. A :class:`Backend` is one way to run a walk. ``prepare`` holds every cost that is paid once per model load
(quantize, pack, compile, place); ``launch`` is the timed region and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.unsupported import Unsupported as Unsupported

if TYPE_CHECKING:
    from kernels.device import DeviceSpec


class Rounding(StrEnum):
    """Where the corrected logits are rounded to bf16, i.e. which oracle a backend's tokens must equal.

    With base logits L (bf16), bias b = W2 u accumulated in fp32, and rho = round-to-nearest-even to bf16.
    """

    TWICE = "twice"  # rho(L + rho(b)): SGLang folded and eager, the vLLM loop
    ONCE = "once"  # rho(L + b): vLLM addmm, where the library adds before it rounds
    NEVER = "never"  # L + b in fp32: SGLang MarkovGreedyStep
    INT8 = "int8"  # W2 int8 rows, u in two int8 planes, exact int32 sums, one rho: the resident walk
    APPROXIMATE = "approximate"  # pruned candidates: no oracle, agreement is measured instead


class NanRule(StrEnum):
    """What a NaN logit does in the argmax. Every rule keeps the token inside [0, vocab)."""

    LOSES = "loses"  # counts as -inf; a row with nothing above -inf gives token 0
    WINS = "wins"  # torch.argmax: the first NaN of the row is the token


class NoiseRule(StrEnum):
    """How a backend draws a token of a row with temperature > 0. All draw from softmax(corrected logits / T), GROUPS with weights exact up to 1.8e-4."""

    GUMBEL = "gumbel"  # one Gumbel a row; `kernels.sampling` gives the same tokens
    GROUPS = "groups"  # inverse CDF inside 16 rows, one Gumbel a group; `kernels.sampling` gives the same tokens
    HASH = "hash"  # one Gumbel a row, by `kernels.murmur` up to the platforms' logarithms: vLLM's loop
    UNIFORM = "uniform"  # inverse CDF of the whole row from one word of `kernels.murmur`, up to the sums' rounding
    LIBRARY = "library"  # torch's generator: no host twin, only the distribution is known


@dataclass(frozen=True)
class WalkInputs:
    """What one walk reads. All tensors live on one device.

    base_logits: [batch, steps, vocab] bf16 (fp16 and fp32 where a backend says so); rows may be strided or padded, the last axis is contiguous
    anchor:      [batch] int64, the last verified token; out-of-range ids are clamped into [0, vocab)
    temperature: [batch] fp32; <= 0 or NaN means greedy
    seed:        [batch] int64, noise key of the request
    hidden:      [batch, steps, hidden] for heads that read it, else None
    """

    base_logits: Tensor
    anchor: Tensor
    temperature: Tensor
    seed: Tensor
    hidden: Tensor | None = None

    @property
    def batch(self) -> int:
        return self.base_logits.shape[0]

    @property
    def steps(self) -> int:
        return self.base_logits.shape[1]

    @property
    def vocab(self) -> int:
        return self.base_logits.shape[2]

    def __post_init__(self) -> None:
        if self.base_logits.ndim != 3:
            raise ValueError(f"base_logits must be [batch, steps, vocab]; got shape {tuple(self.base_logits.shape)}")
        if self.base_logits.stride(2) != 1:
            raise ValueError(f"base_logits must be contiguous along vocab; got strides {self.base_logits.stride()}")
        for name, dtype in (("anchor", torch.int64), ("temperature", torch.float32), ("seed", torch.int64)):
            value: Tensor = getattr(self, name)
            if value.shape != (self.batch,) or value.dtype != dtype:
                raise ValueError(f"{name} must be [{self.batch}] {dtype}; got {list(value.shape)} {value.dtype}")


@dataclass(frozen=True)
class Draft:
    """What a walk writes: tokens [batch, steps] int64 and, on paths that keep them, corrected logits [batch, steps, vocab] bf16.

    A persistent walk writes logits of rows with temperature > 0 only. Zero the buffer once, so that greedy rows stay finite.
    """

    tokens: Tensor
    logits: Tensor | None = None

    @classmethod
    def like(cls, inputs: WalkInputs, *, logits: bool = False) -> Draft:
        """Allocate a draft for `inputs`, poisoned (-1 and NaN) so that an unwritten element cannot pass a check."""
        device = inputs.base_logits.device
        tokens = torch.full((inputs.batch, inputs.steps), -1, dtype=torch.int64, device=device)
        if not logits:
            return cls(tokens)
        return cls(tokens, torch.full(inputs.base_logits.shape, torch.nan, dtype=torch.bfloat16, device=device))


@dataclass(frozen=True)
class Limits:
    """The largest walk a prepared backend must serve. A walk beyond them is a ValueError at launch."""

    max_batch: int = 1
    max_steps: int = 16
    sampling: bool = False  # whether any row may have temperature > 0


@dataclass(frozen=True)
class Resources:
    """What a prepared walk occupies. Zero where it does not apply (torch arms have no kernel of ours)."""

    registers: int = 0  # per thread
    spill_bytes: int = 0  # per thread
    smem_bytes: int = 0  # per CTA, static and dynamic
    ctas: int = 0
    resident_bytes: int = 0  # weights kept on chip for the whole walk
    streamed_bytes: int = 0  # weight bytes read from L2 or HBM at every step
    entry_bytes: int = 0  # bytes read once per walk, whatever its length
    cubin_sha256: str = ""
    source_sha256: str = ""


@dataclass(frozen=True)
class NoOptions:
    """The options of a backend that has nothing to choose: the original's defaults."""


class Head(Protocol):
    """Weights of a serial head, on one device. Each head file adds its own tensors and its exact reference step."""

    kind: ClassVar[str]

    @property
    def vocab(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


@runtime_checkable
class PreparedWalk(Protocol):
    """A walk ready to run again and again. One launch at a time: a prepared walk owns scratch state on the device."""

    @property
    def resources(self) -> Resources: ...

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        """Enqueue one walk on the current stream. No synchronisation, no allocation that outlives it; legal in graph capture."""
        ...


class Backend(Protocol):
    """One way to run a walk. `name` is also its config name: backend=<name>."""

    name: ClassVar[str]
    archs: ClassVar[tuple[str, ...]]  # ("cpu",), ("cuda",) for any CUDA GPU, ("sm_90a",), ("sm_100a",)
    nan_rule: ClassVar[NanRule]
    Options: ClassVar[type[Any]]  # frozen dataclass; unknown keys are errors

    def __init__(self, options: Any) -> None: ...

    @property
    def rounding(self) -> Rounding:
        """Which oracle its tokens must equal; may depend on the options (int8 or bf16 weights)."""
        ...

    def prepare(self, head: Head, limits: Limits, device: DeviceSpec) -> PreparedWalk:
        """Everything paid once per model load.

        Raises:
            Unsupported: this head, limit or device cannot be served; the message says why and what could serve it.
        """
        ...


@runtime_checkable
class ClockedWalk(PreparedWalk, Protocol):
    """A prepared walk that also stamps its own steps, for a second estimate of the slope that no host timer touches."""

    def step_stamps(self) -> Tensor:
        """[at least steps + 1, 2] int64, of CTA 0 and the last launch: SM cycles and wall-clock nanoseconds when step 0 starts and when
        each step's token is known. Cycles resolve a step; the nanoseconds tell at what clock they passed."""
        ...


@runtime_checkable
class TalliedWalk(PreparedWalk, Protocol):
    """A prepared walk that counts the steps which took longer than the others, so that its times can be explained."""

    @property
    def tally(self) -> Tensor:
        """[max_batch, 2] int64, of all launches so far: steps that the table did not settle, and those of them that had to be searched."""
        ...


@runtime_checkable
class SampledWalk(PreparedWalk, Protocol):
    """A prepared walk whose draws a host can repeat, from `noise`, the request's seed and the round."""

    @property
    def noise(self) -> NoiseRule: ...

    def round(self) -> int:
        """The round of the next launch: how many launches were before it. Synchronises."""
        ...
