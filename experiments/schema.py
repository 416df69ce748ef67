"""What a run is asked to do: one frozen dataclass for every config group, and nothing of Hydra.

A config reaches these classes either through Hydra (`experiments.run key=value`) or from a plan file (`--plan`). Both go through
:func:`experiments.convert.config`, so that both refuse the same typos and the same wrong types.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from experiments.drafter.pair import PairConfig, ReleasedConfig
from kernels.device import DeviceSpec

RULES = ("sglang", "vllm")  # of rejection sampling, see experiments/drafter/verify.py
SYNTHETIC, TRAINED = "synthetic", "trained"
GREEDY = 0.0  # the temperature of a walk that takes the largest logit


def _different_temperatures(temperatures: tuple[float, ...]) -> None:
    right = [temperature for temperature in temperatures if _is_temperature(temperature)]
    if not right or right != list(temperatures) or len(set(right)) != len(right):
        raise ValueError(f"temperatures: needs different finite ones, 0 for greedy; got {list(temperatures)}")


def _is_temperature(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _positive(key: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{key}: must be at least 1; got {value}")


def _spread(key: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{key}: must be finite and at least 0; got {value}")


def _lengths(steps: tuple[int, ...]) -> None:
    if not steps or min(steps) < 1 or len(set(steps)) != len(steps):
        raise ValueError(f"steps: needs different lengths of at least 1; got {list(steps)}")


def _different_counts(key: str, counts: tuple[int, ...]) -> None:
    if not counts or min(counts) < 1 or len(set(counts)) != len(counts):
        raise ValueError(f"{key}: needs different ones of at least 1; got {list(counts)}")


def _arms(variants: Sequence[Variant]) -> None:
    labels = [variant.label for variant in variants]
    if not labels or len(set(labels)) != len(labels):
        raise ValueError(f"variants: needs at least one, with different labels; got {labels}")


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
    """What the walks of an experiment read.

    family:     "synthetic": base logits ~ base_std N(0,1) in bf16, random anchors; "trained": the head of `pair` and rounds that it drafted
    checkpoint: trained: a .safetensors file with another head than the pair's (`experiments.head_file`)
    rounds:     trained: a file with its rounds (`experiments.recorded_rounds`); empty: rounds.safetensors beside the checkpoint
    """

    family: str = SYNTHETIC
    base_std: float = 2.0
    seed: int = 0
    checkpoint: str = ""
    rounds: str = ""

    def __post_init__(self) -> None:
        if self.family not in (SYNTHETIC, TRAINED):
            raise ValueError(f"family: {self.family!r} is not an input family; there are: {SYNTHETIC}, {TRAINED}")
        if self.family == SYNTHETIC and (self.checkpoint or self.rounds):
            raise ValueError("family: synthetic inputs have no checkpoint and no rounds; take inputs=trained for those")
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
    """What one more step costs each arm, and what entering the walk costs: several lengths, interleaved, in fresh processes.

    temperature: of every request, 0 for greedy
    """

    variants: tuple[Variant, ...]
    name: str = "step_slope"
    steps: tuple[int, ...] = (1, 2, 4, 7, 10, 13, 16)
    batch: int = 1
    temperature: float = 0.0
    replicas: int = 6
    replica_timeout_s: int = 300
    timing: Timing = Timing()

    def __post_init__(self) -> None:
        _lengths(self.steps)
        _arms(self.variants)
        for key in ("batch", "replicas", "replica_timeout_s"):
            _positive(key, getattr(self, key))
        if not _is_temperature(self.temperature):
            raise ValueError(f"temperature: needs a finite one, 0 for greedy; got {self.temperature}")


@dataclass(frozen=True)
class Placement(StepSlope):
    """What a step and the entry cost the resident walk by where its W2 lives: a step_slope over splits, and their plans beside it."""

    name: str = "placement"
    steps: tuple[int, ...] = (1, 7, 16)


@dataclass(frozen=True)
class StepBreakdown(StepSlope):
    """What the parts of a step cost: a step_slope of the resident walk, plain and with one part of every step done twice."""

    name: str = "step_breakdown"
    steps: tuple[int, ...] = (1, 4, 7, 10, 13, 16)
    timing: Timing = Timing(rounds=40, kernel_replays=0)


@dataclass(frozen=True)
class StepAnatomy(StepSlope):
    """Which kernels a step of each arm is made of: a step_slope of two lengths, and the profiler's kernels beside it."""

    name: str = "step_anatomy"
    steps: tuple[int, ...] = (7, 15)
    replicas: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.steps) != 2:
            raise ValueError(f"steps: what a step adds is the difference of two lengths; got {list(self.steps)}")


@dataclass(frozen=True)
class WalkLatency:
    """What one call costs each arm, by steps, batch and temperature: a cell's arms interleaved, every replica a fresh process.

    A run has one head. Its grid may be any part of the paper's: the analysis takes each cell from the newest run that has it.
    """

    variants: tuple[Variant, ...]
    name: str = "walk_latency"
    steps: tuple[int, ...] = (7, 16)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    replicas: int = 3
    replica_timeout_s: int = 300
    timing: Timing = Timing(rounds=10, kernel_replays=0)

    def __post_init__(self) -> None:
        _lengths(self.steps)
        _arms(self.variants)
        _different_counts("batches", self.batches)
        _different_temperatures(self.temperatures)
        for key in ("replicas", "replica_timeout_s"):
            _positive(key, getattr(self, key))


@dataclass(frozen=True)
class Rivals(WalkLatency):
    """A walk_latency over every way to run the walk that this suite has."""

    name: str = "rivals"
    timing: Timing = Timing(rounds=5, kernel_replays=0)


@dataclass(frozen=True)
class Certified:
    """What one call costs each arm, by input set, and which steps a few rows prove: the certified walk's time depends on the data.

    sets:       how many different input sets, if there are as many: recorded rounds, or synthetic ones
    candidates: rows of a step that are named by their base logits, listed: by the previous token's bias; every pair of them is proved by the reference
    warmup:     calls before a capture
    """

    variants: tuple[Variant, ...]
    name: str = "certified"
    steps: tuple[int, ...] = (7, 16)
    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    sets: int = 128
    candidates: tuple[int, ...] = (64, 128, 256, 512)
    listed: tuple[int, ...] = (32, 64, 128)
    warmup: int = 3

    def __post_init__(self) -> None:
        _lengths(self.steps)
        _arms(self.variants)
        for key in ("batches", "candidates", "listed"):
            _different_counts(key, getattr(self, key))
        _different_temperatures(self.temperatures)
        _positive("warmup", self.warmup)
        if self.sets < 2:
            raise ValueError(f"sets: a stale answer is seen by the next set, so there must be at least 2; got {self.sets}")


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


@dataclass(frozen=True)
class PackingMap:
    """Which lane of a warp holds which byte of a tile, and the numbers of one row of it.

    row: of the tile, 0 to 15. batches: requests that share the four pairs of columns of an MMA, 1, 2 or 4.
    """

    name: str = "packing_map"
    row: int = 5
    batches: tuple[int, ...] = (1, 4)

    def __post_init__(self) -> None:
        if not 0 <= self.row < 16:
            raise ValueError(f"row: a tile has rows 0 to 15; got {self.row}")
        if not self.batches or len(set(self.batches)) != len(self.batches) or not {1, 2, 4}.issuperset(self.batches):
            raise ValueError(f"batches: needs different ones of 1, 2 and 4; got {list(self.batches)}")


@dataclass(frozen=True)
class Exchange:
    """What agreeing on one token costs each protocol of `kernels.exchange_probe`, on each number of CTAs; a slope over several lengths."""

    protocols: tuple[str, ...]
    name: str = "exchange"
    ctas: tuple[int, ...] = (8, 66, 132)
    steps: tuple[int, ...] = (8, 16, 24, 32)
    replicas: int = 6
    replica_timeout_s: int = 300
    timing: Timing = Timing(kernel_replays=0)

    def __post_init__(self) -> None:
        _lengths(self.steps)
        if len(self.steps) < 2 or not 2 <= max(self.steps) <= 32:
            raise ValueError(f"steps: a slope needs at least two lengths, and a probe makes up to 32 steps; got {list(self.steps)}")
        for key in ("replicas", "replica_timeout_s"):
            _positive(key, getattr(self, key))
        for key in ("protocols", "ctas"):
            values = getattr(self, key)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{key}: needs at least one, all different; got {list(values)}")
        if not 2 <= min(self.ctas) <= max(self.ctas) <= 256:
            raise ValueError(f"ctas: from 2 to 256 CTAs can agree; got {list(self.ctas)}")


@dataclass(frozen=True)
class TrainPair:
    """What a pair learns. logged: steps between two rows; held_out: sequences of each source to ask."""

    name: str = "train_pair"
    logged: int = 25
    held_out: int = 8

    def __post_init__(self) -> None:
        for key in ("logged", "held_out"):
            _positive(key, getattr(self, key))


@dataclass(frozen=True)
class RecordRounds:
    """Rounds that a pair drafts of held-out text, one of each prompt.

    count: rounds to keep; top: logits of each step to keep exactly, 0 for all; batch: prompts decoded together
    file:  where they are written; empty: beside the pair's drafter, where `inputs=trained` finds them
    """

    name: str = "record_rounds"
    count: int = 128
    top: int = 0
    batch: int = 32
    file: str = ""

    def __post_init__(self) -> None:
        for key in ("count", "batch"):
            _positive(key, getattr(self, key))
        if self.top < 0:
            raise ValueError(f"top: must be at least 0; got {self.top}")


@dataclass(frozen=True)
class Quantization:
    """What 8-bit formats lose of a head: errors of its weights and of its bias, and the tokens that they change.

    checkpoints: .safetensors files with the head of a DSpark drafter (`experiments.head_file`); none: the configured synthetic head
    rounds:      for each checkpoint a .safetensors file with base logits of its drafter (`experiments.recorded_rounds`); none: synthetic ones
    tokens:      how many tokens' latents give the bias
    """

    name: str = "quantization"
    checkpoints: tuple[str, ...] = ()
    rounds: tuple[str, ...] = ()
    tokens: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        _positive("tokens", self.tokens)
        count = len(self.checkpoints)
        if len(set(self.checkpoints)) != count:
            raise ValueError(f"checkpoints: needs different ones; got {list(self.checkpoints)}")
        if self.rounds and len(self.rounds) != count:
            raise ValueError(f"rounds: are of one drafter each, so as many as checkpoints, or none; got {len(self.rounds)} and {count}")


@dataclass(frozen=True)
class Load:
    """batch: requests decoded together, as an engine has them under this concurrency; tokens: decoded after each prompt; passes: every arm decodes all
    prompts so often, in the opposite order of arms each time."""

    batch: int
    tokens: int
    passes: int = 2

    def __post_init__(self) -> None:
        for key in ("batch", "tokens", "passes"):
            _positive(key, getattr(self, key))


@dataclass(frozen=True)
class DecodingArm(Variant):
    """weights: the 8-bit format that the head's weights have been through, of `experiments.quantized_bias.FORMATS`; empty: none, as trained."""

    weights: str = ""


@dataclass(frozen=True)
class Acceptance:
    """How many tokens of a draft a pair's target takes, by the backend that walks the pair's serial head.

    loads:   what is decoded together; prompts, prompt_tokens: how many and how long, from held-out text
    rule:    of the rejection sampler, "sglang" or "vllm"
    seed:    of all draws
    """

    variants: tuple[DecodingArm, ...]
    loads: tuple[Load, ...]
    name: str = "acceptance"
    steps: tuple[int, ...] = (7, 16)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    prompts: int = 605
    prompt_tokens: int = 64
    rule: str = "sglang"
    seed: int = 0

    def __post_init__(self) -> None:
        _lengths(self.steps)
        _arms(self.variants)
        _different_temperatures(self.temperatures)
        for key in ("prompts", "prompt_tokens"):
            _positive(key, getattr(self, key))
        batches = [load.batch for load in self.loads]
        if not batches or len(set(batches)) != len(batches):
            raise ValueError(f"loads: needs different batches, at least one; got {batches}")
        if self.rule not in RULES:
            raise ValueError(f"rule: {self.rule!r} is none of {', '.join(RULES)}")


Experiment = (
    Smoke
    | StepSlope
    | ToyWalk
    | Capacity
    | PackingMap
    | Exchange
    | WalkLatency
    | Placement
    | StepBreakdown
    | Rivals
    | Certified
    | StepAnatomy
    | TrainPair
    | RecordRounds
    | Quantization
    | Acceptance
)
TIMED = (Smoke, StepSlope, WalkLatency, Certified)  # they time walks of a head, whatever its inputs are
TRAINABLE = (*TIMED, Quantization)  # they take trained inputs
EXPERIMENTS: dict[str, type[Experiment]] = {
    "smoke": Smoke,
    "step_slope": StepSlope,
    "toy_walk": ToyWalk,
    "capacity": Capacity,
    "packing_map": PackingMap,
    "exchange": Exchange,
    "walk_latency": WalkLatency,
    "placement": Placement,
    "step_breakdown": StepBreakdown,
    "rivals": Rivals,
    "certified": Certified,
    "step_anatomy": StepAnatomy,
    "train_pair": TrainPair,
    "record_rounds": RecordRounds,
    "quantization": Quantization,
    "acceptance": Acceptance,
}


@dataclass(frozen=True)
class Config:
    """One run. `seed` orders the samples; heads, inputs and pairs have their own seeds. `pair` is for those who ask a pair, trained
    here or released.

    With trained inputs `head` says how large the trained one is; `experiments.trained_inputs` puts it there.
    """

    device: DeviceSpec
    head: HeadConfig
    backend: BackendConfig
    experiment: Experiment
    inputs: InputsConfig = InputsConfig()
    pair: PairConfig | ReleasedConfig | None = None
    output: str = "runs"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.inputs.family == TRAINED:
            self._assert_trained()

    def as_dict(self) -> dict[str, Any]:
        """The config as JSON would give it back: dicts, lists and scalars."""
        return json.loads(json.dumps(asdict(self)))

    @property
    def sha256(self) -> str:
        """Hash of everything that is asked for; where the answer is written does not count."""
        asked = {key: value for key, value in self.as_dict().items() if key != "output"}
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    def _assert_trained(self) -> None:
        pair, ask, inputs = self.pair, self.experiment, self.inputs
        if not isinstance(ask, TRAINABLE):
            raise ValueError(
                f"inputs: only experiments that time walks and quantization take trained ones; experiment={ask.name} needs inputs=synthetic"
            )
        if isinstance(ask, Quantization) and ask.checkpoints:
            raise ValueError("inputs: trained ones are of one pair; give that or experiment.checkpoints, not both")
        if inputs.checkpoint:
            return
        if not isinstance(pair, PairConfig):
            raise ValueError(
                "inputs: trained ones are a pair's; add pair=tiny or pair=qwen_vocab, or give inputs.checkpoint and inputs.rounds"
            )
        pair.assert_walked()
        if isinstance(ask, TIMED) and not inputs.rounds and max(ask.steps) > pair.block:
            raise ValueError(
                f"pair: {pair.name} drafts {pair.block} tokens at once; got experiment.steps {list(ask.steps)}, so ask for fewer"
            )
