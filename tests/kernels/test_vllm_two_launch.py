"""vLLM's two-launch walk: the loop's tokens with and without stored noise, kept logits, ranks, refusals; on the GPU launches and graphs."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch

from kernels.agreement import check, stray_logits
from kernels.backends import vllm_two_launch
from kernels.backends.vllm_two_launch import TwoLaunchOptions, TwoLaunchPrepared, VllmTwoLaunch
from kernels.device import load
from kernels.heads.markov import MarkovHead
from kernels.walk import Draft, Limits, NoiseRule, Rounding, SampledWalk, Unsupported, WalkInputs
from tests.kernels.kernel_names import kernel_names
from tests.kernels.mixed import mixed

CPU = load("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy talks about the NaN that the interpreter makes
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton; install it with: pip install -e '.[gpu]'")
either_noise = pytest.mark.parametrize("precomputed", [True, False], ids=["stored", "hashed"])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def prepared(head: MarkovHead, batch: int, steps: int, sampling: bool = True, **options: Any) -> TwoLaunchPrepared:
    return VllmTwoLaunch(TwoLaunchOptions(**options)).prepare(head, Limits(batch, steps, sampling), CPU)


@needs_triton
@either_noise
@pytest.mark.parametrize(("vocab", "rank", "steps", "batch"), [(1, 16, 2, 3), (300, 32, 2, 4), (515, 16, 1, 17)])
def test_tokens_are_the_twins_in_every_round(vocab: int, rank: int, steps: int, batch: int, precomputed: bool) -> None:
    head, inputs = MarkovHead.synthetic(vocab, rank, vocab, DEVICE, w2_std=0.3), mixed(vocab, steps, batch)
    walk, before = prepared(head, batch, steps, precomputed_noise=precomputed), inputs.base_logits.clone()
    assert isinstance(walk, SampledWalk)
    assert walk.noise is NoiseRule.HASH
    assert walk.resources.streamed_bytes == vocab * rank * 2
    for launch in range(2):
        draft = Draft.like(inputs, logits=True)
        assert walk.round() == launch
        walk.launch(inputs, draft)
        agreement = check(draft.tokens, head, inputs, Rounding.TWICE, noise=walk.noise, round=launch)
        assert agreement.ok, agreement.reason
        assert draft.logits is not None
        assert stray_logits(draft.logits, draft.tokens, head, inputs, Rounding.TWICE) == 0
    assert torch.equal(inputs.base_logits, before), "a walk leaves its inputs as they were"


@needs_triton
def test_longer_walks_hash_their_noise_in_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_two_launch, "NOISE_ROWS", 5)
    head = MarkovHead.synthetic(300, 16, 0, DEVICE, w2_std=0.3)
    walk, stored = prepared(head, 3, 2), []
    assert walk._noise is not None
    assert walk._noise.shape == (5, 300)
    for launch, batch in enumerate((3, 2)):  # six tokens, then four
        walk._noise.zero_()
        inputs = mixed(300, 2, batch)
        draft = Draft.like(inputs)
        walk.launch(inputs, draft)
        stored.append(walk._noise.any(dim=1).tolist())
        assert check(draft.tokens, head, inputs, Rounding.TWICE, noise=walk.noise, round=launch).ok
    assert stored == [[False] * 5, [True] * 4 + [False]]


@needs_triton
@either_noise
def test_a_seed_and_a_round_decide_and_a_slot_does_not(precomputed: bool) -> None:
    head, inputs = MarkovHead.synthetic(300, 16, 0, DEVICE, w2_std=0.3), mixed(300, 2, 4)
    order = torch.tensor([2, 0, 3, 1], device=DEVICE)
    moved = WalkInputs(inputs.base_logits[order], inputs.anchor[order], inputs.temperature[order], inputs.seed[order])
    other = WalkInputs(inputs.base_logits, inputs.anchor, inputs.temperature, inputs.seed + (1 << 32))
    tokens = []
    for source, round in ((inputs, 0), (moved, 0), (other, 0), (inputs, 1), (inputs, 2**24)):  # 2^24 rounds are all there are
        walk, draft = prepared(head, 4, 2, precomputed_noise=precomputed), Draft.like(source)
        walk._rounds.fill_(round)
        walk.launch(source, draft)
        tokens.append(draft.tokens)
    first, there, elsewhere, later, again = tokens
    assert torch.equal(first[order], there)
    assert torch.equal(first, again)
    assert not torch.equal(first[1:], elsewhere[1:]), "the seed's upper half counts"
    assert not torch.equal(first[1:], later[1:])
    assert torch.equal(first[0], later[0]), "a greedy row has no noise"


@needs_triton
def test_one_prepared_walk_serves_smaller_and_strided_ones() -> None:
    head = MarkovHead.synthetic(37, 16, 0, DEVICE, w2_std=0.5)
    walk = prepared(head, 3, 5)
    for launch, (steps, batch) in enumerate(((5, 3), (1, 1), (4, 2))):
        plain = mixed(37, steps, batch, steps)
        padded = torch.full((batch, steps, 48), 1e4, dtype=torch.bfloat16, device=DEVICE)
        padded[..., :37] = plain.base_logits
        anchor = torch.tensor([-5, 10**12, 7], device=DEVICE)[:batch]
        inputs = WalkInputs(padded[..., :37], anchor, plain.temperature, plain.seed)
        draft = Draft.like(inputs)
        walk.launch(inputs, draft)
        assert check(draft.tokens, head, inputs, Rounding.TWICE, noise=walk.noise, round=launch).ok


@needs_triton
def test_where_logits_go() -> None:
    head, inputs = MarkovHead.synthetic(300, 16, 0, DEVICE, w2_std=0.3), mixed(300, 2, 3)
    walk, draft = prepared(head, 4, 3), Draft.like(inputs)
    walk.launch(inputs, draft)
    assert walk._cache is not None
    assert stray_logits(walk._cache[:3, :2], draft.tokens, head, inputs, Rounding.TWICE) == 0
    assert not walk._cache[3].any(), "rows beyond the batch are left alone"
    assert not walk._cache[:, 2].any()

    greedy, draft = prepared(head, 4, 3, sampling=False), Draft.like(inputs, logits=True)
    greedy.launch(inputs, draft)  # whatever the temperatures say
    assert (greedy._cache, greedy._noise, greedy.round()) == (None, None, 0)
    assert draft.logits is not None
    assert stray_logits(draft.logits, draft.tokens, head, inputs, Rounding.TWICE) == 0
    assert torch.equal(draft.logits.argmax(2), draft.tokens)


@needs_triton
@either_noise
@pytest.mark.parametrize(
    ("place", "greedy", "drawable"),
    [
        ({5: torch.nan, 9: 1.0}, 9, {9}),
        ({261: 2.0, 600: 1.0}, 261, {261, 600}),  # the first part is empty
        ({}, 0, {0}),
        ({5: torch.nan, 600: torch.nan}, 0, {0}),
        ({7: torch.inf, 600: torch.inf}, 7, {7}),  # infinite keys: the first
        ({7: -1e38, 600: torch.nan}, 7, {7}),
        ({63: 5.0, 64: 5.0, 256: 5.0}, 63, {63, 64, 256}),  # ties across tiles and parts
        ({699: 1.0}, 699, {699}),
    ],
)
def test_corner_cases_of_the_logits(place: dict[int, float], greedy: int, drawable: set[int], precomputed: bool) -> None:
    logits = torch.full((8, 1, 700), -torch.inf, dtype=torch.bfloat16)
    for index, value in place.items():
        logits[:, :, index] = value
    logits[0] = -torch.inf
    logits[0, 0, 3] = 1.0  # another row, to see that rows do not mix
    head = MarkovHead(torch.zeros(700, 16, dtype=torch.bfloat16), torch.zeros(700, 16, dtype=torch.bfloat16)).to(DEVICE)
    temperature = torch.tensor([1.0, 0.0, 1.0, 0.5, 2.0, 1.0, 1.0, 0.3], device=DEVICE)
    numbers = torch.arange(8, device=DEVICE)
    inputs = WalkInputs(logits.to(DEVICE), torch.zeros_like(numbers), temperature, numbers)
    draft = Draft.like(inputs)
    prepared(head, 8, 1, precomputed_noise=precomputed).launch(inputs, draft)
    tokens = draft.tokens[:, 0].tolist()
    assert tokens[:2] == [3, greedy]
    assert set(tokens[2:]) <= drawable


@pytest.mark.parametrize("rank", [8, 24, 48, 1024])
def test_ranks_that_the_original_does_not_serve(rank: int) -> None:
    with pytest.raises(Unsupported, match=rf"power of two from 16 to 512; got {rank}; backend=sglang_folded serves any"):
        prepared(MarkovHead.synthetic(8, rank), 1, 1)


def test_too_many_steps_for_the_noise() -> None:
    with pytest.raises(Unsupported, match="noise for 256 steps; got max_steps 257"):
        prepared(MarkovHead.synthetic(8, 16), 1, 257)


def test_without_triton_it_explains_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"Triton, which is not installed; run: pip install -e '.\[gpu\]'"):
        prepared(MarkovHead.synthetic(8, 16), 1, 1)


@needs_triton
def test_on_a_cpu_without_the_interpreter_it_explains_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    import kernels.triton.exponential_race  # noqa: F401  # so that the patch below finds it

    monkeypatch.setattr(sys.modules["kernels.triton.exponential_race"], "interpreted", lambda: False)
    with pytest.raises(Unsupported, match="TRITON_INTERPRET=1"):
        prepared(MarkovHead.synthetic(8, 16), 1, 1)


@pytest.mark.gpu
@needs_triton
def test_a_step_is_two_launches() -> None:
    head = MarkovHead.synthetic(129_280, 256, 0, "cuda")
    inputs = mixed(129_280, 5, 4)
    steps = [name for _ in range(5) for name in ("_score", "_select")]
    greedy, hashed = prepared(head, 4, 5, sampling=False), prepared(head, 4, 5, precomputed_noise=False)
    assert kernel_names(greedy, inputs) == steps
    assert kernel_names(hashed, inputs)[:-1] == steps, "and one kernel that raises the round"
    assert kernel_names(prepared(head, 4, 5), inputs)[:-1] == ["_noise_of_row", *steps]


@pytest.mark.gpu
@needs_triton
@either_noise
@pytest.mark.parametrize(("vocab", "rank", "steps", "batch"), [(129_280, 256, 5, 17), (248_320, 512, 16, 2), (10_007, 64, 7, 3)])
def test_graph_replays_draw_afresh(vocab: int, rank: int, steps: int, batch: int, precomputed: bool) -> None:
    head, inputs = MarkovHead.synthetic(vocab, rank, 0, "cuda"), mixed(vocab, steps, batch)
    walk, draft = prepared(head, batch, steps, precomputed_noise=precomputed), Draft.like(inputs, logits=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        walk.launch(inputs, draft)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            walk.launch(inputs, draft)
    torch.cuda.synchronize()
    for launch in (1, 2, 3):
        assert walk.round() == launch
        draft.tokens.fill_(-1)
        graph.replay()
        agreement = check(draft.tokens, head, inputs, Rounding.TWICE, noise=walk.noise, round=launch)
        assert agreement.ok, agreement.reason
        assert draft.logits is not None
        assert stray_logits(draft.logits, draft.tokens, head, inputs, Rounding.TWICE) == 0
