"""The checker: right tokens pass, planted wrong ones are caught, true near ties are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.agreement import check, stray_logits
from kernels.heads.markov import MarkovHead
from kernels.reference import walk
from kernels.sampling import Draws, draw, gumbel_scores, is_sampled
from kernels.synthetic import synthetic_inputs
from kernels.walk import NanRule, NoiseRule, Rounding, WalkInputs

pytestmark = pytest.mark.usefixtures("one_thread")
BF16 = torch.bfloat16
EXACT = [Rounding.TWICE, Rounding.ONCE, Rounding.NEVER, Rounding.INT8]
ROUNDED = [Rounding.TWICE, Rounding.ONCE, Rounding.NEVER]


def one_step(base: list[float], bias: list[float] | None = None, dtype: torch.dtype = BF16) -> tuple[MarkovHead, WalkInputs]:
    """A walk of one step at rank 1 with the given base and bias."""
    vocab = len(base)
    w2 = torch.tensor(bias or [0.0] * vocab, dtype=BF16)[:, None]
    head = MarkovHead(torch.ones(vocab, 1, dtype=BF16), w2)
    zero = torch.zeros(1, dtype=torch.int64)
    return head, WalkInputs(torch.tensor([[base]], dtype=dtype), zero, torch.zeros(1), zero)


def chosen(token: int) -> torch.Tensor:
    return torch.tensor([[token]])


@given(seed=st.integers(0, 999), rounding=st.sampled_from(EXACT), rule=st.sampled_from(list(NanRule)), exact=st.booleans())
def test_the_oracle_agrees_with_itself(seed: int, rounding: Rounding, rule: NanRule, exact: bool) -> None:
    head, inputs = MarkovHead.synthetic(61, 16, seed), synthetic_inputs(61, 6, 2, seed)
    inputs.base_logits[0, 2, seed % 61] = torch.nan
    inputs.base_logits[1, 3] = -torch.inf
    agreement = check(walk(head, inputs, rounding, rule).tokens, head, inputs, rounding, rule, exact)
    assert agreement.ok
    assert (agreement.tokens, agreement.mismatches, agreement.near_ties, agreement.worst_gap) == (12, 0, 0, 0.0)


@given(seed=st.integers(0, 999), step=st.integers(0, 5), request_row=st.integers(0, 1), rounding=st.sampled_from(EXACT))
def test_a_planted_wrong_token_is_one_mismatch(seed: int, step: int, request_row: int, rounding: Rounding) -> None:
    head, inputs = MarkovHead.synthetic(61, 16, seed), synthetic_inputs(61, 6, 2, seed)
    tokens = walk(head, inputs, rounding).tokens
    worst = int(inputs.base_logits[request_row, step].argmin())
    tokens[request_row, step] = worst
    teacher = walk(head, inputs, rounding, teacher=tokens).tokens
    tokens[:, step + 1 :] = teacher[:, step + 1 :]  # may leave later steps that no longer follow their own past
    agreement = check(tokens, head, inputs, rounding)
    assert not agreement.ok
    assert agreement.mismatches >= 1
    assert f"request {request_row} step {step}: token {worst} " in agreement.reason
    assert agreement.worst_gap > 1.0


@pytest.mark.parametrize("token", [-1, 61, 2**31 - 1])
@pytest.mark.parametrize("rounding", EXACT)
def test_tokens_outside_the_vocabulary_are_wrong(token: int, rounding: Rounding) -> None:
    head, inputs = MarkovHead.synthetic(61, 16, 0), synthetic_inputs(61, 1, 1, 0)
    agreement = check(chosen(token), head, inputs, rounding)
    assert agreement.mismatches == 1
    assert f"token {token} is outside [0, 61)" in agreement.reason


def test_a_poisoned_row_of_equal_logits_is_wrong_too() -> None:
    head, inputs = one_step([0.0, 0.0])
    for token in (-1, 2):  # clamped, both would be the tie
        assert check(chosen(token), head, inputs, Rounding.TWICE).mismatches == 1


def test_near_ties_are_accepted_up_to_the_bound_and_not_beyond() -> None:
    """At rank 1, base 0, b = 1 the bound of NEVER is 3 * 2^-23 for either token: less than 6 * 2^-23 passes."""
    ulp = 2.0**-23
    for distance, near in ((2, True), (5, True), (6, False), (8, False)):  # fp32 just above 1 steps by 2^-23
        head, inputs = one_step([distance * ulp, 0.0], [1.0, 1.0], torch.float32)
        agreement = check(chosen(1), head, inputs, Rounding.NEVER)
        assert (agreement.ok, agreement.near_ties, agreement.mismatches) == (near, int(near), int(not near)), distance
        assert agreement.worst_gap == distance * ulp
        assert not check(chosen(1), head, inputs, Rounding.NEVER, exact=True).ok


def test_one_ulp_is_granted_only_across_a_rounding_boundary() -> None:
    """257 lies on the boundary between bf16 256 and 258, 256.5 does not; both logits of the oracle are 256 against 258."""
    boundary, inputs = one_step([257.0, 258.0], dtype=torch.float32)
    assert check(chosen(0), boundary, inputs, Rounding.ONCE).near_ties == 1
    inside, inputs = one_step([256.5, 258.0], dtype=torch.float32)
    agreement = check(chosen(0), inside, inputs, Rounding.ONCE)
    assert agreement.mismatches == 1
    assert agreement.worst_gap == 2.0


def test_a_twice_rounded_bias_may_flip_where_the_bias_is_on_a_boundary() -> None:
    """w.u = 257 exactly (rank 2: 256 + 1) rounds to 256 or, a hair higher, to 258."""
    w1, zero = torch.tensor([[256.0, 1.0]] * 2, dtype=BF16), torch.zeros(1, dtype=torch.int64)
    head = MarkovHead(w1, torch.tensor([[1.0, 1.0], [1.0, 0.0]], dtype=BF16))
    inputs = WalkInputs(torch.tensor([[[0.0, 1.98]]], dtype=BF16), zero, torch.zeros(1), zero)
    assert walk(head, inputs, Rounding.TWICE).tokens.item() == 1
    assert check(chosen(0), head, inputs, Rounding.TWICE).near_ties == 1
    inputs = WalkInputs(torch.tensor([[[0.0, 4.0]]], dtype=BF16), zero, torch.zeros(1), zero)
    assert check(chosen(0), head, inputs, Rounding.TWICE).mismatches == 1


@pytest.mark.parametrize("rounding", EXACT)
def test_a_tie_taken_at_the_higher_index_is_wrong_where_sums_leave_no_choice(rounding: Rounding) -> None:
    head, inputs = one_step([1.0, 3.0, 3.0])
    assert check(chosen(1), head, inputs, rounding).ok
    agreement = check(chosen(2), head, inputs, rounding)
    assert agreement.ok == (rounding is Rounding.NEVER)  # unrounded fp32 sums may differ; these bf16 ones cannot
    assert agreement.worst_gap == 0.0


def test_int8_never_grants_a_tie() -> None:
    head, inputs = one_step([1.0, 3.0, 3.0 - 2.0**-6])
    assert check(chosen(2), head, inputs, Rounding.INT8).mismatches == 1


def test_nan_rules() -> None:
    head, inputs = one_step([1.0, torch.nan, 3.0, torch.nan])
    for rounding in EXACT:
        for token in range(4):
            assert check(chosen(token), head, inputs, rounding, NanRule.LOSES).ok == (token == 2)
            assert check(chosen(token), head, inputs, rounding, NanRule.WINS).ok == (token == 1)


def test_a_row_with_nobody_above_minus_infinity_must_give_token_0() -> None:
    head, inputs = one_step([-torch.inf] * 3)
    for rounding in EXACT:
        assert check(chosen(0), head, inputs, rounding).ok
        assert not check(chosen(1), head, inputs, rounding).ok


@given(seed=st.integers(0, 999))
def test_an_honest_fp32_walk_in_another_order_always_passes(seed: int) -> None:
    head, inputs = MarkovHead.synthetic(97, 64, seed), synthetic_inputs(97, 8, 2, seed, base_std=0.01)
    for rounding in ROUNDED:
        tokens = torch.empty(2, 8, dtype=torch.int64)
        previous = inputs.anchor
        for step in range(8):
            bias = (head.w1[previous].float()[:, None, :] * head.w2.float()[None]).flip(2).cumsum(2)[..., -1]
            base = inputs.base_logits[:, step].float()
            logits = base + (bias.bfloat16().float() if rounding is Rounding.TWICE else bias)
            previous = (logits if rounding is Rounding.NEVER else logits.bfloat16()).argmax(1)
            tokens[:, step] = previous
        assert check(tokens, head, inputs, rounding).ok


def test_another_rule_does_not_pass_for_this_one() -> None:
    """Near-tie tolerance is not so wide that int8 tokens, or a walk without its head, would pass."""
    head, inputs = MarkovHead.synthetic(2003, 64, 0), synthetic_inputs(2003, 16, 24, 0, base_std=0.2)
    assert not check(walk(head, inputs, Rounding.INT8).tokens, head, inputs, Rounding.NEVER).ok
    assert not check(inputs.base_logits.argmax(2), head, inputs, Rounding.TWICE).ok


def test_stray_logits_are_counted() -> None:
    head, inputs = MarkovHead.synthetic(61, 16, 0), synthetic_inputs(61, 4, 2, 0)
    inputs.base_logits[0, 0, 5] = torch.nan
    result = walk(head, inputs, Rounding.TWICE, keep_logits=True)
    assert result.logits is not None
    logits = result.logits.bfloat16()
    assert stray_logits(logits, result.tokens, head, inputs, Rounding.TWICE) == 0
    logits[0, 0, 5] = 0.0
    logits[1, 3, 7] = torch.nan
    logits[1, 2, 0] += 1.0
    assert stray_logits(logits, result.tokens, head, inputs, Rounding.TWICE) == 3
    assert stray_logits(inputs.base_logits, result.tokens, head, inputs, Rounding.TWICE) > 100


def mixed_inputs(vocab: int, steps: int, seed: int = 0, base_std: float = 2.0) -> WalkInputs:
    """Five requests: greedy, T = 1, NaN (greedy), T = 0.6, T = 2."""
    inputs = synthetic_inputs(vocab, steps, 5, seed, base_std=base_std)
    return replace(inputs, temperature=torch.tensor([0.0, 1.0, torch.nan, 0.6, 2.0]))


SAMPLED_ROWS = (1, 3, 4)


@pytest.mark.parametrize("noise", [NoiseRule.GUMBEL, NoiseRule.GROUPS])
@pytest.mark.parametrize("rounding", EXACT)
def test_a_drawn_walk_agrees_with_its_own_noise_only(noise: NoiseRule, rounding: Rounding) -> None:
    head, inputs = MarkovHead.synthetic(203, 16, 0), mixed_inputs(203, 6)
    tokens = walk(head, inputs, rounding, noise=noise, round=7).tokens
    agreement = check(tokens, head, inputs, rounding, noise=noise, round=7)
    assert (agreement.tokens, agreement.mismatches, agreement.near_ties, agreement.worst_gap) == (30, 0, 0, 0.0)
    other = NoiseRule.GROUPS if noise is NoiseRule.GUMBEL else NoiseRule.GUMBEL
    for wrong in (
        check(tokens, head, inputs, rounding, noise=noise, round=8),
        check(tokens, head, inputs, rounding, noise=other, round=7),
        check(tokens, head, replace(inputs, seed=inputs.seed + 1), rounding, noise=noise, round=7),
        check(tokens, head, replace(inputs, temperature=inputs.temperature * 1.5), rounding, noise=noise, round=7),
    ):
        assert wrong.mismatches > 2
    with pytest.raises(ValueError, match="or `noise`"):
        check(tokens, head, inputs, rounding)


@pytest.mark.parametrize("noise", list(NoiseRule))
@pytest.mark.parametrize("row", range(5))
def test_a_planted_wrong_token_of_a_mixed_batch_is_caught(noise: NoiseRule, row: int) -> None:
    """Also under LIBRARY: there a wrong token of a sampled row is one that cannot be drawn."""
    head, inputs = MarkovHead.synthetic(203, 16, 0), mixed_inputs(203, 4)
    inputs.base_logits[:, 2, 9], inputs.base_logits[:, 2, 11] = -torch.inf, torch.nan
    drawn = NoiseRule.GUMBEL if noise is NoiseRule.LIBRARY else noise
    right = walk(head, inputs, Rounding.INT8, noise=drawn, round=1).tokens
    assert check(right, head, inputs, Rounding.INT8, noise=noise, round=1).ok
    for token in (9, 11, -1, 203):
        tokens = right.clone()
        tokens[row, 2] = token
        tokens[row, 3] = walk(head, inputs, Rounding.INT8, teacher=tokens, noise=drawn, round=1).tokens[row, 3]
        agreement = check(tokens, head, inputs, Rounding.INT8, noise=noise, round=1)
        assert agreement.mismatches == 1
        assert f"request {row} step 2: token {token} " in agreement.reason


def test_library_noise_frees_sampled_rows_within_the_support_only() -> None:
    head, inputs = MarkovHead.synthetic(203, 16, 0), mixed_inputs(203, 1)
    inputs.base_logits[3] = -torch.inf
    for row in range(5):
        tokens = walk(head, inputs, Rounding.TWICE, noise=NoiseRule.GUMBEL).tokens
        tokens[row, 0] = (tokens[row, 0] + 1) % 203
        free = row in SAMPLED_ROWS and row != 3  # request 3 has nobody to draw: only token 0 is right
        assert check(tokens, head, inputs, Rounding.TWICE, noise=NoiseRule.LIBRARY).ok == free
        wrong = check(tokens, head, inputs, Rounding.TWICE, exact=True, noise=NoiseRule.GUMBEL)
        assert not wrong.ok
        assert (wrong.worst_gap > 0) == (row not in SAMPLED_ROWS), "a gap of logits says nothing of a drawn token"


def test_fp32_sums_in_another_order_pass_for_the_gumbel_rule() -> None:
    head, inputs = MarkovHead.synthetic(97, 64, 1), mixed_inputs(97, 8, 1, base_std=0.01)
    for round in range(8):
        tokens, previous = torch.empty(5, 8, dtype=torch.int64), inputs.anchor
        for step in range(8):
            bias = (head.w1[previous].float()[:, None, :] * head.w2.float()[None]).flip(2).cumsum(2)[..., -1]
            logits = (inputs.base_logits[:, step].float() + bias).bfloat16().float()
            previous = tokens[:, step] = draw(logits, inputs.temperature, inputs.seed, step, round, NoiseRule.GUMBEL)
        agreement = check(tokens, head, inputs, Rounding.ONCE, noise=NoiseRule.GUMBEL, round=round)
        assert agreement.ok, agreement.reason
        assert not check(tokens, head, inputs, Rounding.ONCE, noise=NoiseRule.GUMBEL, round=round + 1).ok


def test_a_near_tie_of_scores_is_granted_by_the_gumbel_rule_alone() -> None:
    """257 lies on a bf16 boundary: the oracle sees 256, a kernel may see 258. So token 0 may win while its noise is less than 2 behind."""
    head, inputs = one_step([257.0, 256.0], dtype=torch.float32)
    found = set()
    for seed in range(40):
        inputs = replace(inputs, temperature=torch.ones(1), seed=torch.tensor([seed]))
        behind = gumbel_scores(torch.zeros(1, 2), Draws.of(inputs.temperature, inputs.seed, 0, 0))[0].diff().item()
        agreement = check(chosen(0), head, inputs, Rounding.ONCE, noise=NoiseRule.GUMBEL)
        assert (agreement.ok, agreement.near_ties) == (behind < 2, int(0 < behind < 2)), seed
        found.add((agreement.ok, agreement.near_ties))
        allowed = [check(chosen(token), head, inputs, Rounding.ONCE, noise=NoiseRule.GROUPS).ok for token in (0, 1)]
        assert sum(allowed) == 1
    assert found == {(True, 0), (True, 1), (False, 0)}


def test_stray_logits_of_sampled_rows_alone() -> None:
    head, inputs = MarkovHead.synthetic(61, 16, 0), mixed_inputs(61, 3)
    result = walk(head, inputs, Rounding.INT8, keep_logits=True, noise=NoiseRule.GUMBEL)
    assert result.logits is not None
    sampled = is_sampled(inputs.temperature)
    assert sampled.nonzero().flatten().tolist() == list(SAMPLED_ROWS)
    logits = result.logits.bfloat16() * sampled[:, None, None]  # greedy rows stay zero
    assert stray_logits(logits, result.tokens, head, inputs, Rounding.INT8, sampled) == 0
    assert stray_logits(logits, result.tokens, head, inputs, Rounding.INT8) > 300
    logits[4, 1, 2] += 1.0
    assert stray_logits(logits, result.tokens, head, inputs, Rounding.INT8, sampled) == 1


def test_wrong_shapes_are_errors() -> None:
    head, inputs = MarkovHead.synthetic(8, 4), synthetic_inputs(8, 3)
    for tokens in (torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"tokens must be \[1, 3\] int64"):
            check(tokens, head, inputs, Rounding.TWICE)
    with pytest.raises(ValueError, match="no oracle"):
        check(torch.zeros(1, 3, dtype=torch.int64), head, inputs, Rounding.APPROXIMATE)
