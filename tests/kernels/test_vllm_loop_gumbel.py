"""The sampling loop: the host's tokens of every round, seeds instead of slots, kept logits, corner cases, refusals; on the GPU its distribution."""

from __future__ import annotations

import pytest
import torch

from kernels.agreement import check, stray_logits
from kernels.backends.vllm_loop_gumbel import LoopGumbelPrepared, VllmLoopGumbel
from kernels.device import DeviceSpec, load
from kernels.heads.markov import MarkovHead
from kernels.registry import create
from kernels.synthetic import synthetic_inputs
from kernels.walk import Draft, Limits, NanRule, NoiseRule, Rounding, SampledWalk, Unsupported, WalkInputs

pytest.importorskip("triton", reason="needs Triton; install it with: pip install -e '.[gpu]'")
from kernels.triton.gumbel_sample import gumbel_sample

CPU, BF16 = load("cpu"), torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy talks about NaN and the hash's overflow


def prepared(vocab: int = 1500, batch: int = 6, steps: int = 3) -> tuple[MarkovHead, LoopGumbelPrepared]:
    head = MarkovHead.synthetic(vocab, 16, 0, DEVICE, w2_std=0.3)
    return head, VllmLoopGumbel(VllmLoopGumbel.Options()).prepare(head, Limits(batch, steps, sampling=True), CPU)


def mixed(vocab: int = 1500, steps: int = 3, seed: int = 1) -> WalkInputs:
    """Six requests: greedy, three temperatures, NaN and a negative one; seeds of every kind."""
    plain = synthetic_inputs(vocab, steps, 6, seed, DEVICE)
    temperature = torch.tensor([0.0, 0.3, 1.0, 2.0, torch.nan, -1.0], device=DEVICE)
    seeds = torch.tensor([1, 0, -7, 1 << 40 | 3, 2, 5], device=DEVICE)
    return WalkInputs(plain.base_logits, plain.anchor, temperature, seeds)


def at(inputs: WalkInputs, rows: list[int]) -> WalkInputs:
    return WalkInputs(inputs.base_logits[rows], inputs.anchor[rows], inputs.temperature[rows], inputs.seed[rows])


def sample(logits: torch.Tensor, temperature: float, seeds: list[int] | None = None, round: int = 0, step: int = 0) -> torch.Tensor:
    rows = len(logits)
    return gumbel_sample(
        logits.to(BF16).to(DEVICE),
        torch.empty(logits.shape, dtype=BF16, device=DEVICE),
        torch.full((rows,), temperature, device=DEVICE),
        torch.tensor(seeds or list(range(rows)), device=DEVICE),
        torch.tensor([round], device=DEVICE),
        step,
    )


def test_tokens_of_every_round_are_the_hosts() -> None:
    head, walk = prepared()
    assert isinstance(walk, SampledWalk)
    seen = []
    for round in range(3):
        inputs = mixed(seed=round)
        before = inputs.base_logits.clone()
        draft = Draft.like(inputs, logits=True)
        assert walk.round() == round
        walk.launch(inputs, draft)
        agreement = check(draft.tokens, head, inputs, Rounding.TWICE, NanRule.LOSES, noise=walk.noise, round=round)
        assert agreement.ok, agreement.reason
        assert draft.logits is not None
        assert stray_logits(draft.logits, draft.tokens, head, inputs, Rounding.TWICE) == 0, "greedy rows are kept too"
        assert torch.equal(inputs.base_logits, before)
        seen.append(check(draft.tokens, head, inputs, Rounding.TWICE, noise=walk.noise, round=round + 1).ok)
    assert not any(seen), "another round is other noise"


def test_a_far_round() -> None:
    """The position wraps at 2^32 after 2^24 rounds."""
    head, walk = prepared()
    walk._rounds.fill_((1 << 24) + 5)
    inputs = mixed()
    draft = Draft.like(inputs)
    walk.launch(inputs, draft)
    for round in (5, (1 << 24) + 5):
        assert check(draft.tokens, head, inputs, Rounding.TWICE, noise=NoiseRule.HASH, round=round).ok


def test_a_request_draws_the_same_wherever_it_stands() -> None:
    inputs, order = mixed(), [3, 0, 2, 1]
    drafts = []
    for asked in (inputs, at(inputs, order), at(inputs, [3])):
        _, walk = prepared()
        drafts.append(Draft.like(asked))
        walk.launch(asked, drafts[-1])
    assert torch.equal(drafts[1].tokens, drafts[0].tokens[order])
    assert torch.equal(drafts[2].tokens, drafts[0].tokens[[3]])


def test_without_a_place_in_the_draft_logits_go_to_the_static_cache() -> None:
    inputs = at(mixed(steps=2), [0, 2])
    (_, first), (_, second) = prepared(), prepared()
    kept, bare = Draft.like(inputs, logits=True), Draft.like(inputs)
    first.launch(inputs, kept)
    second.launch(inputs, bare)
    assert torch.equal(kept.tokens, bare.tokens)
    assert kept.logits is not None
    assert torch.equal(second._cache[:2, :2], kept.logits)
    assert not first._cache.any()


def test_strided_inputs_and_wild_anchors() -> None:
    head, walk = prepared(37)
    plain = synthetic_inputs(37, 3, 2, 0, DEVICE)
    padded = torch.full((2, 3, 48), 1e4, dtype=BF16, device=DEVICE)
    padded[..., :37] = plain.base_logits
    temperature, seed = torch.tensor([0.7], device=DEVICE).expand(2), torch.tensor([4, 9, 6, 9], device=DEVICE)[::2]
    inputs = WalkInputs(padded[..., :37], torch.tensor([-5, 10**12], device=DEVICE), temperature, seed)
    draft = Draft.like(inputs)
    walk.launch(inputs, draft)
    agreement = check(draft.tokens, head, inputs, Rounding.TWICE, noise=NoiseRule.HASH)
    assert agreement.ok, agreement.reason


@pytest.mark.parametrize("temperature", [0.0, torch.nan, -1.0, 1.0, 1e-30, torch.inf])
@pytest.mark.parametrize(
    ("place", "token"),
    [
        ({}, 0),
        ({5: torch.nan, 1030: torch.nan}, 0),
        ({5: torch.nan, 1030: 1.0}, 1030),
        ({1023: torch.inf, 1024: torch.inf}, 1023),
        ({1030: -3e38}, 1030),
    ],
)
def test_corner_cases_of_the_logits(place: dict[int, float], token: int, temperature: float) -> None:
    logits = torch.full((2, 1100), -torch.inf)
    logits[0, 3] = 1.0  # another row, to see that rows do not mix
    for index, value in place.items():
        logits[1, index] = value
    if temperature == torch.inf and torch.inf in place.values():
        token = 0  # inf / inf is NaN
    elif temperature == 1e-30 and place == {1030: -3e38}:
        token = 0  # overflows to -inf
    assert sample(logits, temperature).tolist() == [3, token]


def test_greedy_ties_go_to_the_first_lane_of_the_first_block() -> None:
    logits = torch.zeros(1, 3000)
    logits[0, [1023, 1024, 2999]] = 1.0
    assert sample(logits, 0.0).tolist() == [1023]


@pytest.mark.gpu  # the interpreter takes minutes for so many rows
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    """Chi-square over 4 tokens in two blocks: 16.27 is the 0.1 % point at 3 degrees of freedom."""
    rows, places = 30_000, [0, 500, 1000, 1024]
    logits = torch.full((rows, 1025), -torch.inf)
    logits[:, places] = torch.tensor([0.0, 1.0, 0.5, -0.5])
    tokens = sample(logits, temperature, round=3, step=2).cpu()
    expected = rows * (logits[0, places].double() / temperature).softmax(0)
    counts = torch.tensor([int((tokens == token).sum()) for token in places])
    assert counts.sum() == rows
    assert ((counts - expected) ** 2 / expected).sum() < 16.27


def test_refusals() -> None:
    head, _ = prepared(8)
    with pytest.raises(Unsupported, match="its greedy one is backend=vllm_loop_greedy"):
        create("vllm_loop_gumbel").prepare(head, Limits(), CPU)
    with pytest.raises(Unsupported, match="256 positions a walk; got max_steps 257"):
        create("vllm_loop_gumbel").prepare(head, Limits(1, 257, sampling=True), CPU)
    _, walk = prepared(8, 1, 2)
    inputs = synthetic_inputs(8, 2, 1, device=DEVICE)
    tokens = Draft.like(inputs).tokens
    for logits in (torch.zeros(1, 2, 8, device=DEVICE), torch.zeros(1, 2, 16, dtype=BF16, device=DEVICE)[..., ::2]):
        with pytest.raises(ValueError, match="bf16, contiguous along vocab"):
            walk.launch(inputs, Draft(tokens, logits))


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "steps", "batch"), [(151_936, 16, 1), (10_007, 7, 4)])
def test_graph_replay_on_the_gpu(vocab: int, steps: int, batch: int) -> None:
    head, plain = MarkovHead.synthetic(vocab, 256, 0, "cuda"), synthetic_inputs(vocab, steps, batch, 1, "cuda")
    temperature = torch.tensor([1.0, 0.0, 0.5, 2.0], device="cuda")[:batch]
    inputs = WalkInputs(plain.base_logits, plain.anchor, temperature, plain.seed)
    walk = VllmLoopGumbel(VllmLoopGumbel.Options()).prepare(head, Limits(batch, steps, sampling=True), DeviceSpec("live", "sm_90a"))
    draft = Draft.like(inputs, logits=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        walk.launch(inputs, draft)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            walk.launch(inputs, draft)
    torch.cuda.synchronize()
    for _ in range(3):
        round = walk.round()
        draft.tokens.fill_(-1)
        graph.replay()
        agreement = check(draft.tokens, head, inputs, Rounding.TWICE, noise=walk.noise, round=round)
        assert agreement.ok, agreement.reason
        assert draft.logits is not None
        assert stray_logits(draft.logits, draft.tokens, head, inputs, Rounding.TWICE) == 0
