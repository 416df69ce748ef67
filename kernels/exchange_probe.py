"""What agreeing on one token costs: a persistent kernel that does nothing but exchange, under any of several protocols, and its winners on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from kernels.agreement import Agreement
from kernels.build import Kernel, build
from kernels.device import DeviceSpec
from kernels.driver import LaunchShape
from kernels.persistent import load
from kernels.walk import Resources, Unsupported

MAX_STEPS = 32  # kMaxSteps of common/exchange.cuh
ROWS = 1024  # kProbeRows of probes/exchange_probe.cuh: a token is cta * ROWS + row
THREADS = 256  # kProbeThreads
WORDS = 1 << 14  # 8-byte words of state: the largest protocol's on up to 256 CTAs
_ENTRY = "exchange_probe"
_DIGEST = 0x811C9DC5  # kProbeDigest
_PAIR = "a 16-byte load that sees both words at one moment, and one thread's two reductions on one sector performed in order"


@dataclass(frozen=True)
class ExchangeProtocol:
    """A way to agree.

    template: the C++ class; {ctas} becomes the most CTAs it must serve
    what:     what it is, in a few words
    leans_on: what it needs and the PTX memory model does not promise; empty if it needs nothing of the kind
    cluster:  CTAs in a cluster
    """

    template: str
    what: str
    leans_on: str = ""
    cluster: int = 1

    @property
    def promised(self) -> bool:
        """Whether the PTX memory model promises that it works."""
        return not self.leans_on


PROTOCOLS: Mapping[str, ExchangeProtocol] = MappingProxyType(
    {
        "pair": ExchangeProtocol("KeyCountPair<{ctas}>", "key and count side by side, relaxed reductions, one 16-byte poll", _PAIR),
        "pair_acquire": ExchangeProtocol("AcquirePair<{ctas}>", "the pair with a released and acquired count; the key is read after it"),
        "striped_2": ExchangeProtocol("StripedPair<{ctas}, 2>", "the pair split over 2 lines", _PAIR),
        "striped_4": ExchangeProtocol("StripedPair<{ctas}, 4>", "the pair split over 4 lines", _PAIR),
        "striped_8": ExchangeProtocol("StripedPair<{ctas}, 8>", "the pair split over 8 lines", _PAIR),
        "cluster_2": ExchangeProtocol("ClusterPair<{ctas}, 2>", "clusters of 2 through shared memory, their leaders by the pair", _PAIR, 2),
        "cluster_4": ExchangeProtocol("ClusterPair<{ctas}, 4>", "clusters of 4 through shared memory, their leaders by the pair", _PAIR, 4),
        "cluster_8": ExchangeProtocol("ClusterPair<{ctas}, 8>", "clusters of 8 through shared memory, their leaders by the pair", _PAIR, 8),
        "mailboxes": ExchangeProtocol("Mailboxes<{ctas}>", "8-byte words tagged with round and step, 33 copies of 2 boxes"),
        "grid_sync": ExchangeProtocol("GridSync<{ctas}>", "an atomic max, cooperative_groups' grid.sync(), a load"),
    }
)


class _Params(ctypes.Structure):
    """See exchange_probe.cuh for the meaning of each field; pointers are device addresses."""

    _fields_ = (
        ("anchor", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("digests", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        ("round", ctypes.c_void_p),
        ("clocks", ctypes.c_void_p),
        ("steps", ctypes.c_int32),
        ("padding", ctypes.c_int32),
    )


assert ctypes.sizeof(_Params) == 56, "probes/exchange_probe.cuh mirrors this struct"


def compile_probe(protocol: str, device: DeviceSpec, spin_limit: int = 0) -> Kernel:
    """The kernel of a protocol; needs no GPU. spin_limit: polls after which a waiting CTA traps, 0 waits for ever (grid.sync always does)."""
    guard = f"#define WTS_SPIN_LIMIT {spin_limit}\n" if spin_limit else ""
    source = (
        f'{guard}#include "probes/exchange_probe.cuh"\n'
        f'extern "C" __global__ void __launch_bounds__(wts::kProbeThreads, 1) {_ENTRY}(const __grid_constant__ wts::ExchangeProbeParams p) {{\n'
        f"  wts::exchange_probe<wts::{PROTOCOLS[protocol].template.format(ctas=device.sms)}>(p);\n}}\n"
    )
    return build(source, _ENTRY, device.arch, allow_spills=spin_limit > 0)


class ExchangeProbe:
    """The probe of one protocol on `ctas` CTAs, one on each SM as in a walk. Owns the protocol's state, so launches must follow one another.

    Raises:
        Unsupported: no CUDA GPU, or a grid that cannot be resident at once.
        BuildError: the kernel does not compile.
    """

    def __init__(self, protocol: str, ctas: int, device: DeviceSpec, spin_limit: int = 0) -> None:
        if not device.is_cuda:
            raise Unsupported(
                f"protocol {protocol} exchanges between the SMs of a CUDA GPU; device={device.name} is none; choose device=h200."
            )
        smem_bytes = device.smem_bytes_per_sm // 2  # two CTAs and what the system keeps of each do not fit into one SM
        kernel = compile_probe(protocol, device, spin_limit)
        self.ctas = ctas
        self.resources = Resources(
            registers=kernel.registers,
            spill_bytes=kernel.spill_bytes,
            smem_bytes=smem_bytes + kernel.static_smem_bytes,
            ctas=ctas,
            cubin_sha256=kernel.cubin_sha256,
            source_sha256=kernel.source_sha256,
        )
        shape = LaunchShape(ctas, THREADS, smem_bytes, cooperative=True, cluster=PROTOCOLS[protocol].cluster)
        self._function = load(kernel, shape)
        self._words = torch.zeros(WORDS, dtype=torch.int64, device="cuda")
        self._round = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._clocks = torch.zeros(2, 2, dtype=torch.int64, device="cuda")

    def launch(self, anchor: Tensor, heard: Tensor) -> None:
        """Enqueue one probe on the current stream.

        Args:
            anchor: [1] int64, what the first keys depend on.
            heard: [steps + ctas] int64, gets the winner of every step as CTA 0 heard it, then a digest of what each CTA heard.
        """
        steps = heard.numel() - self.ctas
        if not 1 <= steps <= MAX_STEPS:
            raise ValueError(f"a probe makes 1 to {MAX_STEPS} steps; `heard` has room for {steps} beside {self.ctas} digests.")
        self._function.launch(
            _Params(
                anchor=anchor.data_ptr(),
                tokens=heard.data_ptr(),
                digests=heard[steps:].data_ptr(),
                words=self._words.data_ptr(),
                round=self._round.data_ptr(),
                clocks=self._clocks.data_ptr(),
                steps=steps,
            )
        )

    def stamps(self) -> tuple[int, int]:
        """SM cycles and nanoseconds between the first and the last winner of the last launch, in CTA 0; waits for it."""
        cycles, nanoseconds = self._clocks.cpu().diff(dim=0)[0].tolist()
        return cycles, nanoseconds


def probe_key(previous: int, step: int, cta: int) -> int:
    """The key of a CTA after token `previous`, as the kernel makes it."""
    salt = step * 0x85EBCA77 + cta * 0xC2B2AE3D
    mixed = (((previous * 0x9E3779B1) ^ salt) * 0x27D4EB2F) & 0xFFFFFFFF
    return (mixed >> 24) + 1 << 16 | (0xFFFF - (mixed >> 8 & ROWS - 1))


def winners(anchor: int, ctas: int, steps: int) -> list[int]:
    """The token of every step: the largest order, of equal ones the lowest CTA."""
    tokens, previous = [], anchor
    for step in range(steps):
        keys = [probe_key(previous, step, cta) for cta in range(ctas)]
        best = max(range(ctas), key=lambda cta: (keys[cta] >> 16, -cta))
        previous = best * ROWS + 0xFFFF - (keys[best] & 0xFFFF)
        tokens.append(previous)
    return tokens


def digest(tokens: list[int]) -> int:
    """FNV-1a over whole tokens, 32 bits: what every CTA keeps of what it heard."""
    value = _DIGEST
    for token in tokens:
        value = (value ^ token) * 0x01000193 & 0xFFFFFFFF
    return value


def expected(anchor: int, ctas: int, steps: int) -> Tensor:
    """[steps + ctas] int64: what a right launch writes into `heard`."""
    tokens = winners(anchor, ctas, steps)
    return torch.tensor([*tokens, *[digest(tokens)] * ctas], dtype=torch.int64)


def check(heard: Tensor, anchor: int, ctas: int) -> Agreement:
    """Whether every CTA heard the right winner at every step."""
    steps = heard.numel() - ctas
    right = expected(anchor, ctas, steps)
    wrong = (heard.cpu() != right).nonzero().flatten().tolist()
    if not wrong:
        return Agreement(steps, mismatches=0, near_ties=0, worst_gap=0.0)
    first = wrong[0]
    got, want = int(heard[first]), int(right[first])
    if first < steps:
        reason = f"step {first}: CTA 0 heard token {got} but the winner is {want}."
    else:
        reason = f"CTA {first - steps} heard other tokens than CTA 0, whose tokens are right (digest {got}, not {want})."
    return Agreement(steps, len(wrong), near_ties=0, worst_gap=0.0, reason=reason)
