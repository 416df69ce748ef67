"""What the tests of Hopper walks on a GPU share: the kinds of walks, heads and inputs drawn where they are used, the oracle's verdict."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from typing import Any, cast

import torch

from kernels.agreement import Agreement, check
from kernels.backends.pdl_chain import PdlChain, PdlChainOptions
from kernels.backends.resident_sm90 import TWICE, ResidentOptions, ResidentSm90
from kernels.backends.streaming_sm90 import StreamingOptions, StreamingSm90
from kernels.build import BuildError
from kernels.device import DeviceSpec, load
from kernels.heads.markov import MarkovHead
from kernels.persistent import PersistentWalk
from kernels.walk import Draft, Limits, Rounding, SampledWalk, Unsupported, WalkInputs

H200 = load("h200")
SPIN_LIMIT = 50_000_000  # polls; about ten seconds
TEMPERATURES = [1.0, 0.0, 0.6, torch.nan, 2.0, 1e-5, -1.0, 1e4]
_COMPILERS = min(16, os.cpu_count() or 1)  # processes: NVRTC compiles one kernel at a time in each


@dataclass(frozen=True)
class Arm:
    """A backend with options, prepared for limits."""

    backend: ResidentSm90 | StreamingSm90 | PdlChain
    limits: Limits

    @classmethod
    def resident(cls, batch: int = 1, sampling: bool = False, steps: int = 16, **options: Any) -> Arm:
        return cls(ResidentSm90(ResidentOptions(**options)), Limits(batch, steps, sampling))

    @classmethod
    def streaming(cls, **options: Any) -> Arm:
        return cls(StreamingSm90(StreamingOptions(**options)), Limits(1, 16))

    @classmethod
    def chain(cls, batch: int = 1, **options: Any) -> Arm:
        return cls(PdlChain(PdlChainOptions(**options)), Limits(batch, 16))

    @property
    def rounding(self) -> Rounding:
        return self.backend.rounding

    @property
    def temperatures(self) -> list[float]:
        """One a request of the largest batch; a sampling walk meets every kind."""
        return [TEMPERATURES[i % len(TEMPERATURES)] if self.limits.sampling else 0.0 for i in range(self.limits.max_batch)]

    def compile(self, vocab: int, device: DeviceSpec = H200) -> None:
        """The kernel into the cache. What cannot be is for its own test to say."""
        with suppress(Unsupported, BuildError):
            if isinstance(self.backend, StreamingSm90):
                self.backend.compile(self.backend.tiles(vocab, device), device)
            elif isinstance(self.backend, PdlChain):
                self.backend.compile(self.backend.place(vocab, self.limits.max_batch, device), device)
            else:
                self.backend.fit(vocab, 256, self.limits, device)

    def prepare(self, head: MarkovHead, device: DeviceSpec = H200) -> PersistentWalk:
        """A chain's walk only launches and tells its resources; what else a PersistentWalk has, it has not."""
        return cast(PersistentWalk, self.backend.prepare(head, self.limits, device))

    def agreement(self, walk: PersistentWalk, head: MarkovHead, inputs: WalkInputs, draft: Draft, round: int) -> Agreement:
        """The oracle's verdict on the launch of this round."""
        return check(draft.tokens, head, inputs, self.rounding, noise=walk.noise if self.limits.sampling else None, round=round)

    def launched(self, walk: PersistentWalk, head: MarkovHead, inputs: WalkInputs) -> Agreement:
        """One launch and its verdict."""
        round, draft = round_of(walk), Draft.like(inputs)
        walk.launch(inputs, draft)
        torch.cuda.synchronize()
        return self.agreement(walk, head, inputs, draft, round)

    def assert_right(self, walk: PersistentWalk, head: MarkovHead, inputs: WalkInputs) -> None:
        agreement = self.launched(walk, head, inputs)
        assert agreement.ok, agreement.reason

    def __str__(self) -> str:
        options, plain = self.backend.options, type(self.backend.options)()
        chosen = [f"{name}={value}" for name, value in vars(options).items() if value != getattr(plain, name)]
        return "-".join([self.backend.name, f"b{self.limits.max_batch}", "sampled" if self.limits.sampling else "greedy", *chosen])


ONE_REQUEST = [
    Arm.resident(),
    Arm.resident(sampling=True),
    Arm.resident(rf_tiles=5, exchange="mailboxes"),
    Arm.resident(weights="bf16"),
    Arm.streaming(weights="int8"),
    Arm.streaming(weights="int8", exchange="mailboxes"),
    Arm.streaming(weights="bf16"),
    Arm.chain(),
    Arm.chain(weights="bf16"),
    Arm.chain(chained=False),
]
# A walk of every kind, at batches that leave lanes, column blocks, copies and halves partly empty.
FAMILIES = [
    *ONE_REQUEST,
    Arm.resident(3),
    Arm.resident(3, sampling=True),
    Arm.resident(3, sampling=True, weights="bf16"),
    Arm.chain(2, early=False),
    Arm.chain(2, weights="bf16", warps=8),
    Arm.chain(3, stages=1),
    Arm.chain(4, weights="bf16"),
    Arm.resident(6),
    Arm.resident(7, sampling=True),
    Arm.resident(13),
    Arm.resident(13, sampling=True),
    Arm.resident(17),
    Arm.resident(20, sampling=True),
    Arm.resident(50),
    Arm.resident(61, sampling=True),
]

# The plain walk of one request with a part of every step done twice.
STAGES = [Arm.resident(twice=stage) for stage in TWICE if stage != "none"]


def round_of(walk: PersistentWalk) -> int:
    """The round of the next launch; 0 of a walk that counts none, since it never draws."""
    return walk.round() if isinstance(walk, SampledWalk) else 0


def compile_all(cases: Iterable[tuple[Arm, int, DeviceSpec]]) -> None:
    """Many kernels into the cache at once: a test alone would wait for each."""
    with ProcessPoolExecutor(_COMPILERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, cases))


def _compile(case: tuple[Arm, int, DeviceSpec]) -> None:
    arm, vocab, device = case
    arm.compile(vocab, device)


@cache
def head_on_gpu(vocab: int) -> MarkovHead:
    """One synthetic head a vocabulary."""
    generator = torch.Generator("cuda").manual_seed(vocab)
    w1, w2 = (torch.randn(vocab, 256, generator=generator, device="cuda").mul_(std).bfloat16() for std in (1.0, 0.05))
    return MarkovHead(w1, w2)


def inputs_on_gpu(vocab: int, steps: int, temperatures: Sequence[float] = (0.0,), seed: int = 0) -> WalkInputs:
    """A request for each temperature."""
    generator, batch = torch.Generator("cuda").manual_seed(seed), len(temperatures)
    base = torch.randn(batch, steps, vocab, generator=generator, device="cuda", dtype=torch.bfloat16).mul_(2)
    anchor = torch.randint(vocab, (batch,), generator=generator, device="cuda")
    keys = torch.randint(-(2**62), 2**62, (batch,), generator=generator, device="cuda")
    return WalkInputs(base, anchor, torch.tensor(temperatures, dtype=torch.float32, device="cuda"), keys)


def first_of(inputs: WalkInputs, batch: int, steps: int) -> WalkInputs:
    """Some requests and steps; strides stay."""
    return WalkInputs(inputs.base_logits[:batch, :steps], inputs.anchor[:batch], inputs.temperature[:batch], inputs.seed[:batch])
