"""The oracle: recurrence, ties, NaN, infinities, clamps, any vocabulary, strided inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.heads.markov import MarkovHead
from kernels.reference import greedy, walk
from kernels.sampling import draw
from kernels.synthetic import synthetic_inputs
from kernels.walk import NanRule, NoiseRule, Rounding, WalkInputs

BF16 = torch.bfloat16
EXACT = [Rounding.TWICE, Rounding.ONCE, Rounding.NEVER, Rounding.INT8]


def inputs_of(base: torch.Tensor, anchor: list[int], temperature: float = 0.0) -> WalkInputs:
    batch = base.shape[0]
    return WalkInputs(base, torch.tensor(anchor), torch.full((batch,), temperature), torch.zeros(batch, dtype=torch.int64))


def silent_head(vocab: int, rank: int = 4) -> MarkovHead:
    """A head without bias: the walk is the argmax of the base logits."""
    return MarkovHead(torch.ones(vocab, rank, dtype=BF16), torch.zeros(vocab, rank, dtype=BF16))


@given(
    vocab=st.sampled_from([1, 2, 7, 8, 13, 16, 100, 1153]),
    steps=st.integers(1, 16),
    batch=st.integers(1, 4),
    seed=st.integers(0, 999),
    rounding=st.sampled_from(EXACT),
)
def test_the_walk_is_the_scalar_recurrence(vocab: int, steps: int, batch: int, seed: int, rounding: Rounding) -> None:
    head, inputs = MarkovHead.synthetic(vocab, 16, seed, w2_std=0.5), synthetic_inputs(vocab, steps, batch, seed)
    result = walk(head, inputs, rounding, keep_logits=True)
    assert result.logits is not None
    assert result.logits.shape == (batch, steps, vocab)
    for request in range(batch):
        previous = int(inputs.anchor[request])
        for step in range(steps):
            base = inputs.base_logits[request : request + 1, step]
            logits = head.step_logits(torch.tensor([previous]), base, rounding)[0].tolist()
            assert result.logits[request, step].tolist() == logits
            previous = logits.index(max(logits))
            assert int(result.tokens[request, step]) == previous


def test_int8_walk_is_the_argmax_of_plain_integers() -> None:
    """Scales that are powers of two make the whole INT8 walk exact, so Python integers are a second oracle."""
    generator = torch.Generator().manual_seed(0)
    w1 = torch.randint(-127, 128, (50, 8), generator=generator)
    w2 = torch.randint(-127, 128, (50, 8), generator=generator)
    w1[:, 0] = w2[:, 0] = 127  # every scale is 1
    head = MarkovHead(w1.to(BF16), (w2 * 2.0**-10).to(BF16))
    base = torch.randint(-20, 20, (1, 12, 50), generator=generator).to(BF16)
    previous, expected = 3, []
    for step in range(12):
        sums = (w2 @ w1[previous]).double() * 2.0**-10 + base[0, step].double()
        previous = int(sums.float().bfloat16().float().argmax())
        expected.append(previous)
    assert walk(head, inputs_of(base, [3]), Rounding.INT8).tokens.tolist() == [expected]
    assert len(set(expected)) > 3


@given(at=st.sets(st.integers(0, 99), min_size=1, max_size=5), rounding=st.sampled_from(EXACT), rule=st.sampled_from(list(NanRule)))
def test_ties_go_to_the_lowest_token(at: set[int], rounding: Rounding, rule: NanRule) -> None:
    base = torch.zeros(1, 1, 100, dtype=BF16)
    base[0, 0, list(at)] = 3.0
    assert walk(silent_head(100), inputs_of(base, [0]), rounding, rule).tokens.item() == min(at)


@pytest.mark.parametrize("rounding", EXACT)
def test_minus_zero_equals_zero(rounding: Rounding) -> None:
    base = torch.tensor([[[-1.0, -0.0, 0.0, -0.0]]], dtype=BF16)
    assert walk(silent_head(4), inputs_of(base, [0]), rounding).tokens.item() == 1


@pytest.mark.parametrize(
    ("row", "loses", "wins"),
    [
        ([1.0, torch.nan, 3.0, torch.nan], 2, 1),
        ([torch.nan] * 4, 0, 0),
        ([-torch.inf] * 4, 0, 0),
        ([torch.nan, -torch.inf, -torch.inf, torch.nan], 0, 0),
        ([-torch.inf, torch.nan, -torch.inf, -torch.inf], 0, 1),
        ([-torch.inf, -3e38, torch.nan, -torch.inf], 1, 2),
        ([1.0, torch.inf, torch.inf, -torch.inf], 1, 1),
        ([torch.nan, torch.inf, 1.0, 2.0], 1, 0),
    ],
)
def test_nan_and_infinities(row: list[float], loses: int, wins: int) -> None:
    for rounding in EXACT:
        inputs = inputs_of(torch.tensor([[row]], dtype=BF16), [0])
        assert walk(silent_head(4), inputs, rounding, NanRule.LOSES).tokens.item() == loses
        assert walk(silent_head(4), inputs, rounding, NanRule.WINS).tokens.item() == wins


@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_greedy_matches_a_plain_loop(row: list[float]) -> None:
    best, value = 0, -float("inf")
    for token, logit in enumerate(row):
        if logit > value:  # false for NaN
            best, value = token, logit
    assert greedy(torch.tensor([row], dtype=torch.float32), NanRule.LOSES).item() == best
    first_nan = next((token for token, logit in enumerate(row) if logit != logit), best)
    assert greedy(torch.tensor([row], dtype=torch.float32), NanRule.WINS).item() == first_nan


def test_nan_weights_never_leave_the_vocabulary() -> None:
    head = MarkovHead.synthetic(64, 8, 0)
    head.w1[5], head.w2[9] = torch.nan, torch.nan
    inputs = inputs_of(synthetic_inputs(64, 4, 1, 0).base_logits, [5])
    for rounding in EXACT:
        tokens = walk(head, inputs, rounding).tokens[0]
        assert tokens[0] == 0  # a NaN latent: the whole row is NaN
        assert 9 not in tokens.tolist()
        assert walk(head, inputs, rounding, NanRule.WINS).tokens[0, 1] == 9


def test_anchors_are_clamped() -> None:
    head, inputs = MarkovHead.synthetic(40, 8, 0, w2_std=2.0), synthetic_inputs(40, 3, 2, 0)
    wild, tame = (inputs_of(inputs.base_logits, anchor) for anchor in ([-7, 10**9], [0, 39]))
    assert torch.equal(walk(head, wild, Rounding.TWICE).tokens, walk(head, tame, Rounding.TWICE).tokens)
    assert not torch.equal(
        walk(head, wild, Rounding.TWICE).tokens, walk(head, inputs_of(inputs.base_logits, [1, 1]), Rounding.TWICE).tokens
    )


@pytest.mark.parametrize("rounding", EXACT)
def test_strided_and_padded_base(rounding: Rounding) -> None:
    head, inputs = MarkovHead.synthetic(37, 8, 0), synthetic_inputs(37, 5, 3, 0)
    padded = torch.full((5, 3, 48), 1e4, dtype=BF16)  # step-major, and the padding would win
    padded[..., :37] = inputs.base_logits.transpose(0, 1)
    strided = inputs_of(padded.transpose(0, 1)[..., :37], inputs.anchor.tolist())
    assert torch.equal(walk(head, strided, rounding).tokens, walk(head, inputs, rounding).tokens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_base_types_are_read_exactly(dtype: torch.dtype) -> None:
    head, inputs = MarkovHead.synthetic(37, 8, 0), synthetic_inputs(37, 5, 3, 0)
    same = inputs_of(inputs.base_logits.to(dtype), inputs.anchor.tolist())  # bf16 values of this size fit fp16 and fp32
    assert torch.equal(walk(head, same, Rounding.ONCE).tokens, walk(head, inputs, Rounding.ONCE).tokens)


def test_a_teacher_is_followed_and_clamped() -> None:
    head, inputs = MarkovHead.synthetic(40, 8, 0, w2_std=2.0), synthetic_inputs(40, 4, 1, 0)
    teacher = torch.tensor([[-1, 50, 3, 9]])
    tokens = walk(head, inputs, Rounding.NEVER, teacher=teacher).tokens[0]
    for step, previous in enumerate([int(inputs.anchor), 0, 39, 3]):
        logits = head.step_logits(torch.tensor([previous]), inputs.base_logits[:, step], Rounding.NEVER)
        assert tokens[step] == logits.argmax()


@pytest.mark.parametrize("noise", [NoiseRule.GUMBEL, NoiseRule.GROUPS])
@pytest.mark.parametrize("rounding", EXACT)
def test_a_drawn_walk_is_the_recurrence_of_draws(noise: NoiseRule, rounding: Rounding) -> None:
    head, inputs = MarkovHead.synthetic(83, 8, 0, w2_std=0.5), synthetic_inputs(83, 5, 4, 0)
    inputs = replace(inputs, temperature=torch.tensor([1.0, 0.0, torch.nan, 0.5]), seed=torch.tensor([3, 3, 3, -1]))
    result = walk(head, inputs, rounding, keep_logits=True, noise=noise, round=6)
    assert result.logits is not None
    previous = inputs.anchor
    for step in range(5):
        logits = head.step_logits(previous, inputs.base_logits[:, step], rounding)
        previous = draw(logits, inputs.temperature, inputs.seed, step, 6, noise)
        assert torch.equal(previous, result.tokens[:, step])
        assert torch.equal(logits, result.logits[:, step])
    assert torch.equal(result.tokens[1:3], walk(head, replace(inputs, temperature=torch.zeros(4)), rounding).tokens[1:3])
    assert torch.equal(walk(head, inputs, rounding, teacher=result.tokens, noise=noise, round=6).tokens, result.tokens)
    assert not torch.equal(walk(head, inputs, rounding, noise=noise, round=7).tokens[[0, 3]], result.tokens[[0, 3]])


def test_greedy_rows_of_a_drawn_walk_keep_their_nan_rule() -> None:
    inputs = inputs_of(torch.tensor([[[1.0, torch.nan, 3.0]]] * 2, dtype=BF16), [0, 0])
    inputs = replace(inputs, temperature=torch.tensor([0.0, 1e-5]))
    for rule, token in ((NanRule.LOSES, 2), (NanRule.WINS, 1)):
        assert walk(silent_head(3), inputs, Rounding.TWICE, rule, noise=NoiseRule.GUMBEL).tokens.flatten().tolist() == [token, 2]


def test_what_the_oracle_refuses() -> None:
    head = MarkovHead.synthetic(8, 4)
    with pytest.raises(ValueError, match=r"vocab 9 .* 8 tokens"):
        walk(head, synthetic_inputs(9, 1), Rounding.TWICE)
    with pytest.raises(ValueError, match=r"temperature 0\.7"):
        walk(head, synthetic_inputs(8, 1, temperature=0.7), Rounding.TWICE)
    with pytest.raises(ValueError, match="no oracle"):
        walk(head, synthetic_inputs(8, 1), Rounding.APPROXIMATE)
    with pytest.raises(ValueError, match="'library' cannot be repeated"):
        walk(head, synthetic_inputs(8, 1, temperature=0.7), Rounding.TWICE, noise=NoiseRule.LIBRARY)
    assert walk(head, synthetic_inputs(8, 1, temperature=float("nan")), Rounding.TWICE).tokens.numel() == 1  # NaN means greedy


def test_synthetic_inputs_repeat_and_nest() -> None:
    long, short = synthetic_inputs(500, 16, seed=4), synthetic_inputs(500, 7, seed=4)
    assert torch.equal(long.base_logits[:, :7], short.base_logits)
    assert torch.equal(long.anchor, short.anchor)
    assert not torch.equal(synthetic_inputs(500, 7, seed=5).base_logits, short.base_logits)
    assert long.base_logits.float().std().item() == pytest.approx(2.0, rel=0.03)
    assert (synthetic_inputs(500, 1, batch=64).anchor < 500).all()


@pytest.mark.gpu
def test_the_gpu_oracle_is_the_cpu_oracle() -> None:
    head, inputs = MarkovHead.synthetic(20_011, 256, 0), synthetic_inputs(20_011, 16, 2, 0)
    there = synthetic_inputs(20_011, 16, 2, 0, device="cuda")
    for rounding in EXACT:
        here = walk(head, inputs, rounding, keep_logits=True)
        gpu = walk(head.to("cuda"), there, rounding, keep_logits=True)
        assert here.logits is not None
        assert gpu.logits is not None
        assert torch.equal(here.tokens, gpu.tokens.cpu())
        assert torch.equal(here.logits, gpu.logits.cpu())
