"""Device functions that decide results, evaluated by the compiler and held against a Python model; constants that Python repeats."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import persistent
from kernels.backends.streaming_sm90 import StreamingOptions, StreamingSm90
from kernels.build import BuildError
from kernels.device import CONFIGS, load
from kernels.packing import latent_records
from kernels.placement import LATENT_BYTES, RANK, BatchedPlacement, Placement, latent_slots, plan
from kernels.quantize import two_planes
from kernels.synthetic import synthetic_inputs

HoldInCpp = Callable[[str, Iterable[str]], None]
CudaShape = Callable[[Placement | BatchedPlacement], str]
H200 = load("h200")
MINUS_ZERO = 0x8000
SPECIAL = [0xFF80, 0xFF7F, 0xBF80, 0x8080, 0x807F, 0x8001, 0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x7F7F, 0x7F80]  # -inf to inf


def value_of(bf16: int) -> float:
    return struct.unpack(">f", struct.pack(">HH", bf16, 0))[0]


def is_logit(bf16: int) -> bool:
    """Neither NaN nor -0: the caller has turned these into -inf and +0."""
    return not math.isnan(value_of(bf16)) and bf16 != MINUS_ZERO


def place_of(bf16: int) -> int:
    """[0, 65536): the order of bf16 values by sign and magnitude."""
    return 0x8000 + bf16 if bf16 < 0x8000 else 0x7FFF - (bf16 - 0x8000)


def key_of(bf16: int, row: int) -> int:
    return place_of(bf16) << 16 | (0xFFFF - row)


LOGITS = st.integers(0, 0xFFFF).filter(is_logit) | st.sampled_from(SPECIAL)
CANDIDATES = st.tuples(LOGITS, st.integers(0, 0xFFFE))


@given(a=CANDIDATES, b=CANDIDATES)
def test_the_models_larger_key_is_the_larger_logit_then_the_lower_row(a: tuple[int, int], b: tuple[int, int]) -> None:
    assert (key_of(*a) > key_of(*b)) == ((value_of(a[0]), -a[1]) > (value_of(b[0]), -b[1]))


def samples() -> list[tuple[int, int]]:
    draw = random.Random(0)
    logits = SPECIAL + [bits for bits in (draw.randrange(0x10000) for _ in range(300)) if is_logit(bits)]
    return [(bits, draw.choice([0, 1, 8, 1151, 0xFFFE, draw.randrange(0xFFFF)])) for bits in logits]


def test_keys_in_cuda_are_the_models(hold_in_cpp: HoldInCpp) -> None:
    def facts(bf16: int, row: int) -> Iterable[str]:
        key = f"wts::candidate_key({bf16 << 16:#x}u, {row}u)"
        return f"{key} == {key_of(bf16, row):#x}u", f"wts::key_row({key}) == {row}u", f"wts::key_order({key}) == {place_of(bf16)}u"

    hold_in_cpp('#include "common/key.cuh"', [fact for sample in samples() for fact in facts(*sample)])


def test_keys_in_cuda_rise_with_the_logit_and_fall_with_the_row(hold_in_cpp: HoldInCpp) -> None:
    ranked = sorted(
        {*samples(), *((bits, row) for bits in SPECIAL for row in (0, 1, 1151))}, key=lambda each: (value_of(each[0]), -each[1])
    )
    keys = [f"wts::candidate_key({bits << 16:#x}u, {row}u)" for bits, row in ranked]
    hold_in_cpp('#include "common/key.cuh"', [f"{low} < {high}" for low, high in pairwise(keys)] + [f"{keys[0]} > 0"])


def test_a_false_fact_is_refused(hold_in_cpp: HoldInCpp) -> None:
    with pytest.raises(BuildError, match="static assertion failed"):
        hold_in_cpp('#include "common/key.cuh"', [f"wts::candidate_key(0, 0) == {key_of(0, 0) + 1:#x}u"])


def test_the_better_candidate_and_its_ties(hold_in_cpp: HoldInCpp) -> None:
    cases = [("1.0f", "2.0f", 9), ("2.0f", "1.0f", 4), ("1.0f", "1.0f", 4), ("-0.0f", "0.0f", 4), ("0.0f", "-0.0f", 4)]
    cases += [("wts::kMinusInfinity", "wts::kMinusInfinity", 4), ("wts::kMinusInfinity", "-3e38f", 9), ("-1.0f", "wts::kMinusInfinity", 4)]
    hold_in_cpp('#include "common/key.cuh"', [f"wts::Candidate::better({{{a}, 4u}}, {{{b}, 9u}}).row == {row}u" for a, b, row in cases])


def float_of(bits: int) -> float:
    return struct.unpack(">f", struct.pack(">I", bits))[0]


def order_of(bits: int) -> int:
    """[0, 2^32): the order of fp32 values by sign and magnitude; -0 is +0."""
    return 0x80000000 + bits if bits < 0x80000000 else 0x80000000 if bits == 0x80000000 else 0xFFFFFFFF - bits


def wide_key_of(bits: int, row: int) -> int:
    return order_of(bits) << 16 | (0xFFFF - row)


FLOATS = st.integers(0, 2**32 - 1).filter(lambda bits: not math.isnan(float_of(bits))) | st.sampled_from([bits << 16 for bits in SPECIAL])


@given(a=st.tuples(FLOATS, st.integers(0, 0xFFFE)), b=st.tuples(FLOATS, st.integers(0, 0xFFFE)))
def test_the_models_larger_wide_key_is_the_larger_score_then_the_lower_row(a: tuple[int, int], b: tuple[int, int]) -> None:
    assert (wide_key_of(*a) > wide_key_of(*b)) == ((float_of(a[0]), -a[1]) > (float_of(b[0]), -b[1]))


def test_orders_of_scores_and_of_both_keys_in_cuda_are_the_models(hold_in_cpp: HoldInCpp) -> None:
    draw = random.Random(1)
    scores = [bits << 16 for bits in SPECIAL] + [0x80000000, 1, 0x80000001]
    scores += [bits for bits in (draw.randrange(2**32) for _ in range(200)) if not math.isnan(float_of(bits))]
    facts = [f"wts::order_of_bits({bits:#x}u) == {order_of(bits):#x}u" for bits in scores]
    for bits in scores:
        row = draw.choice([0, 1, 0xFFFE, draw.randrange(0xFFFF)])
        key = f"{wide_key_of(bits, row):#x}ull"
        facts += [f"wts::WideKey::order({key}) == {order_of(bits):#x}u", f"wts::key_row(static_cast<unsigned>({key})) == {row}u"]
    for bf16, row in samples():  # a greedy walk's order of a bf16 logit is that of the same fp32, as far as a bf16 goes
        facts.append(f"wts::NarrowKey::order({key_of(bf16, row):#x}u) == {order_of(bf16 << 16) & 0xFFFF0000:#x}u")
    hold_in_cpp('#include "common/key.cuh"', facts)


def test_constants_that_python_repeats(hold_in_cpp: HoldInCpp) -> None:
    most_sms = max(load(path.stem).sms for path in CONFIGS.glob("*.yaml"))
    mailboxes, two = f"wts::Mailboxes<{most_sms}>", f"2 * wts::KeyCountPair<{most_sms}"
    pairs = [
        f"{two}, {n}>::kPairs * wts::KeyCountPair<{most_sms}, {n}>::kStride <= {persistent._PAIR_WORDS} * {n}"
        for n in (1, 2, 4, 16, 32, 64)
    ]
    hold_in_cpp(
        '#include "common/exchange.cuh"',
        [
            f"wts::kMaxSteps == {persistent.MAX_STEPS}",
            *pairs,
            f"2 * {mailboxes}::kCopies * {mailboxes}::kSlots <= {persistent._MAILBOX_WORDS}",
            f"64 * {mailboxes}::kPairs >= {most_sms} && 64 * wts::Mailboxes<132>::kPairs >= 132",
            *(f"sizeof(wts::{template}<132>) > 0" for template in persistent.EXCHANGES.values()),
        ],
    )


def test_latents_are_as_large_as_the_planner_thinks(hold_in_cpp: HoldInCpp, cuda_shape: CudaShape) -> None:
    records = {"int8": latent_records(two_planes(synthetic_inputs(RANK, 1, 1).base_logits[0])).shape[1], "bf16": 2 * RANK}
    facts = [f"wts::kRank == {RANK}"]
    for weights, batch in (("int8", 1), ("int8", 4), ("int8", 8), ("bf16", 2)):
        latent = f"wts::Resident<{cuda_shape(plan(1_000, RANK, H200, weights=weights, batch=batch))}>::Latent"
        facts += [
            f"{latent}::kSlotBytes == {LATENT_BYTES[weights]} && {latent}::kRecordBytes == {records[weights]}",
            f"{latent}::kSlots == {latent_slots(batch)} && {latent}::kSmemBytes == {latent_slots(batch) * LATENT_BYTES[weights]}",
        ]
    hold_in_cpp('#include "walk_resident.cuh"', facts)


def test_rows_of_a_cta_fit_a_key(hold_in_cpp: HoldInCpp) -> None:
    """A row must be below kLastRow. Shared memory runs out before."""
    last = 0xFFFF
    hold_in_cpp('#include "common/key.cuh"', [f"wts::kLastRow == {last}"])
    assert H200.smem_bytes_per_cta // 4 < last, "an fp32 row scale each, in every int8 walk"
    assert StreamingSm90(StreamingOptions(weights="bf16")).smem_bytes(last, 1) > H200.smem_bytes_per_cta
