"""The persistent Hopper walks on a GPU: the INT8 oracle's tokens bit for bit, in eager launches and graph replays, whatever the inputs hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.agreement import check
from kernels.device import load
from kernels.heads.markov import MarkovHead
from kernels.registry import create
from kernels.synthetic import synthetic_inputs
from kernels.walk import ClockedWalk, Draft, Limits, NanRule, PreparedWalk, Rounding, Unsupported, WalkInputs

pytestmark = pytest.mark.gpu

H200 = load("h200")
SPIN_LIMIT = 50_000_000  # polls; about ten seconds
ARMS: list[tuple[str, dict[str, Any]]] = [
    ("resident_sm90", {}),
    ("resident_sm90", {"rf_tiles": 5, "exchange": "mailboxes"}),
    ("streaming_sm90", {"weights": "int8"}),
    ("streaming_sm90", {"weights": "int8", "exchange": "mailboxes"}),
    ("streaming_sm90", {"weights": "bf16"}),
]
VOCABS = [1_000, 32_000, 49_153, 129_280, 151_936, 163_840]


@pytest.fixture(scope="module")
def heads() -> dict[int, MarkovHead]:
    return {}


def head_of(heads: dict[int, MarkovHead], vocab: int) -> MarkovHead:
    if vocab not in heads:
        heads[vocab] = MarkovHead.synthetic(vocab, 256, seed=vocab, device="cuda")
    return heads[vocab]


def prepare(name: str, options: dict[str, Any], head: MarkovHead, steps: int = 16) -> tuple[PreparedWalk, Rounding]:
    backend = create(name, options)
    return backend.prepare(head, Limits(1, steps), H200), backend.rounding


def assert_right(walk: PreparedWalk, rounding: Rounding, head: MarkovHead, inputs: WalkInputs) -> None:
    draft = Draft.like(inputs)
    walk.launch(inputs, draft)
    torch.cuda.synchronize()
    agreement = check(draft.tokens, head, inputs, rounding, NanRule.LOSES)
    assert agreement.ok, agreement.reason


@pytest.mark.parametrize(("name", "options"), ARMS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_every_length_gives_the_oracles_tokens(heads, name: str, options: dict, vocab: int) -> None:
    head = head_of(heads, vocab)
    walk, rounding = prepare(name, options, head)
    for steps in range(1, 17):
        assert_right(walk, rounding, head, synthetic_inputs(vocab, steps, 1, seed=steps, device="cuda"))


@pytest.mark.parametrize("rf_tiles", [0, 1, 3, 4, 5, 6])
@pytest.mark.parametrize("vocab", [1_000, 49_153, 101_000, 151_936])
def test_the_split_between_registers_and_shared_memory_changes_nothing(heads, vocab: int, rf_tiles: int) -> None:
    head = head_of(heads, vocab)
    try:
        walk, rounding = prepare("resident_sm90", {"rf_tiles": rf_tiles}, head)
    except Unsupported as reason:
        pytest.skip(str(reason))
    for seed in range(4):
        assert_right(walk, rounding, head, synthetic_inputs(vocab, 16, 1, seed, "cuda"))


@pytest.mark.parametrize(("name", "options"), ARMS)
@pytest.mark.parametrize("vocab", [1_000, 49_153, 151_936])
def test_ties_nan_and_infinities(heads, name: str, options: dict, vocab: int) -> None:
    """With W2 = 0 the tokens are the base's: ties across lanes, warps and CTAs, -0 and +0, NaN, infinities, rows of nothing."""
    inf, nan = torch.inf, torch.nan
    head = MarkovHead(torch.ones(vocab, 256, dtype=torch.bfloat16), torch.zeros(vocab, 256, dtype=torch.bfloat16)).to("cuda")
    walk, rounding = prepare(name, options, head)
    base = torch.full((1, 12, vocab), -5.0, dtype=torch.bfloat16, device="cuda")
    last = vocab - 1
    places: list[dict[int, float]] = [
        {7: 3.0, 15: 3.0, 16: 3.0, last: 3.0},
        {last - 1: 2.0, last: 2.0},
        {3: nan, 500: 1.0, 501: nan},
        {0: inf, last: inf},
        {9: -0.0, 10: 0.0},
        {10: 0.0, 9: -0.0, 8: nan},
        {last: inf, 5: nan},
        {11: 4.0, 19: 4.0, 27: 4.0},
    ]
    for step, place in enumerate(places):
        for row, value in place.items():
            base[0, step, row] = value
    base[0, 8] = -inf
    base[0, 9] = nan
    base[0, 10] = -inf
    base[0, 10, last] = -3e38
    base[0, 11] = inf
    inputs = replace(synthetic_inputs(vocab, 12, 1, 0, "cuda"), base_logits=base)
    assert_right(walk, rounding, head, inputs)


@pytest.mark.parametrize(("name", "options"), ARMS)
def test_broken_weights_keep_tokens_inside_the_vocabulary(name: str, options: dict) -> None:
    vocab = 5_000
    w1, w2 = torch.randn(vocab, 256).bfloat16(), torch.randn(vocab, 256).bfloat16()
    w1[17] = torch.nan
    w2[::3] = torch.inf
    w2[1::3, 5] = torch.nan
    head = MarkovHead(w1, w2).to("cuda")
    walk, rounding = prepare(name, options, head)
    inputs = replace(synthetic_inputs(vocab, 8, 1, 0, "cuda"), anchor=torch.tensor([17], device="cuda"))
    assert_right(walk, rounding, head, inputs)


@pytest.mark.parametrize(("name", "options"), ARMS)
def test_strided_padded_and_unaligned_base_logits(heads, name: str, options: dict) -> None:
    vocab, steps = 49_153, 5
    head = head_of(heads, vocab)
    walk, rounding = prepare(name, options, head)
    inputs = synthetic_inputs(vocab, steps, 1, 3, "cuda")
    for padded, offset in ((vocab + 7, 0), (vocab + 15, 0), (vocab + 15, 1), (vocab + 15, 8)):
        storage = torch.full((1, steps, padded), 100.0, dtype=torch.bfloat16, device="cuda")  # padding that would win if it were read
        view = storage[:, :, offset : offset + vocab]
        view.copy_(inputs.base_logits)
        assert_right(walk, rounding, head, replace(inputs, base_logits=view))


@pytest.mark.parametrize(("name", "options"), ARMS)
def test_anchors_out_of_range_are_clamped(heads, name: str, options: dict) -> None:
    head = head_of(heads, 1_000)
    walk, rounding = prepare(name, options, head)
    inputs = synthetic_inputs(1_000, 4, 1, 5, "cuda")
    for anchor in (-1, 0, 999, 1_000, 2**31, 2**40, -(2**40)):
        assert_right(walk, rounding, head, replace(inputs, anchor=torch.tensor([anchor], device="cuda")))


@pytest.mark.parametrize(("name", "options"), ARMS)
def test_a_taller_w1_clamps_anchors_into_the_vocabulary(name: str, options: dict) -> None:
    vocab = 3_000
    tall = MarkovHead.synthetic(vocab + 500, 256, 3, "cuda")
    head = MarkovHead(tall.w1, tall.w2[:vocab].contiguous())
    walk, rounding = prepare(name, options, head)
    inputs = synthetic_inputs(vocab, 4, 1, 5, "cuda")
    for anchor in (vocab - 1, vocab, vocab + 499):
        assert_right(walk, rounding, head, replace(inputs, anchor=torch.tensor([anchor], device="cuda")))


@pytest.mark.parametrize(("name", "options"), ARMS)
def test_graph_replays_need_no_memset_and_read_new_inputs(heads, name: str, options: dict) -> None:
    """Replays of two lengths through one prepared walk, mixed with eager launches, with new contents in the captured tensors."""
    vocab = 151_936
    head = head_of(heads, vocab)
    walk, rounding = prepare(name, options, head)
    graphs = []
    for steps in (7, 16):
        inputs = synthetic_inputs(vocab, steps, 1, 0, "cuda")
        draft = Draft.like(inputs)
        walk.launch(inputs, draft)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            walk.launch(inputs, draft)
        graphs.append((graph, inputs, draft))
    for round_ in range(12):
        for graph, inputs, draft in graphs if round_ % 2 else reversed(graphs):
            fresh = synthetic_inputs(vocab, inputs.steps, 1, 100 + round_ % 3, "cuda")
            inputs.base_logits.copy_(fresh.base_logits)
            inputs.anchor.copy_(fresh.anchor)
            draft.tokens.fill_(-1)
            for _ in range(round_ + 1):
                graph.replay()
            torch.cuda.synchronize()
            agreement = check(draft.tokens, head, inputs, rounding)
            assert agreement.ok, agreement.reason
        assert_right(walk, rounding, head, synthetic_inputs(vocab, 1 + round_, 1, round_, "cuda"))


@pytest.mark.parametrize("weights", ["int8", "bf16"])
def test_streaming_serves_vocabularies_beyond_the_chip(weights: str) -> None:
    head = MarkovHead.synthetic(248_320, 256, 1, "cuda")
    walk, rounding = prepare("streaming_sm90", {"weights": weights}, head)
    assert_right(walk, rounding, head, synthetic_inputs(248_320, 16, 1, 1, "cuda"))


@pytest.mark.parametrize("exchange", ["pair", "mailboxes"])
@pytest.mark.parametrize("name", ["resident_sm90", "streaming_sm90"])
def test_bounded_spins_do_not_change_tokens(heads, name: str, exchange: str) -> None:
    options = {"exchange": exchange, "spin_limit": SPIN_LIMIT}
    head = head_of(heads, 151_936)
    walk, rounding = prepare(name, options, head)
    assert_right(walk, rounding, head, synthetic_inputs(151_936, 16, 1, 2, "cuda"))


@pytest.mark.parametrize(("name", "options"), [("resident_sm90", {}), ("streaming_sm90", {"weights": "int8"})])
def test_step_clocks_rise(heads, name: str, options: dict) -> None:
    head = head_of(heads, 151_936)
    walk, rounding = prepare(name, options | {"clocks": True}, head)
    assert isinstance(walk, ClockedWalk)
    assert_right(walk, rounding, head, synthetic_inputs(151_936, 16, 1, 2, "cuda"))
    cycles, nanoseconds = walk.step_stamps().diff(dim=0).unbind(dim=1)
    assert int(cycles.min()) > 500, cycles.tolist()
    assert int(cycles.max()) < 100_000, cycles.tolist()
    assert 1.0 < float(cycles.sum() / nanoseconds.sum()) < 2.1, "GHz: the two clocks tell of the same walk"
