"""A persistent walk, ready to launch: a loaded kernel, its packed weights and the state that outlives its launches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.admission import admit_head, admit_limits, admit_walk
from kernels.build import Kernel
from kernels.device import DeviceSpec
from kernels.driver import Function, LaunchShape
from kernels.heads.markov import MarkovHead
from kernels.params import Params
from kernels.placement import RANK
from kernels.walk import Draft, Head, Limits, NoiseRule, Resources, Unsupported, WalkInputs

MAX_STEPS = 32  # kMaxSteps of kernels/cuda/common/exchange.cuh
EXCHANGES = {"pair": "KeyCountPair", "mailboxes": "Mailboxes"}  # option -> template of exchange.cuh
_MAILBOX_WORDS = 2 * 33 * 160  # on up to 160 CTAs
_PAIR_WORDS = 2 * MAX_STEPS * 16  # of a request: two banks of a 128-byte line a step


@dataclass(frozen=True)
class Weights:
    """A head as a kernel reads it. row_scale is None for bf16 weights."""

    packed: Tensor
    latents: Tensor
    row_scale: Tensor | None


@dataclass(frozen=True)
class PersistentWalk:
    """One launch a walk. Owns the exchange's mailboxes and launch counter, so launches must follow one another on a stream.

    base_slots: steps of base logits that the kernel keeps in shared memory; requests: the most that the kernel exchanges for.
    """

    name: str
    head: Head
    limits: Limits
    weights: Weights
    function: Function
    resources: Resources
    clocks: Tensor | None
    base_slots: int
    requests: int = 1
    noise: NoiseRule = NoiseRule.GUMBEL
    mail: Tensor = field(init=False)
    launches: Tensor = field(init=False)

    def __post_init__(self) -> None:
        device = self.weights.packed.device
        object.__setattr__(self, "mail", torch.zeros(exchange_words(self.requests), dtype=torch.int64, device=device))
        object.__setattr__(self, "launches", torch.zeros(1, dtype=torch.int32, device=device))

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        """Enqueue the walk of the requests in `inputs`."""
        admit_walk(self.name, inputs, out, self.limits, self.head)
        weights, scale, clocks = self.weights, self.weights.row_scale, self.clocks
        logits = out.logits if self.limits.sampling else None
        self.function.launch(
            Params(
                weights=weights.packed.data_ptr(),
                row_scale=0 if scale is None else scale.data_ptr(),
                latents=weights.latents.data_ptr(),
                base=inputs.base_logits.data_ptr(),
                anchor=inputs.anchor.data_ptr(),
                temperature=inputs.temperature.data_ptr(),
                seed=inputs.seed.data_ptr(),
                logits=0 if logits is None else logits.data_ptr(),
                tokens=out.tokens.data_ptr(),
                mail=self.mail.data_ptr(),
                round=self.launches.data_ptr(),
                clocks=0 if clocks is None else clocks.data_ptr(),
                base_request_stride=inputs.base_logits.stride(0),
                base_step_stride=inputs.base_logits.stride(1),
                logits_request_stride=0 if logits is None else logits.stride(0),
                logits_step_stride=0 if logits is None else logits.stride(1),
                tokens_request_stride=out.tokens.stride(0),
                vocab=self.head.vocab,
                latent_vocab=self.head.vocab,  # W1 may have more rows; anchors are clamped into the vocabulary
                steps=inputs.steps,
                batch=inputs.batch,
                base_slots=min(self.base_slots, inputs.steps),
            )
        )

    def round(self) -> int:
        """The round of the next launch, see `kernels.walk.SampledWalk`."""
        return int(self.launches.item()) & 0xFFFFFFFF

    def step_stamps(self) -> Tensor:
        """[max_steps + 1, 2] int64 cycles and nanoseconds of CTA 0, see `kernels.walk.ClockedWalk`; needs the option clocks=true."""
        if self.clocks is None:
            raise ValueError(f"{self.name} was prepared without in-kernel clocks; pass backend.options.clocks=true.")
        return self.clocks


def exchange_words(requests: int) -> int:
    """8-byte words of the exchange's state, zero before the first launch."""
    return max(_MAILBOX_WORDS, _PAIR_WORDS * requests)


def admit(name: str, head: Head, limits: Limits, device: DeviceSpec, *, max_batch: int, sampling: bool) -> MarkovHead:
    """The head of a Hopper walk, or Unsupported with the backend that would serve it."""
    markov = admit_head(name, head, MarkovHead)
    admit_limits(name, limits, sampling=sampling)
    if limits.max_batch > max_batch:
        most = "one request" if max_batch == 1 else f"up to {max_batch} requests"
        raise Unsupported(f"{name} walks {most} at a time; got max_batch {limits.max_batch}; backend=sglang_folded serves any batch.")
    if limits.max_steps > MAX_STEPS:
        raise Unsupported(
            f"{name} walks up to {MAX_STEPS} steps a launch; got max_steps {limits.max_steps}; backend=sglang_folded serves any."
        )
    if markov.rank != RANK:
        raise Unsupported(f"{name} serves rank {RANK} only; got rank {markov.rank}; backend=sglang_folded serves every rank.")
    if device.arch != "sm_90a":
        raise Unsupported(f"{name} needs sm_90a; device={device.name} is {device.arch}; choose device=h100 or h200, or backend=reference.")
    return markov


def admit_exchange(exchange: str) -> None:
    """A ValueError where no exchange is called so."""
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange must be one of {', '.join(EXCHANGES)}; got {exchange!r}.")


def entry_source(
    header: str,
    entry: str,
    threads: int,
    shape: str,
    exchange: str | None = None,
    spin_limit: int = 0,
    params: str = "Params",
) -> str:
    """The one translation unit of a walk kernel: a template of `header` with its shape, behind an extern "C" entry."""
    guard = f"#define WTS_SPIN_LIMIT {spin_limit}\n" if spin_limit else ""
    arguments = shape if exchange is None else f"{shape}, wts::{EXCHANGES[exchange]}"
    return (
        f'{guard}#include "{header}"\n'
        f'extern "C" __global__ void __launch_bounds__({threads}, 1) {entry}(const __grid_constant__ wts::{params} p) {{\n'
        f"  wts::{entry}<{arguments}>(p);\n}}\n"
    )


def cpp(**fields: int | bool) -> str:
    """Designated initializers of a Shape: .tiles_rf = 6, .clocks = false."""
    return ", ".join(f".{name} = {str(value).lower()}" for name, value in fields.items())


def load(kernel: Kernel, shape: LaunchShape) -> Function:
    """The kernel on the GPU; Unsupported where there is none."""
    if not torch.cuda.is_available():
        raise Unsupported(
            f"running a {kernel.arch} kernel needs a CUDA GPU and this machine has none; send a plan to a GPU machine (make help)."
        )
    return Function(kernel, shape)
