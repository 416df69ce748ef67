"""The walks of a config: one head, its input sets, the oracle's answers, and arms prepared for the walks that they will run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from experiments.convert import ConfigError, convert
from experiments.examiner import Approximate, Examiner, Oracle, Repeatable, Repeating, Unrepeatable
from experiments.floor import memory_floor_us
from experiments.inputs import source_of
from experiments.outcome import Row
from experiments.schema import GREEDY, Config, Variant
from experiments.stopwatch import L2, CpuStopwatch, Stopwatch
from experiments.subject import Subject
from kernels import registry
from kernels.agreement import Agreement, check
from kernels.device import CONFIGS, DeviceSpec, check_live, load
from kernels.reference import Approximation, ReferenceHead, walk
from kernels.walk import (
    Backend,
    Draft,
    Limits,
    NanRule,
    NoiseRule,
    PreparedWalk,
    Rounding,
    SampledWalk,
    TalliedWalk,
    Unsupported,
    WalkInputs,
)

_REFUSED = 99  # sets beyond those asked for that may have the answer of the one before
_LIKELY = 1e-6  # among many sets are some whose tokens a drafter is sure of: draws of them come again, those less likely than this do not


@dataclass(frozen=True)
class Arm:
    """A prepared backend under its label."""

    label: str
    backend: Backend
    prepared: PreparedWalk


class Workload:
    """Everything that the subjects of one process share. Walks of `least_steps` to `max_steps` and up to `batch` requests read prefixes of the same
    inputs: `sets` has two of them, or as many as are asked for and are there, each with another answer than the one before.

    Raises:
        Unsupported: the device of the config is not here, or the head does not fit this machine.
    """

    def __init__(self, config: Config, max_steps: int, batch: int, sets: int = 2, least_steps: int = 1) -> None:
        self.config, self.limits = config, Limits(max_batch=batch, max_steps=max_steps)
        device = check_live(config.device)
        _assert_fits(config, self.limits, sets)
        source = source_of(config, self.limits, device)
        self.head = source.head
        self._oracle: dict[tuple[int, ReferenceHead, Rounding, NanRule], Tensor] = {}
        self.sets = tuple(self._different(source.sets, sets, least_steps))
        self._staged: WeakValueDictionary[tuple[int, int, float], WalkInputs] = WeakValueDictionary()  # as long as a subject reads them

    def prepare(self, label: str, backend: str, options: Mapping[str, Any], limits: Limits | None = None) -> Arm:
        """Everything that this backend pays once per model load. `limits` are the workload's own, greedy, where none are given.

        Raises:
            Unsupported: the backend cannot serve this head, limit or device.
        """
        made = create(backend, options)
        assert_arch(made, self.config.device)
        return Arm(label, made, made.prepare(self.head, limits or self.limits, self.config.device))

    def subject(self, arm: Arm, steps: int, batch: int | None = None, temperature: float = GREEDY) -> Subject:
        """One walk of `steps` of an arm, with the workload's whole batch or its first `batch` requests, on input tensors that all arms share.

        With temperature > 0 the draft has the corrected logits too, which a verifier needs; an approximate walk keeps scores of its own.
        """
        inputs = self._stage(steps, batch or self.limits.max_batch, temperature)
        draft = Draft.like(inputs, logits=temperature > 0 and not isinstance(arm.backend, Approximation))
        read, written = inputs.base_logits.nbytes, draft.logits.nbytes if draft.logits is not None else 0
        device, resources = self.config.device, arm.prepared.resources
        return Subject(
            cell=cell_columns(self.config, arm.label, arm.backend.name, steps, inputs.batch, temperature),
            launch=lambda: arm.prepared.launch(inputs, draft),
            load=lambda which: self._load(which, inputs),
            examiner=self._examiner(arm, inputs),
            draft=draft,
            floor_us={l2: memory_floor_us(resources, steps, read, device, l2, written) for l2 in L2},
            rounding=str(arm.backend.rounding),
            tally=arm.prepared.tally if isinstance(arm.prepared, TalliedWalk) else None,
        )

    def verify(self, backend: Backend, which: int, tokens: Tensor) -> Agreement:
        """Whether greedy `tokens` [batch, steps] are right for set `which`. The oracle's own tokens, walked once, answer the usual case."""
        head, rounding = self._promise(backend)
        key = which, head, rounding, backend.nan_rule
        if key not in self._oracle:
            self._oracle[key] = walk(head, self.sets[which], rounding, backend.nan_rule).tokens.cpu()
        batch, steps = tokens.shape
        if torch.equal(tokens.cpu(), self._oracle[key][:batch, :steps]):
            return Agreement(tokens.numel(), mismatches=0, near_ties=0, worst_gap=0.0)
        inputs = _prefix(self.sets[which], steps, batch)
        return check(tokens.to(head.device), head, inputs, rounding, backend.nan_rule)

    def _promise(self, backend: Backend) -> tuple[ReferenceHead, Rounding]:
        """The head and the rounding whose walk this backend's tokens must be."""
        if isinstance(backend, Approximation):
            return backend.restricted(self.head), backend.within
        return self.head, backend.rounding

    def _examiner(self, arm: Arm, inputs: WalkInputs) -> Examiner:
        """Who judges this arm's drafts of walks like `inputs`: by whether they sample, whether the host can repeat their draws, and whether
        they are exact."""
        temperature, backend, prepared = inputs.temperature, arm.backend, arm.prepared
        approximate, sampled = isinstance(backend, Approximation), bool((temperature > 0).any())
        head, rounding = self._promise(backend)

        def asked(which: int) -> WalkInputs:
            return replace(_prefix(self.sets[which], inputs.steps, inputs.batch), temperature=temperature)

        oracle = Oracle(head, rounding, backend.nan_rule, asked)
        if not sampled:
            judge: Examiner = Repeating(lambda which, tokens: self.verify(backend, which, tokens))
        elif isinstance(prepared, SampledWalk) and prepared.noise is not NoiseRule.LIBRARY:
            judge = Repeatable(oracle, prepared, logits=not approximate)
        else:
            judge = Unrepeatable(oracle, chance=_LIKELY if len(self.sets) > 2 else 1.0)
        if not approximate:
            return judge

        def exact(which: int, tokens: Tensor) -> Tensor:
            drawn = (prepared.noise, prepared.round() - 1) if sampled and isinstance(prepared, SampledWalk) else (None, 0)
            teacher = tokens.to(self.head.device)
            return walk(self.head, asked(which), rounding, backend.nan_rule, teacher, noise=drawn[0], round=drawn[1]).tokens

        return Approximate(judge, exact)

    def _different(self, drawn: Iterable[WalkInputs], count: int, steps: int) -> list[WalkInputs]:
        """Up to `count` sets; the first `steps` tokens of each differ from those of the one before, so that an answer to one is wrong for the next at any
        such length and any batch."""
        kept: list[WalkInputs] = []
        last = torch.empty(0, dtype=torch.int64, device=self.head.device)
        for given in islice(drawn, count + _REFUSED):
            tokens = walk(self.head, _prefix(given, steps, 1), Rounding.TWICE).tokens
            if not torch.equal(tokens, last):
                kept.append(given)
                last = tokens
            if len(kept) == count:
                return kept
        if len(kept) > 1:
            return kept
        raise ConfigError(
            f"inputs: all sets of {self.config.head.name} give the same first token, {int(last[0, 0])}; "
            f"a head of vocab {self.head.vocab} can not be checked with them"
        )

    def _stage(self, steps: int, batch: int, temperature: float) -> WalkInputs:
        """The fixed input tensors that every arm reads at this length, batch and temperature."""
        staged = self._staged.get((steps, batch, temperature))
        if staged is None:
            source = _prefix(self.sets[0], steps, batch)
            tensors = {name: getattr(source, name).clone() for name in ("base_logits", "anchor", "temperature", "seed")}
            staged = self._staged[steps, batch, temperature] = WalkInputs(**tensors)
            staged.temperature.fill_(temperature)
        return staged

    def _load(self, which: int, inputs: WalkInputs) -> None:
        source = _prefix(self.sets[which], inputs.steps, inputs.batch)
        inputs.base_logits.copy_(source.base_logits)
        inputs.anchor.copy_(source.anchor)


def stopwatch_for(device: DeviceSpec) -> Stopwatch:
    """The stopwatch of this kind of device."""
    if not device.is_cuda:
        return CpuStopwatch()
    from experiments.cuda_stopwatch import CudaStopwatch

    return CudaStopwatch(device)


def cell_columns(config: Config, label: str, backend: str, steps: int, batch: int, temperature: float = GREEDY) -> Row:
    """What names a cell, also where it could not even be prepared."""
    return {
        "device": config.device.name,
        "head": config.head.name,
        "backend": backend,
        "variant": label,
        "vocab": config.head.vocab,
        "rank": config.head.rank,
        "steps": steps,
        "batch": batch,
        "temperature": temperature,
        "inputs": config.inputs.family,
    }


def create(backend: str, options: Mapping[str, Any], key: str = "backend.options") -> Backend:
    """The backend with its options; `key` is where these stand in the config.

    Raises:
        ConfigError: no such backend or option, an option of a wrong type, or a value that the backend refuses.
    """
    try:
        found = registry.get(backend)
        return found(convert(found.Options, options, key))
    except ConfigError:
        raise
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"backend: {error.args[0]}") from error


def assert_variants(variants: Sequence[Variant]) -> None:
    """A typo in any arm of a comparison is told once, before anything is measured.

    Raises:
        ConfigError: as `create`.
    """
    for place, variant in enumerate(variants):
        create(variant.backend, variant.options, f"experiment.variants[{place}].options")


def assert_arch(backend: Backend, device: DeviceSpec) -> None:
    """Raises:
    Unsupported: the backend does not run on this kind of device.
    """
    if not _runs_on(backend, device):
        right = [name for name in sorted(path.stem for path in CONFIGS.glob("*.yaml")) if _runs_on(backend, load(name))]
        raise Unsupported(
            f"backend={backend.name} runs on {', '.join(backend.archs)}; device={device.name} is {device.arch}; "
            f"choose device={' or '.join(right)} on such a machine, or backend=reference, which runs on any."
        )


def _runs_on(backend: Backend, device: DeviceSpec) -> bool:
    kinds = {device.arch, "cuda"} if device.is_cuda else {device.arch}
    return bool(kinds & set(backend.archs))


def _prefix(inputs: WalkInputs, steps: int, batch: int) -> WalkInputs:
    """The first `steps` of the first `batch` requests; requests do not depend on one another."""
    requests = {name: getattr(inputs, name)[:batch] for name in ("anchor", "temperature", "seed")}
    return WalkInputs(inputs.base_logits[:batch, :steps], **requests)


def _assert_fits(config: Config, limits: Limits, sets: int) -> None:
    """W1 and W2 in bf16, one of them in fp32 while it is drawn on the host, and bf16 base logits: all sets and a copy."""
    head = config.head
    weights = head.vocab * head.rank * (2 * 2 + 4)
    logits = (sets + 1) * 2 * limits.max_batch * limits.max_steps * head.vocab
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    have = min(have, config.device.hbm_bytes) if config.device.is_cuda else have
    if weights + logits > have:
        raise Unsupported(
            f"head={head.name} with vocab {head.vocab} and rank {head.rank} needs {weights / 1e9:.1f} GB to build, its base logits at batch "
            f"{limits.max_batch} and up to {limits.max_steps} steps {logits / 1e9:.1f} GB, and this machine has {have / 1e9:.1f} GB; "
            f"choose a smaller {'experiment.sets, ' if sets > 2 else ''}head.vocab, head.rank, experiment.batch or experiment.steps."
        )
