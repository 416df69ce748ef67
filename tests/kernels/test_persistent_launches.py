"""Launches of the persistent walks on a GPU: replayed, one after the other without a pause, beside other work, and never stuck."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kernels import clock
from kernels.build import build
from kernels.driver import Function, LaunchShape
from kernels.walk import Draft
from tests.kernels.arm import FAMILIES, H200, SPIN_LIMIT, Arm, compile_all, first_of, head_on_gpu, inputs_on_gpu, round_of

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parent.parent.parent
VOCAB = 151_936
QUEUED = 150  # launches; the GPU takes up to 1,024
ROW = [(arm, vocab) for vocab in (129_280, 248_320) for arm in (Arm.resident(), Arm.resident(8), Arm.resident(16), Arm.resident(64))]
ROW += [(Arm.resident(batch, sampling=True), 248_320) for batch in (1, 4, 8, 16, 32, 64)]
ROW += [(Arm.resident(4), 129_280), (Arm.resident(exchange="mailboxes", rf_tiles=5), 129_280), (Arm.resident(weights="bf16"), 248_320)]
BUSY = [Arm.resident(batch, sampling, spin_limit=SPIN_LIMIT) for batch, sampling in ((1, False), (4, True), (16, False), (64, True))]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_all([(arm, vocab, H200) for arm, vocab in ROW] + [(arm, VOCAB, H200) for arm in FAMILIES + BUSY])


@pytest.mark.parametrize("arm", FAMILIES, ids=str)
def test_graph_replays_need_no_memset_and_read_new_inputs(arm: Arm) -> None:
    """Replays of two lengths through one prepared walk, mixed with eager launches, with new contents in the captured tensors."""
    head = head_on_gpu(VOCAB)
    walk, graphs = arm.prepare(head), []
    for steps in (3, 10):
        inputs = inputs_on_gpu(VOCAB, steps, arm.temperatures)
        draft = Draft.like(inputs)
        walk.launch(inputs, draft)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            walk.launch(inputs, draft)
        graphs.append((graph, inputs, draft))
    for turn in range(4):
        for graph, inputs, draft in graphs if turn % 2 else reversed(graphs):
            fresh = inputs_on_gpu(VOCAB, inputs.steps, arm.temperatures, 100 + turn)
            inputs.base_logits.copy_(fresh.base_logits)
            inputs.anchor.copy_(fresh.anchor)
            inputs.seed.copy_(fresh.seed)
            draft.tokens.fill_(-1)
            last = round_of(walk) + turn
            for _ in range(turn + 1):
                graph.replay()
            torch.cuda.synchronize()
            agreement = arm.agreement(walk, head, inputs, draft, last)
            assert agreement.ok, agreement.reason
        arm.assert_right(walk, head, inputs_on_gpu(VOCAB, 1 + turn, arm.temperatures, turn))


@pytest.mark.parametrize(("arm", "vocab"), ROW, ids=str)
def test_launches_one_after_the_other_without_a_pause(arm: Arm, vocab: int) -> None:
    """All are queued behind a sleeping GPU, so that nothing separates them: what one leaves behind meets the next. Greedy ones must all agree."""
    head = head_on_gpu(vocab)
    walk, whole = arm.prepare(head), inputs_on_gpu(vocab, 4, arm.temperatures, 5)
    cases = [first_of(whole, batch, steps) for batch, steps in ((whole.batch, 4), (max(whole.batch // 2, 1), 1), (whole.batch, 2))]
    drafts = [Draft.like(cases[i % 3]) for i in range(QUEUED)]
    first = walk.round()
    torch.cuda._sleep(100_000_000)  # cycles: 50 ms, longer than the host needs
    for i, draft in enumerate(drafts):
        walk.launch(cases[i % 3], draft)
    torch.cuda.synchronize()
    for i in (0, 1, QUEUED // 2, *range(QUEUED - 4, QUEUED)):
        agreement = arm.agreement(walk, head, cases[i % 3], drafts[i], first + i)
        assert agreement.ok, f"launch {i}: {agreement.reason}"
    if not arm.limits.sampling:
        for kind in range(3):
            tokens = torch.stack([draft.tokens for draft in drafts[kind::3]])
            wrong = (tokens != tokens[:1]).flatten(1).any(dim=1)
            assert not bool(wrong.any()), f"launches {(3 * wrong.nonzero()[:, 0] + kind).tolist()} differ from launch {kind}"


def occupy(ctas: int, milliseconds: float) -> torch.Tensor:
    """Take the shared memory of `ctas` SMs for a while, on the current stream. Returns what must live as long."""
    out = torch.zeros(2, dtype=torch.int64, device="cuda")
    function = Function(build(clock._SOURCE, "clock_probe", "sm_90"), LaunchShape(ctas, threads=1, dynamic_smem_bytes=200_000))
    function.launch(clock._ClockParams(out=out.data_ptr(), spin_ns=int(milliseconds * 1e6)))
    return out


@pytest.mark.parametrize("arm", BUSY, ids=str)
@pytest.mark.parametrize("ctas", [1, 66, 132])
def test_a_walk_waits_for_sms_that_another_kernel_holds(arm: Arm, ctas: int) -> None:
    head = head_on_gpu(VOCAB)
    walk, inputs, ours, theirs = arm.prepare(head), inputs_on_gpu(VOCAB, 3, arm.temperatures), torch.cuda.Stream(), torch.cuda.Stream()
    round, draft = walk.round(), Draft.like(inputs)
    torch.cuda.synchronize()
    with torch.cuda.stream(theirs):
        held = occupy(ctas, 60)
    time.sleep(0.005)  # until it runs
    with torch.cuda.stream(ours):
        walk.launch(inputs, draft)
    time.sleep(0.02)
    waits = not ours.query()
    torch.cuda.synchronize()
    assert int(held[1]) > 50e6, "ns"
    assert waits == (ctas + walk.resources.ctas > H200.sms), "a walk starts when all its CTAs find an SM, and not before"
    agreement = arm.agreement(walk, head, inputs, draft, round)
    assert agreement.ok, agreement.reason


def test_walks_on_two_streams_wait_for_each_other() -> None:
    """Each needs all SMs. Were the CTAs of both let in at once, neither would end."""
    head, streams = head_on_gpu(VOCAB), [torch.cuda.Stream() for _ in BUSY]
    walks = [arm.prepare(head) for arm in BUSY]
    inputs = [inputs_on_gpu(VOCAB, 3, arm.temperatures) for arm in BUSY]
    drafts = [[Draft.like(each) for _ in range(20)] for each in inputs]
    torch.cuda.synchronize()
    for turn in range(20):
        for stream, walk, each, mine in zip(streams, walks, inputs, drafts, strict=True):
            with torch.cuda.stream(stream):
                walk.launch(each, mine[turn])
    torch.cuda.synchronize()
    for arm, walk, each, mine in zip(BUSY, walks, inputs, drafts, strict=True):
        for turn in (0, 10, 19):
            agreement = arm.agreement(walk, head, each, mine[turn], turn)
            assert agreement.ok, agreement.reason


GIVES_UP = """
import torch
from kernels.walk import Draft
from tests.kernels.arm import Arm, head_on_gpu, inputs_on_gpu
inputs = inputs_on_gpu(151_936, 4)
Arm.resident(spin_limit=1).prepare(head_on_gpu(151_936)).launch(inputs, Draft.like(inputs))
torch.cuda.synchronize()
"""


def test_a_bounded_spin_ends_with_a_message() -> None:
    """One poll is too few for a winner. In a process of its own, since a trap ends the CUDA context."""
    ended = subprocess.run([sys.executable, "-c", GIVES_UP], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert re.search(r"walk: CTA \d+ thread \d+ gave up after 1 polls at -?\d+", ended.stdout), ended.stderr


def test_the_launch_counter_counts_launches() -> None:
    head, arm = head_on_gpu(1_000), Arm.resident()
    walk, inputs = arm.prepare(head), inputs_on_gpu(1_000, 2)
    for round in range(3):
        assert walk.round() == round
        arm.assert_right(walk, head, inputs)
