"""The files behind `inputs=trained`: a drafter's checkpoint and rounds that it drafted. What a pair lacks is made before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments import head_file
from experiments.convert import ConfigError
from experiments.drafter.pair import PairConfig
from experiments.plan import Plan, run_in_fresh_process
from experiments.recorded_rounds import Recording, recording
from experiments.schema import TIMED, TRAINED, Certified, Config, HeadConfig, InputsConfig, Quantization, RecordRounds, WalkLatency
from kernels.device import check_live

CHECKPOINT_KEY, ROUNDS_KEY = "inputs.checkpoint", "inputs.rounds"
ROUNDS_NAME = "rounds.safetensors"  # beside a checkpoint


@dataclass(frozen=True)
class Files:
    """checkpoint: has the head; rounds: base logits of the same drafter."""

    checkpoint: Path
    rounds: Path


@dataclass(frozen=True)
class Ready:
    """A plan whose inputs are there, and what its record should say of them."""

    plan: Plan
    protocol: dict[str, Any]


def files_of(config: Config) -> Files:
    """The files that `config.inputs` names; where it names none, those of the pair, whether they are there or not."""
    inputs = config.inputs
    drafter = Path(inputs.checkpoint) if inputs.checkpoint else _drafter_of(_pair(config))
    return Files(drafter, Path(inputs.rounds) if inputs.rounds else drafter.with_name(ROUNDS_NAME))


def ready(plan: Plan) -> Ready:
    """The plan with the trained head in its config. A pair that is not trained or has no rounds gets them from a run of its own, so that its memory
    is free again when something is timed. Plans with synthetic inputs stay as they are.

    Raises:
        ConfigError: a file that was named is not there or does not fit, or has too few rounds.
        Unsupported: a pair is to be trained and the device of the config is not here.
        RuntimeError: it could not be trained.
    """
    config = plan.config
    if config.inputs.family != TRAINED:
        return Ready(plan, {})
    files, named, (steps, batch) = files_of(config), config.inputs, _largest(config)
    if named.rounds:
        with head_file.opened(named.rounds, ROUNDS_KEY):
            pass  # told before a pair is trained
    if not named.checkpoint and not (files.checkpoint.exists() and files.rounds.exists()):
        _record(plan, max(RecordRounds().count, _wanted(config)))
    found = head_file.read(str(files.checkpoint), CHECKPOINT_KEY)
    with recording(str(files.rounds), ROUNDS_KEY, found.head.vocab, found.head.w1.shape[0]) as rounds:
        assert_enough(rounds, steps, batch)
        facts = {"head_sha256": found.head.sha256, "rounds": rounds.count, "recorded": dict(rounds.facts)}
    name = found.name if named.checkpoint else head_name(_pair(config))
    size = HeadConfig(name, found.head.vocab, found.head.rank, w1_std=0.0, w2_std=0.0)  # not drawn
    return Ready(replace(plan, config=replace(config, head=size)), {"inputs": facts})


def assert_enough(rounds: Recording, steps: int, batch: int) -> None:
    """Raises:
    ConfigError: shorter rounds than `steps`, or too few for two sets of `batch` requests.
    """
    if steps > rounds.steps:
        raise ConfigError(f"experiment.steps: {rounds.where} has rounds of {rounds.steps} steps; got {steps}, so ask for fewer")
    if 2 * batch > rounds.count:
        raise ConfigError(
            f"{rounds.where} has {rounds.count} rounds and two sets of {batch} requests need {2 * batch}; ask for a smaller batch, or record more: "
            f"python -m experiments.run experiment=record_rounds pair=NAME experiment.count={2 * batch} experiment.file=FILE"
        )


def head_name(pair: PairConfig) -> str:
    """What records call the serial head of a pair."""
    return f"{pair.name}_markov"


def _drafter_of(pair: PairConfig) -> Path:
    from experiments.drafter.checkpoint import folder_of  # inside: machines that time synthetic heads may lack safetensors

    return folder_of(pair) / "drafter.safetensors"


def _pair(config: Config) -> PairConfig:
    assert isinstance(config.pair, PairConfig), "a config with trained inputs has a pair or a checkpoint"
    return config.pair


def _largest(config: Config) -> tuple[int, int]:
    """Steps and batch of the largest walk that will be timed; of what times none, whatever has been recorded is enough."""
    ask = config.experiment
    if isinstance(ask, Quantization):
        return 1, 0
    assert isinstance(ask, TIMED), "a config with trained inputs is one that times walks"
    return max(ask.steps), max(ask.batches) if isinstance(ask, WalkLatency | Certified) else ask.batch


def _wanted(config: Config) -> int:
    """Rounds that give all input sets of the largest batch (see `experiments.inputs`): two that share none, and one more round for each further set."""
    sets = config.experiment.sets if isinstance(config.experiment, Certified) else 2
    return 2 * _largest(config)[1] + sets - 2


def _record(plan: Plan, count: int) -> None:
    check_live(plan.config.device)
    asked = replace(plan.config, experiment=RecordRounds(count=count), inputs=InputsConfig())
    if code := run_in_fresh_process(replace(plan, config=asked)):
        raise RuntimeError(
            f"pair {_pair(asked).name} could not be trained or its rounds not be recorded (exit code {code}, see above); "
            f"try it alone: python -m experiments.run experiment=record_rounds pair={_pair(asked).name} device={asked.device.name}"
        )
