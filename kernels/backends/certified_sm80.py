"""The certified walk: a few hundred rows of W2 prove a step's token, for all steps at once, and the serial chain is a look-up a step.

Theorem and proof: `kernels.certificate`; the kernels: kernels/cuda/walk_certified.cuh, of many requests walk_certified_stepwise.cuh. Tokens are those
of rule TWICE in bf16, as an engine's own walk gives them, whatever the head or the inputs: a step that is not proved is searched. How long that takes
depends on the data.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kernels.admission import admit_head, admit_limits, admit_walk
from kernels.bias_lists import KernelLists, kernel_lists
from kernels.build import Kernel, build
from kernels.device import DeviceSpec
from kernels.driver import Function, LaunchShape
from kernels.heads.markov import MarkovHead
from kernels.params import Params
from kernels.persistent import cpp, entry_source, load
from kernels.registry import register
from kernels.settled_logits import SettledLogits
from kernels.walk import Draft, Head, Limits, NanRule, NoiseRule, Resources, Rounding, Unsupported, WalkInputs

_TABLED, _STEPWISE = "walk_certified", "walk_certified_stepwise"  # entries, and headers
_RANK, _MAX_STEPS, _MAX_BATCH, _MAX_VOCAB = 256, 32, 64, 1 << 18
_SLICE_ROWS, _LATENT_BYTES = 256, 576  # for each vector
_MAIL_BYTES, _ARRIVED_WORDS = 640, 8
_SEARCH_BYTES = 256  # of a warp
_SLICE_WORDS = 16  # that a slice leaves: 15 rows and what bounds the others
_MOST_VECTORS, _WARPS, _STEPWISE_WARPS = 8, 16, 32
_PICKING, _KEPT = 8, 3  # of the stepwise walk: warps of a CTA that pick; steps
_STEPWISE_VECTORS = 7  # of 64 requests of 7 steps: 69.7 us; 8 72.6, 6 with two slices under way 74.2 (tried)
_FEW_ROWS = 200_000  # of a vocabulary. On flat logits of 248,320 a walk of 15 steps took 27 us with 256 candidates and 43 with 128 (tried)
# Requests. With tables 4 of 7 steps take 31 us and 6 35, of 16 steps 4 take 49 and 8 85; without 32, 32, 60 and 66 (tried).
_MOST_TABLED = 4
PHASES = (
    "begun",
    "known",
    "offered",
    "awaited",
    "picked",
    "gathered",
    "multiplied",
    "weighed",
    "tabled",
    "fetched",
    "walked",
)  # Phase of certified/params.cuh
_SLICES = 76  # of a step, about: more are more to pick from, fewer are longer to look through


class CertifiedParams(ctypes.Structure):
    """See certified/params.cuh."""

    _fields_ = (
        ("walk", Params),
        ("list_rows", ctypes.c_void_p),
        ("list_biases", ctypes.c_void_p),
        ("list_bound", ctypes.c_void_p),
        ("offered", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("tally", ctypes.c_void_p),
        ("requests", ctypes.c_int32),
        ("padding", ctypes.c_int32),
    )


assert ctypes.sizeof(CertifiedParams) == 224, "certified/params.cuh mirrors this struct"


@dataclass(frozen=True)
class CertifiedOptions:
    """candidates: of a step, by base logits, 128 or 256; None takes 128 for up to 200,000 rows. 256 are twice as much of W2 to gather, 2 us of 22,
                and prove more
    previous:   the best of them, for which the next step's winner is in the table; None takes 128 for up to 32 (request, step) pairs, else 64
    listed:     rows of every token's list, by bias; None takes 128 with tables and 512 without, where a step reads one list: of 896 steps of trained rounds 9
                are not proved with 128, 3 with 256 and none with 512 (computed). Lists of 512 take 467 MB at V = 151,936
    tables:     what follows every candidate is weighed beforehand; without, a CTA a request follows its token, step by step. None takes tables for up
                to four requests
    vectors:    16-byte loads of a lane, so 256 times that many rows are a slice; None makes about 76 slices of a step, as far as they fit
    wanted:     of 32 lanes' best rows those that a slice offers, with what else reaches them
    clocks:     stamp when two CTAs come to the end of each of PHASES
    spin_limit: polls after which a wait gives up and says so, for tests; 0 waits for ever. May spill
    """

    candidates: int | None = None
    previous: int | None = None
    listed: int | None = None
    tables: bool | None = None
    vectors: int | None = None
    wanted: int = 8
    clocks: bool = False
    spin_limit: int = 0

    def __post_init__(self) -> None:
        for name, known in (
            ("candidates", (None, 128, 256)),
            ("previous", (None, 32, 64, 128, 256)),
            ("listed", (None, 32, 64, 128, 256, 512)),
        ):
            if getattr(self, name) not in known:
                words = ", ".join(str(each) for each in known if each)
                raise ValueError(f"certified_sm80 has {name} of {words}; got {getattr(self, name)}.")
        for name, highest in (("vectors", _MOST_VECTORS), ("wanted", _SLICE_WORDS - 1)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= highest:
                raise ValueError(f"certified_sm80 has {name} from 1 to {highest}; got {value}.")


@dataclass(frozen=True)
class CertifiedLayout:
    """See CertifiedShape of certified/params.cuh. parts: CTAs that share a step's table; team: CTAs of a request."""

    sampling: bool
    ctas: int
    warps: int
    slices: int
    vectors: int
    buffers: int
    wanted: int
    candidates: int
    previous: int
    block: int
    tables: bool
    parts: int
    extras: int
    team: int
    listed: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA: struct Smem of the kernel, which checks it."""
        offers = 512 * self.vectors * self.buffers + 4 * _SLICE_WORDS
        if self.tables:
            sets = 2 * (8 * self.candidates + 40)
            weigh = self.block * (_LATENT_BYTES + 6 * self.listed + self.candidates // 2 + 8) + 8 * self.candidates
            table = 4 * _MAX_STEPS * self.previous
            needed = self.warps * (offers + _SEARCH_BYTES) + sets + weigh + table + 768
        else:
            multiplying = self.candidates // 16
            leading = 1 + multiplying + _PICKING
            rows = max(2 * _RANK * self.candidates, leading * offers)
            steps = _KEPT * (16 * self.candidates + 128)
            needed = rows + (self.warps - leading) * offers + steps + 6 * self.listed + multiplying * _SEARCH_BYTES + 1024
        return -(-needed // 128) * 128


@register
class CertifiedSm80:
    """Greedy and sampling (rule GUMBEL), up to 64 requests, rank 256, any CUDA GPU from Ampere on. For sm_80 and sm_100a it is compiled and
    *not run on this hardware*. See the module's text."""

    name: ClassVar[str] = "certified_sm80"
    archs: ClassVar[tuple[str, ...]] = ("sm_80", "sm_90a", "sm_100a")
    nan_rule: ClassVar[NanRule] = NanRule.LOSES
    rounding: ClassVar[Rounding] = Rounding.TWICE
    Options: ClassVar[type[CertifiedOptions]] = CertifiedOptions

    def __init__(self, options: CertifiedOptions) -> None:
        self.options = options

    def place(self, vocab: int, limits: Limits, device: DeviceSpec) -> CertifiedLayout:
        """With tables, for up to 32 (request, step) pairs many CTAs a table, else many tables a CTA; without, a CTA a request."""
        options, pairs = self.options, limits.max_batch * limits.max_steps
        few = pairs <= 32
        candidates = options.candidates or (128 if vocab <= _FEW_ROWS else 256)
        tables = limits.max_batch <= _MOST_TABLED if options.tables is None else options.tables
        ctas = device.sms
        if ctas < limits.max_batch:
            raise Unsupported(
                f"{self.name}: {limits.max_batch} requests need a CTA each and {device.name} has {ctas} SMs; ask for fewer requests."
            )
        previous = min(candidates, options.previous or (128 if few else 64)) if tables else candidates
        block = 16 if few or not tables else 32
        parts = max(1, min(ctas // pairs, previous // block)) if tables else 1
        while previous % (parts * block):
            parts -= 1
        most = options.vectors or min(_MOST_VECTORS if tables else _STEPWISE_VECTORS, -(-vocab // (_SLICE_ROWS * _SLICES)))
        layouts = [
            CertifiedLayout(
                sampling=limits.sampling,
                ctas=ctas,
                warps=_WARPS if tables else _STEPWISE_WARPS,
                slices=-(-vocab // (_SLICE_ROWS * vectors)),
                vectors=vectors,
                buffers=2 if tables and not few else 1,
                wanted=options.wanted,
                candidates=candidates,
                previous=previous,
                block=block,
                tables=tables,
                parts=parts,
                extras=32,
                team=ctas // limits.max_batch if tables else 1,
                listed=options.listed or (128 if tables else 512),
            )
            for vectors in range(most, 0 if options.vectors is None else most - 1, -1)
        ]
        fitting = [layout for layout in layouts if layout.smem_bytes <= device.smem_bytes_per_cta]
        if not fitting:
            layout = layouts[-1]
            raise Unsupported(
                f"{self.name}: slices of {layout.vectors} vectors, {layout.candidates} candidates, {layout.previous} previous tokens and lists of "
                f"{layout.listed} need {layout.smem_bytes:,} bytes of shared memory a CTA and {device.name} has "
                f"{device.smem_bytes_per_cta:,}; ask for fewer of them."
            )
        return fitting[0]

    def compile(self, layout: CertifiedLayout, device: DeviceSpec) -> Kernel:
        """Needs no GPU."""
        fields = cpp(
            warps=layout.warps,
            sampling=layout.sampling,
            slices=layout.slices,
            vectors=layout.vectors,
            buffers=layout.buffers,
            wanted=layout.wanted,
            candidates=layout.candidates,
            previous=layout.previous,
            block=layout.block,
            parts=layout.parts,
            extras=layout.extras,
            team=layout.team,
            list=layout.listed,
            smem_bytes=layout.smem_bytes,
            clocks=self.options.clocks,
        )
        shape = f"wts::CertifiedShape{{{fields}}}"
        entry = _TABLED if layout.tables else _STEPWISE
        source = entry_source(
            f"{entry}.cuh",
            entry,
            layout.threads,
            shape,
            spin_limit=self.options.spin_limit,
            params="CertifiedParams",
        )
        return build(source, entry, device.arch, allow_spills=self.options.spin_limit > 0)

    def prepare(self, head: Head, limits: Limits, device: DeviceSpec) -> CertifiedWalk:
        markov = _admit(head, limits, device)
        layout = self.place(markov.vocab, limits, device)
        kernel = self.compile(layout, device)
        function = load(kernel, LaunchShape(layout.ctas, layout.threads, layout.smem_bytes, cooperative=True))
        lists = kernel_lists(markov, layout.listed)
        resources = Resources(
            registers=kernel.registers,
            spill_bytes=kernel.spill_bytes,
            smem_bytes=layout.smem_bytes + kernel.static_smem_bytes,
            ctas=layout.ctas,
            cubin_sha256=kernel.cubin_sha256,
            source_sha256=kernel.source_sha256,
        )
        logits = SettledLogits.prepare(limits.max_batch * limits.max_steps, device) if limits.sampling else None
        return CertifiedWalk(markov, limits, layout, lists, function, resources, logits)


@dataclass(frozen=True)
class CertifiedWalk:
    """One launch a walk, and one more where logits are wanted. Owns what CTAs leave for one another, so launches must follow one another on a stream.

    clocks: [2 * len(PHASES)] int64 cycles of the second and the last CTA, with the option clocks=true
    tally: [max_batch, 2] int64, of all launches: steps that the table did not settle (without tables: that were searched), and those of them that had to
           be searched
    """

    head: MarkovHead
    limits: Limits
    layout: CertifiedLayout
    lists: KernelLists
    function: Function
    resources: Resources
    logits_pass: SettledLogits | None = None
    noise: NoiseRule = NoiseRule.GUMBEL
    tally: Tensor = field(init=False)
    clocks: Tensor = field(init=False)
    _scratch: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        layout, pairs, device = self.layout, self.limits.max_batch * self.limits.max_steps, self.head.device
        made = {
            "mail": torch.zeros(_ARRIVED_WORDS + 2 * self.limits.max_batch * _MAIL_BYTES // 8, dtype=torch.int64, device=device),
            "round": torch.zeros(1, dtype=torch.int32, device=device),
            "offered": torch.zeros(pairs * layout.slices * _SLICE_WORDS, dtype=torch.int64, device=device),
            "table": torch.zeros(pairs * layout.previous, dtype=torch.int64, device=device),
            "extra": torch.zeros(pairs * layout.extras, dtype=torch.int64, device=device),
        }
        object.__setattr__(self, "_scratch", made)
        object.__setattr__(self, "tally", torch.zeros(self.limits.max_batch, 2, dtype=torch.int64, device=device))
        object.__setattr__(self, "clocks", torch.zeros(2 * len(PHASES), dtype=torch.int64, device=device))

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        """Enqueue the walk of the requests in `inputs`."""
        admit_walk(CertifiedSm80.name, inputs, out, self.limits, self.head)
        scratch, lists = self._scratch, self.lists
        walk = Params(
            weights=self.head.w2.data_ptr(),
            latents=self.head.w1.data_ptr(),
            base=inputs.base_logits.data_ptr(),
            anchor=inputs.anchor.data_ptr(),
            temperature=inputs.temperature.data_ptr(),
            seed=inputs.seed.data_ptr(),
            logits=0 if out.logits is None else out.logits.data_ptr(),
            tokens=out.tokens.data_ptr(),
            mail=scratch["mail"].data_ptr(),
            round=scratch["round"].data_ptr(),
            clocks=self.clocks.data_ptr(),
            base_request_stride=inputs.base_logits.stride(0),
            base_step_stride=inputs.base_logits.stride(1),
            logits_request_stride=0 if out.logits is None else out.logits.stride(0),
            logits_step_stride=0 if out.logits is None else out.logits.stride(1),
            tokens_request_stride=out.tokens.stride(0),
            vocab=self.head.vocab,
            latent_vocab=self.head.vocab,
            steps=inputs.steps,
            batch=inputs.batch,
        )
        self.function.launch(
            CertifiedParams(
                walk=walk,
                list_rows=lists.rows.data_ptr(),
                list_biases=lists.biases.data_ptr(),
                list_bound=lists.bound.data_ptr(),
                offered=scratch["offered"].data_ptr(),
                table=scratch["table"].data_ptr(),
                extra=scratch["extra"].data_ptr(),
                tally=self.tally.data_ptr(),
                requests=self.limits.max_batch,
            )
        )
        if self.logits_pass and out.logits is not None:
            self.logits_pass.launch(walk)

    def round(self) -> int:
        """The round of the next launch, see `kernels.walk.SampledWalk`."""
        return int(self._scratch["round"].item()) & 0xFFFFFFFF


def _admit(head: Head, limits: Limits, device: DeviceSpec) -> MarkovHead:
    name = CertifiedSm80.name
    markov = admit_head(name, head, MarkovHead)
    admit_limits(name, limits, sampling=True)
    if limits.max_batch > _MAX_BATCH or limits.max_steps > _MAX_STEPS:
        raise Unsupported(
            f"{name} walks up to {_MAX_BATCH} requests and {_MAX_STEPS} steps a launch; got {limits.max_batch} and {limits.max_steps}; "
            "backend=sglang_folded serves any."
        )
    if markov.rank != _RANK or markov.vocab > _MAX_VOCAB:
        raise Unsupported(
            f"{name} serves rank {_RANK} and vocabularies up to {_MAX_VOCAB:,}; got rank {markov.rank} and {markov.vocab:,} tokens; "
            "backend=sglang_folded serves every head."
        )
    if not device.is_cuda:
        raise Unsupported(f"{name} needs a CUDA GPU; device={device.name} is {device.arch}; choose device=h200, or backend=reference.")
    if not (markov.w1.isfinite().all() and markov.w2.isfinite().all()):
        raise Unsupported(f"{name} proves nothing of a head with NaN or infinite weights; backend=reference serves it.")
    return MarkovHead(markov.w1.contiguous(), markov.w2.contiguous())
