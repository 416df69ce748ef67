"""The Markov head: validation, synthetic weights, checkpoints, and its exact step against a second opinion."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.heads.markov import W1_NAME, W2_NAME, MarkovHead
from kernels.quantize import two_planes
from kernels.walk import Rounding

BF16 = torch.bfloat16
EXACT = [Rounding.TWICE, Rounding.ONCE, Rounding.NEVER, Rounding.INT8]


def base_logits(batch: int, vocab: int, seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (2 * torch.randn(batch, vocab, generator=torch.Generator().manual_seed(seed))).to(dtype)


@given(vocab=st.integers(1, 70), rank=st.sampled_from([1, 8, 64]), seed=st.integers(0, 999), dtype=st.sampled_from([BF16, torch.float32]))
def test_a_step_is_near_the_second_opinion(vocab: int, rank: int, seed: int, dtype: torch.dtype) -> None:
    head, base = MarkovHead.synthetic(vocab, rank, seed), base_logits(3, vocab, seed + 1, dtype)
    previous = torch.tensor([0, vocab - 1, vocab // 2])
    for rounding, ulps in ((Rounding.TWICE, 1.0), (Rounding.ONCE, 0.5), (Rounding.NEVER, 2.0**-14), (Rounding.INT8, 0.5)):
        logits = head.step_logits(previous, base, rounding)
        truth = head.step_logits_fp64(previous, base, int8=rounding is Rounding.INT8)
        bias = truth - base.double()
        assert logits.dtype == torch.float32
        bound = ulps * 2.0**-7 * (truth.abs() + bias.abs()) + 1e-6  # an ulp of bf16 is at most 2^-7 of the value
        assert ((logits.double() - truth).abs() <= bound).all(), rounding
        if rounding is not Rounding.NEVER:
            assert torch.equal(logits, logits.bfloat16().float())


def test_where_each_rule_rounds() -> None:
    """L = 256, b = 1 + 2^-9 + 1: hand-made so that every rule gives another logit or another reason."""
    head = MarkovHead(torch.tensor([[1.0, 1.0]], dtype=BF16), torch.tensor([[1.0, 2.0**-9]], dtype=BF16))
    previous, base = torch.tensor([0]), torch.tensor([[256.0]], dtype=BF16)  # bf16 steps by 2 above 256: 257 is a tie
    answers = {rounding: head.step_logits(previous, base, rounding).item() for rounding in EXACT}
    assert answers[Rounding.TWICE] == 256.0  # b -> 1, then 257 is a tie and goes to the even 256
    assert answers[Rounding.ONCE] == 258.0  # 257.00195 is above the tie
    assert answers[Rounding.NEVER] == 257.001953125
    assert answers[Rounding.INT8] == 256.0  # the row's step is 1/127: 2^-9 is below half of it


@given(seed=st.integers(0, 999))
def test_int8_step_is_integers_and_one_rounding(seed: int) -> None:
    head, base, previous = MarkovHead.synthetic(37, 16, seed), base_logits(2, 37, seed), torch.tensor([5, 36])
    planes = two_planes(head.w1[previous])
    x = ((256 * planes.hi.long() + planes.lo.long())[:, None, :] * head.int8.q.long()[None]).sum(2)
    bias = (planes.scale_lo[:, None] * head.int8.scale[None]) * x.float()
    assert torch.equal(head.step_logits(previous, base, Rounding.INT8), (base.float() + bias).bfloat16().float())


@given(seed=st.integers(0, 999), rank=st.sampled_from([1, 64, 256]))
def test_any_fp32_order_stays_in_the_interval(seed: int, rank: int) -> None:
    head, base, previous = MarkovHead.synthetic(50, rank, seed), base_logits(1, 50, seed), torch.tensor([7])
    order = torch.randperm(rank, generator=torch.Generator().manual_seed(seed))
    products = head.w2.float() * head.w1[previous].float()
    for start in (torch.zeros(1, 50), base.float()):  # the base as last or as first addend
        total = start[0]
        for index in order:
            total = total + products[:, index]
        bias_first = start.any()
        for rounding in (Rounding.ONCE, Rounding.NEVER) if bias_first else (Rounding.TWICE, Rounding.ONCE, Rounding.NEVER):
            bias = total.bfloat16().float() if rounding is Rounding.TWICE else total
            logits = bias if bias_first else base[0].float() + bias
            logits = logits if rounding is Rounding.NEVER else logits.bfloat16().float()
            lowest, highest = head.step_interval(previous, base, rounding)
            assert (lowest <= logits).all()
            assert (logits <= highest).all()
            assert (lowest <= head.step_logits(previous, base, rounding)).all()


def test_truncating_sums_of_equal_signs_stay_in_the_interval() -> None:
    """The worst a tensor core may do: every addition is cut towards zero and no error cancels. A bound 32 times tighter would break."""
    generator = torch.Generator().manual_seed(0)
    head = MarkovHead(*(torch.rand(200, 256, generator=generator).to(BF16) for _ in range(2)))
    previous, base = torch.tensor([3]), torch.zeros(1, 200, dtype=torch.float32)
    total = torch.zeros(200, dtype=torch.float64)
    for product in (head.w2.double() * head.w1[previous].double()).unbind(1):
        total = total + product
        exponent = torch.floor(torch.log2(total))
        total = torch.floor(total * 2.0 ** (23 - exponent)) * 2.0 ** (exponent - 23)  # 24 bits of mantissa
    lowest, highest = head.step_interval(previous, base, Rounding.NEVER)
    assert (lowest.double() <= total).all()
    assert (total <= highest.double()).all()
    truth = head.step_logits_fp64(previous, base)
    assert ((truth - total) / (truth - lowest.double())).max() > 0.03


def test_the_interval_is_tight() -> None:
    """At the paper's sizes the interval of a logit that could win is mostly one value, else two neighbours of bf16."""
    head, base, previous = MarkovHead.synthetic(4000, 256, 0), base_logits(1, 4000, 1), torch.tensor([3])
    for rounding in (Rounding.TWICE, Rounding.ONCE):
        lowest, highest = head.step_interval(previous, base, rounding)
        large = lowest > 4
        assert large.sum() > 50
        assert (lowest == highest)[large].float().mean() > 0.9
        assert ((highest - lowest)[large] <= 2.0**-7 * highest[large]).all()
    assert torch.equal(*head.step_interval(previous, base, Rounding.INT8))


def test_broken_weights_keep_the_interval_ordered() -> None:
    w2 = torch.tensor([[torch.inf, 0.0], [torch.nan, 0.0], [torch.inf, -torch.inf], [1.0, 1.0]], dtype=BF16)
    head = MarkovHead(torch.ones(4, 2, dtype=BF16), w2)
    lowest, highest = head.step_interval(torch.tensor([0]), torch.zeros(1, 4, dtype=BF16), Rounding.ONCE)
    assert lowest[0, 0] == highest[0, 0] == torch.inf
    assert lowest[0, 1:3].isnan().all()
    assert lowest[0, 3] <= 2.0 <= highest[0, 3]


def test_synthetic_weights_repeat_and_have_the_stated_spread() -> None:
    head, same, other = (MarkovHead.synthetic(1000, 64, seed) for seed in (3, 3, 4))
    assert torch.equal(head.w1, same.w1)
    assert torch.equal(head.w2, same.w2)
    assert not torch.equal(head.w1, other.w1)
    assert head.w1.float().std().item() == pytest.approx(1.0, rel=0.02)
    assert head.w2.float().std().item() == pytest.approx(0.05, rel=0.02)
    assert abs(torch.corrcoef(torch.stack([head.w1.float().flatten(), head.w2.float().flatten()]))[0, 1]) < 0.02
    assert (head.vocab, head.rank, head.kind, head.to("cpu").device.type) == (1000, 64, "markov", "cpu")


def test_checkpoint_names() -> None:
    head = MarkovHead.synthetic(12, 4)
    tensors = {W1_NAME: head.w1, W2_NAME: head.w2, "layers.0.mlp.weight": head.w1}
    assert torch.equal(MarkovHead.from_tensors(tensors).w2, head.w2)
    with pytest.raises(ValueError, match=r"lacks markov_head\.markov_w1\.weight"):
        MarkovHead.from_tensors({W2_NAME: head.w2})
    with pytest.raises(ValueError, match=r"lacks .*has: nothing"):
        MarkovHead.from_tensors({"rnn_head.weight": head.w2})
    with pytest.raises(ValueError, match=r"also has markov_head\.gate\.weight"):
        MarkovHead.from_tensors({**tensors, "markov_head.gate.weight": head.w1})


@pytest.mark.parametrize(
    ("w1", "w2", "message"),
    [
        (torch.zeros(4, 2), torch.zeros(4, 2, dtype=BF16), "w1 must be"),
        (torch.zeros(4, 2, dtype=BF16), torch.zeros(4, dtype=BF16), "w2 must be"),
        (torch.zeros(4, 2, dtype=BF16), torch.zeros(4, 3, dtype=BF16), "ranks 2 and 3"),
        (torch.zeros(3, 2, dtype=BF16), torch.zeros(4, 2, dtype=BF16), "w1 has 3 rows but w2 can draft 4"),
        (torch.zeros(0, 2, dtype=BF16), torch.zeros(0, 2, dtype=BF16), "non-empty"),
    ],
)
def test_bad_weights(w1: torch.Tensor, w2: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MarkovHead(w1, w2)


def test_approximate_has_no_oracle() -> None:
    head = MarkovHead.synthetic(4, 2)
    with pytest.raises(ValueError, match="no oracle"):
        head.step_logits(torch.tensor([0]), base_logits(1, 4, 0), Rounding.APPROXIMATE)
