"""What a run is asked to do: one frozen dataclass for every config group, and nothing of Hydra.

A config reaches these classes either through Hydra (`experiments.run key=value`) or from a plan file (`--plan`). Both go through
:func:`experiments.convert.config`, so that both refuse the same typos and the same wrong types.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from kernels.device import DeviceSpec

GREEDY = 0.0  # the temperature of every walk timed so far


def _positive(key: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{key}: must be at least 1; got {value}")


def _spread(key: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{key}: must be finite and at least 0; got {value}")


def _lengths(steps: tuple[int, ...]) -> None:
    if not steps or min(steps) < 1 or len(set(steps)) != len(steps):
        raise ValueError(f"steps: needs different lengths of at least 1; got {list(steps)}")


@dataclass(frozen=True)
class HeadConfig:
    """Weights of a synthetic head. W1 [vocab, rank] ~ w1_std N(0,1), W2 [vocab, rank] ~ w2_std N(0,1), both bf16."""

    name: str
    vocab: int
    rank: int
    kind: str = "markov"
    seed: int = 0
    w1_std: float = 1.0
    w2_std: float = 0.05

    def __post_init__(self) -> None:
        if self.kind != "markov":
            raise ValueError(f"kind: {self.kind!r} is not a head that this suite can build; it has: markov")
        for key in ("vocab", "rank"):
            _positive(key, getattr(self, key))
        for key in ("w1_std", "w2_std"):
            _spread(key, getattr(self, key))


@dataclass(frozen=True)
class BackendConfig:
    """A way to run a walk: a name of `kernels/backends` and its options (checked against the backend's own, see `experiments.workload.create`)."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class InputsConfig:
    """Base logits ~ base_std N(0,1) in bf16, random anchors."""

    family: str = "synthetic"
    base_std: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.family != "synthetic":
            raise ValueError(f"family: {self.family!r} is not an input family; there is: synthetic")
        _spread("base_std", self.base_std)


@dataclass(frozen=True)
class Timing:
    """How samples are taken. See `experiments.measure` for what each number does.

    clock_tolerance: a sample whose SM clock is further than this share from the run's median is kept and flagged invalid.
    """

    rounds: int = 20
    warmup: int = 3
    kernel_replays: int = 5  # replays under the profiler, for scope=kernel
    clock_tolerance: float = 0.03

    def __post_init__(self) -> None:
        _positive("rounds", self.rounds)
        if self.warmup < 1 or self.kernel_replays < 0:
            raise ValueError(f"warmup must be at least 1 and kernel_replays at least 0; got {self.warmup} and {self.kernel_replays}")


@dataclass(frozen=True)
class Smoke:
    """A few walks of the chosen backend, checked and timed, in seconds."""

    name: str = "smoke"
    steps: tuple[int, ...] = (1, 4)
    batch: int = 1
    timing: Timing = Timing(rounds=5, kernel_replays=2)

    def __post_init__(self) -> None:
        _lengths(self.steps)
        _positive("batch", self.batch)


@dataclass(frozen=True)
class Variant:
    """One arm of a comparison: a label, the backend that runs it and its options.

    clocked: also run it with the option `clocks: true`, whose in-kernel stamps give a second estimate of the step.
    """

    label: str
    backend: str
    options: dict[str, Any] = field(default_factory=dict)
    clocked: bool = False


@dataclass(frozen=True)
class StepSlope:
    """What one more step costs each arm, and what entering the walk costs: several lengths, interleaved, in fresh processes."""

    variants: tuple[Variant, ...]
    name: str = "step_slope"
    steps: tuple[int, ...] = (1, 2, 4, 7, 10, 13, 16)
    batch: int = 1
    replicas: int = 6
    replica_timeout_s: int = 300
    timing: Timing = Timing()

    def __post_init__(self) -> None:
        _lengths(self.steps)
        for key in ("batch", "replicas", "replica_timeout_s"):
            _positive(key, getattr(self, key))
        labels = [variant.label for variant in self.variants]
        if not labels or len(set(labels)) != len(labels):
            raise ValueError(f"variants: needs at least one, with different labels; got {labels}")


@dataclass(frozen=True)
class ToyWalk:
    """Every number of a walk small enough to print."""

    name: str = "toy_walk"
    steps: int = 3

    def __post_init__(self) -> None:
        _positive("steps", self.steps)


@dataclass(frozen=True)
class Footprint:
    """A head by its size alone; its weights are never built."""

    name: str
    vocab: int
    rank: int


@dataclass(frozen=True)
class Capacity:
    """What each memory tier of each device holds, and what a resident walk of each head would put there."""

    devices: tuple[str, ...]
    heads: tuple[Footprint, ...]
    name: str = "capacity"
    steps: int = 16


Experiment = Smoke | StepSlope | ToyWalk | Capacity
EXPERIMENTS: dict[str, type[Experiment]] = {"smoke": Smoke, "step_slope": StepSlope, "toy_walk": ToyWalk, "capacity": Capacity}


@dataclass(frozen=True)
class Config:
    """One run. `seed` orders the samples; heads and inputs have their own seeds."""

    device: DeviceSpec
    head: HeadConfig
    backend: BackendConfig
    experiment: Experiment
    inputs: InputsConfig = InputsConfig()
    output: str = "runs"
    seed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The config as JSON would give it back: dicts, lists and scalars."""
        return json.loads(json.dumps(asdict(self)))

    @property
    def sha256(self) -> str:
        """Hash of everything that is asked for; where the answer is written does not count."""
        asked = {key: value for key, value in self.as_dict().items() if key != "output"}
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
