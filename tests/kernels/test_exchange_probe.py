"""The exchange probe: its winners on the CPU, the same functions in C++, every kernel compiled; on a GPU, every protocol's winners."""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kernels import exchange_probe as room
from kernels.device import CONFIGS, load
from kernels.driver import Function, LaunchShape
from kernels.exchange_probe import (
    MAX_STEPS,
    PROTOCOLS,
    ROWS,
    THREADS,
    WORDS,
    ExchangeProbe,
    check,
    compile_probe,
    digest,
    expected,
    probe_key,
    winners,
)
from kernels.walk import Unsupported

HoldInCpp = Callable[[str, Iterable[str]], None]
H200 = load("h200")
HEADER = '#include "probes/exchange_probe.cuh"'
EXPERIMENT = CONFIGS.parent / "experiment" / "exchange.yaml"
SPIN_LIMIT = 50_000_000  # polls; about ten seconds
ANCHORS = st.integers(0, 2**32 - 1)


@given(anchor=ANCHORS, ctas=st.integers(2, 160), steps=st.integers(1, 6))
def test_the_winner_has_the_largest_order_and_of_equal_ones_the_lowest_cta(anchor: int, ctas: int, steps: int) -> None:
    previous = anchor
    for step, token in enumerate(winners(anchor, ctas, steps)):
        orders = [probe_key(previous, step, cta) >> 16 for cta in range(ctas)]
        cta, row = divmod(token, ROWS)
        assert orders[cta] == max(orders)
        assert max(orders) not in orders[:cta]
        assert row == 0xFFFF - (probe_key(previous, step, cta) & 0xFFFF)
        previous = token


def test_winners_come_from_everywhere_ties_are_common_and_chains_depend_on_the_anchor() -> None:
    chains = [winners(anchor, 132, MAX_STEPS) for anchor in range(60)]
    won = Counter(token // ROWS for chain in chains for token in chain)
    assert len(won) > 125
    assert max(won.values()) < 5 * len(chains) * MAX_STEPS / 132
    orders = [[probe_key(token, step, cta) >> 16 for cta in range(132)] for chain in chains[:10] for step, token in enumerate(chain)]
    assert sum(each.count(max(each)) > 1 for each in orders) > 0.1 * len(orders)
    assert len({tuple(chain) for chain in chains}) == len(chains)
    assert len({digest(list(chain)) for chain in chains}) == len(chains)


def test_a_wrong_winner_is_told_with_its_step_or_its_cta() -> None:
    heard = expected(7, 8, 5)
    assert check(heard, 7, 8).ok
    assert not check(heard, 8, 8).ok
    late = heard.clone()
    late[3] = -1
    assert check(late, 7, 8).reason == f"step 3: CTA 0 heard token -1 but the winner is {int(heard[3])}."
    deaf = heard.clone()
    deaf[5 + 6] = 1
    assert check(deaf, 7, 8).reason.startswith("CTA 6 heard other tokens than CTA 0")
    assert check(deaf, 7, 8).mismatches == 1


def samples() -> list[tuple[int, int, int]]:
    draw = random.Random(0)
    return [(0, 0, 0), (2**32 - 1, 31, 255), *((draw.getrandbits(32), draw.randrange(32), draw.randrange(256)) for _ in range(100))]


def test_keys_digests_and_entries_in_cuda_are_the_models(hold_in_cpp: HoldInCpp) -> None:
    facts = []
    for previous, step, cta in samples():
        key = probe_key(previous, step, cta)
        facts += [
            f"wts::probe_key({previous}u, {step}u, {cta}u) == {key:#x}u",
            f"wts::probe_digest(wts::probe_digest(wts::kProbeDigest, {previous}u), {step}u) == {digest([previous, step]):#x}u",
            f"wts::entry_winner(wts::entry_of({key:#x}u, {cta}u)).cta == {cta}u",
            f"wts::entry_winner(wts::entry_of({key:#x}u, {cta}u)).row == {0xFFFF - (key & 0xFFFF)}u",
            f"wts::entry_of({key:#x}u, {cta}u) < (1ull << 40)",
        ]
    hold_in_cpp(HEADER, facts)


def test_entries_in_cuda_rise_with_the_order_then_fall_with_the_cta(hold_in_cpp: HoldInCpp) -> None:
    ranked = sorted(
        ((order, cta, row) for order in (1, 2, 256) for cta in (0, 7, 255) for row in (0, 1023)), key=lambda e: (e[0], -e[1], -e[2])
    )
    entries = [f"wts::entry_of({order << 16 | (0xFFFF - row):#x}u, {cta}u)" for order, cta, row in ranked]
    hold_in_cpp(HEADER, [f"{low} < {high}" for low, high in pairwise(entries)] + [f"{entries[0]} > 0"])


def test_constants_that_python_repeats(hold_in_cpp: HoldInCpp) -> None:
    sms = max(load(path.stem).sms for path in CONFIGS.glob("*.yaml"))
    hold_in_cpp(
        HEADER,
        [
            f"wts::kMaxSteps == {MAX_STEPS} && wts::kProbeRows == {ROWS} && wts::kProbeThreads == {THREADS}",
            f"wts::kProbeDigest == {room._DIGEST}u && sizeof(wts::ExchangeProbeParams) == {ctypes.sizeof(room._Params)}",
            f"2 * wts::StepLines<256, 8>::kBank * wts::StepLines<256, 8>::kStride <= {WORDS}",
            f"2 * wts::Mailboxes<{sms}>::kCopies * wts::Mailboxes<{sms}>::kSlots <= {WORDS}",
            f"2 * wts::KeyCountPair<{sms}>::kPairs * wts::KeyCountPair<{sms}>::kStride <= {WORDS}",
        ],
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_probe_compiles_without_spills(protocol: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings; install it with: pip install -e '.[gpu]'")
    kernel = compile_probe(protocol, H200)
    assert (kernel.arch, kernel.spill_bytes) == ("sm_90a", 0)
    assert kernel.registers <= 64
    assert kernel.static_smem_bytes < 1024, "the rest of an SM's shared memory keeps a second CTA away"
    assert b"gave up after" not in kernel.cubin


# One of every template but grid_sync's, whose spin is not ours: its other numbers share the code, and each takes NVRTC seconds.
SPINNING = {protocol.template.split("<")[0]: name for name, protocol in PROTOCOLS.items() if name != "grid_sync"}


@pytest.mark.parametrize("protocol", SPINNING.values())
def test_bounded_spins_compile(protocol: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings; install it with: pip install -e '.[gpu]'")
    assert b"gave up after" in compile_probe(protocol, H200, spin_limit=1000).cubin


def test_the_experiment_asks_for_every_protocol() -> None:
    assert list(PROTOCOLS) == yaml.safe_load(EXPERIMENT.read_text())["protocols"]


def test_what_ptx_promises() -> None:
    """The chosen pair and all that build on it lean on the hardware; there are alternatives that do not."""
    assert {name for name, protocol in PROTOCOLS.items() if protocol.promised} == {"pair_acquire", "mailboxes", "grid_sync"}
    for name, protocol in PROTOCOLS.items():
        assert protocol.promised or "16-byte load" in protocol.leans_on, name


class Recorder:
    """Stands for a kernel on a GPU: keeps what it was loaded and launched with."""

    def __init__(self) -> None:
        self.shape: LaunchShape | None = None
        self.launches: list[Any] = []

    def load(self, kernel: object, shape: LaunchShape) -> Function:
        self.shape = shape
        return cast(Function, self)

    def launch(self, params: ctypes.Structure) -> None:
        self.launches.append(type(params).from_buffer_copy(params))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings; install it with: pip install -e '.[gpu]'")
    recorder = Recorder()
    monkeypatch.setattr(room, "load", recorder.load)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: zeros(*size, dtype=dtype))
    return recorder


def test_a_launch_reaches_the_kernel(recorder: Recorder) -> None:
    probe = ExchangeProbe("cluster_2", 66, H200)
    shape = recorder.shape
    assert shape is not None
    assert (shape.ctas, shape.threads, shape.cooperative, shape.cluster) == (66, THREADS, True, 2)
    assert 2 * (shape.dynamic_smem_bytes + 1024) > H200.smem_bytes_per_sm, "one CTA on each SM, as in a walk"
    anchor, heard = torch.tensor([5]), torch.zeros(8 + 66, dtype=torch.int64, device="cpu")
    probe.launch(anchor, heard)
    (params,) = recorder.launches
    assert (params.steps, params.anchor, params.tokens) == (8, anchor.data_ptr(), heard.data_ptr())
    assert params.digests == heard.data_ptr() + 8 * 8
    for room_for in (0, MAX_STEPS + 1):
        with pytest.raises(ValueError, match=f"1 to 32 steps; `heard` has room for {room_for} beside 66 digests"):
            probe.launch(anchor, torch.zeros(room_for + 66, dtype=torch.int64, device="cpu"))


def test_without_a_gpu_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings; install it with: pip install -e '.[gpu]'")
    with pytest.raises(Unsupported, match="protocol pair exchanges between the SMs of a CUDA GPU; device=cpu is none"):
        ExchangeProbe("pair", 8, load("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="needs a CUDA GPU and this machine has none"):
        ExchangeProbe("pair", 8, H200)


def probe_or_skip(protocol: str, ctas: int, spin_limit: int = SPIN_LIMIT) -> ExchangeProbe:
    try:
        return ExchangeProbe(protocol, ctas, H200, spin_limit)
    except Unsupported as reason:
        pytest.skip(str(reason))


@pytest.mark.gpu
@pytest.mark.parametrize("ctas", [8, 66, 132])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_all_ctas_hear_every_winner_at_every_length_and_replay(protocol: str, ctas: int) -> None:
    """Launches of all lengths in a row share one state; replays of two lengths, eager launches between them, and changed anchors follow."""
    probe = probe_or_skip(protocol, ctas)
    anchor = torch.zeros(1, dtype=torch.int64, device="cuda")

    def launch(steps: int, start: int) -> None:
        heard = torch.full((steps + ctas,), -1, dtype=torch.int64, device="cuda")
        anchor.fill_(start)
        probe.launch(anchor, heard)
        agreement = check(heard, start, ctas)
        assert agreement.ok, agreement.reason

    for start, steps in enumerate([*range(1, MAX_STEPS + 1), 1, 1, MAX_STEPS, MAX_STEPS]):
        launch(steps, start)
    graphs = []
    for steps in (7, MAX_STEPS):
        heard = torch.zeros(steps + ctas, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            probe.launch(anchor, heard)
        graphs.append((graph, heard))
    for start in range(100, 160):
        for graph, heard in graphs if start % 2 else reversed(graphs):
            anchor.fill_(start)
            heard.fill_(-1)
            for _ in range(start % 3 + 1):
                graph.replay()
            agreement = check(heard, start, ctas)
            assert agreement.ok, f"anchor {start}: {agreement.reason}"
        launch(start % MAX_STEPS + 1, start)


@pytest.mark.gpu
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_stamps_tell_of_the_launch(protocol: str) -> None:
    probe = probe_or_skip(protocol, 8, spin_limit=0)
    heard = torch.zeros(MAX_STEPS + 8, dtype=torch.int64, device="cuda")
    for _ in range(3):
        probe.launch(torch.zeros(1, dtype=torch.int64, device="cuda"), heard)
        cycles, nanoseconds = probe.stamps()
        assert 0.1 < nanoseconds / 1e3 / (MAX_STEPS - 1) < 20, "us a step"
        assert 0.5 < cycles / nanoseconds < 2.1, "GHz"
