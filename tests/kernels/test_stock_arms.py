"""What every stock arm promises: the oracle's tokens, untouched inputs, ties, NaN, limits; on the GPU also in graph replay."""

from __future__ import annotations

import importlib.util
from typing import ClassVar

import pytest
import torch

from kernels.agreement import check
from kernels.device import DeviceSpec, load
from kernels.heads.markov import MarkovHead
from kernels.registry import create
from kernels.synthetic import synthetic_inputs
from kernels.walk import Draft, Limits, NanRule, Unsupported, WalkInputs

TORCH_ARMS = ["sglang_greedy", "vllm_addmm"]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton; install it with: pip install -e '.[gpu]'"
)
TRITON_ARMS = ["sglang_folded", "sglang_markov_greedy_step", "vllm_loop_greedy", "vllm_two_launch"]
ARMS = [*TORCH_ARMS, *(pytest.param(name, marks=needs_triton) for name in TRITON_ARMS)]
GREEDY_ARMS = [*TORCH_ARMS, "sglang_markov_greedy_step", "vllm_loop_greedy"]
CPU = load("cpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a GPU machine Triton compiles and takes no CPU tensors
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy talks about the NaN that the interpreter makes


def run(name: str, head: MarkovHead, inputs: WalkInputs) -> torch.Tensor:
    draft = Draft.like(inputs)
    create(name).prepare(head, Limits(inputs.batch, inputs.steps), CPU).launch(inputs, draft)
    return draft.tokens


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize(("vocab", "steps", "batch"), [(1, 3, 1), (13, 1, 2), (1025, 4, 3), (2500, 16, 1)])
def test_tokens_are_the_oracles(name: str, vocab: int, steps: int, batch: int) -> None:
    head, inputs = MarkovHead.synthetic(vocab, 32, vocab, DEVICE, w2_std=0.3), synthetic_inputs(vocab, steps, batch, 1, DEVICE)
    before = inputs.base_logits.clone()
    backend = create(name)
    agreement = check(run(name, head, inputs), head, inputs, backend.rounding, backend.nan_rule)
    assert agreement.ok, agreement.reason
    assert torch.equal(inputs.base_logits, before), "a walk leaves its inputs as they were"


@pytest.mark.parametrize("name", ARMS)
def test_ties_nan_and_infinities(name: str) -> None:
    rows = [
        [3.0, 5.0, 5.0, 1.0],
        [-1.0, -0.0, 0.0, -0.0],
        [1.0, torch.nan, 3.0, torch.nan],
        [-torch.inf] * 4,
        [torch.nan] * 4,
        [1.0, torch.inf, torch.inf, -torch.inf],
        [-torch.inf, -3e38, -torch.inf, -torch.inf],
    ]
    vocab = 1030  # the rows straddle two tiles of the sampler
    base = torch.full((1, len(rows), vocab), -torch.inf, dtype=torch.bfloat16)
    base[0, :, 1022:1026] = torch.tensor(rows, dtype=torch.bfloat16)
    head = MarkovHead(torch.ones(vocab, 16, dtype=torch.bfloat16), torch.zeros(vocab, 16, dtype=torch.bfloat16))
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    inputs = WalkInputs(base.to(DEVICE), zero, torch.zeros(1, device=DEVICE), zero)
    wins = create(name).nan_rule is NanRule.WINS
    expected = [1023, 1023, 1023 if wins else 1024, 0, 1022 if wins else 0, 1023, 1023]
    assert run(name, head.to(DEVICE), inputs).tolist() == [expected]


@pytest.mark.parametrize("name", ARMS)
def test_strided_base_and_wild_anchors(name: str) -> None:
    head, plain = MarkovHead.synthetic(37, 16, 0, DEVICE, w2_std=0.5), synthetic_inputs(37, 5, 3, 0, DEVICE)
    padded = torch.full((3, 5, 48), 1e4, dtype=torch.bfloat16, device=DEVICE)
    padded[..., :37] = plain.base_logits
    anchor = torch.tensor([-5, 10**12, 7], device=DEVICE)
    inputs = WalkInputs(padded[..., :37], anchor, plain.temperature, plain.seed)
    agreement = check(run(name, head, inputs), head, inputs, create(name).rounding, create(name).nan_rule)
    assert agreement.ok, agreement.reason


@pytest.mark.parametrize("name", ARMS)
def test_one_prepared_walk_serves_smaller_ones_again_and_again(name: str) -> None:
    head, backend = MarkovHead.synthetic(50, 16, 0, DEVICE, w2_std=0.5), create(name)
    prepared = backend.prepare(head, Limits(3, 6), CPU)
    assert prepared.resources.streamed_bytes == 50 * 16 * 2
    for steps, batch in ((6, 3), (1, 1), (4, 2), (6, 3)):
        inputs = synthetic_inputs(50, steps, batch, steps, DEVICE)
        draft = Draft.like(inputs)
        prepared.launch(inputs, draft)
        assert check(draft.tokens, head, inputs, backend.rounding, backend.nan_rule).ok


class OtherHead:
    kind: ClassVar[str] = "gated"
    vocab, rank, device = 8, 4, torch.device("cpu")


@pytest.mark.parametrize("name", ARMS)
def test_refusals(name: str) -> None:
    head, inputs = MarkovHead.synthetic(8, 16, device=DEVICE), synthetic_inputs(8, 3, 2, device=DEVICE)
    with pytest.raises(Unsupported, match=r"'markov' head only; got 'gated'"):
        create(name).prepare(OtherHead(), Limits(), CPU)
    with pytest.raises(Unsupported, match="at least 1; got 0 and 16"):
        create(name).prepare(head, Limits(max_batch=0), CPU)
    prepared = create(name).prepare(head, Limits(2, 3), CPU)
    wide = synthetic_inputs(9, 3, 2)
    half = WalkInputs(inputs.base_logits.half(), inputs.anchor, inputs.temperature, inputs.seed)
    for bad, message in (
        (synthetic_inputs(8, 4, 2), "steps 4"),
        (synthetic_inputs(8, 3, 3), "batch 3"),
        (wide, "vocab 9"),
        (half, "float16"),
    ):
        with pytest.raises(ValueError, match=message):
            prepared.launch(bad, Draft.like(bad))
    with pytest.raises(ValueError, match=r"out.tokens must be \[2, 3\]"):
        prepared.launch(inputs, Draft.like(synthetic_inputs(8, 2, 2)))


@pytest.mark.parametrize("name", GREEDY_ARMS)
def test_greedy_arms_do_not_sample(name: str) -> None:
    with pytest.raises(Unsupported, match="greedy only"):
        create(name).prepare(MarkovHead.synthetic(8, 4), Limits(sampling=True), CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*TORCH_ARMS, *TRITON_ARMS])
@pytest.mark.parametrize(("vocab", "steps", "batch"), [(151_936, 16, 1), (10_007, 7, 3)])
def test_graph_replay_on_the_gpu(name: str, vocab: int, steps: int, batch: int) -> None:
    head = MarkovHead.synthetic(vocab, 256, 0, "cuda")
    inputs, other = (synthetic_inputs(vocab, steps, batch, seed, "cuda") for seed in (1, 2))
    backend = create(name)
    prepared = backend.prepare(head, Limits(batch, steps), DeviceSpec("live", "sm_90a"))
    draft = Draft.like(inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        prepared.launch(inputs, draft)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            prepared.launch(inputs, draft)
    torch.cuda.synchronize()
    for source in (inputs, other, inputs):
        base = source.base_logits.clone()
        inputs.base_logits.copy_(base)
        inputs.anchor.copy_(source.anchor)
        draft.tokens.fill_(-1)
        graph.replay()
        agreement = check(draft.tokens, head, inputs, backend.rounding, backend.nan_rule)
        assert agreement.ok, agreement.reason
        assert torch.equal(inputs.base_logits, base)
