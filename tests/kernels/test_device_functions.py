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
from kernels.backends import resident_sm90
from kernels.build import BuildError
from kernels.device import CONFIGS, load
from kernels.packing import latent_records
from kernels.placement import LATENT_BYTES, LOOP_BYTES, RANK, WARPS
from kernels.quantize import two_planes
from kernels.synthetic import synthetic_inputs

HoldInCpp = Callable[[str, Iterable[str]], None]
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


def test_constants_that_python_repeats(hold_in_cpp: HoldInCpp) -> None:
    devices = [load(path.stem) for path in CONFIGS.glob("*.yaml")]
    most_sms = max(device.sms for device in devices)
    most_rows = max(device.smem_bytes_per_cta for device in devices) // (4 + 2)  # a row scale and one base logit each
    record_bytes = latent_records(two_planes(synthetic_inputs(RANK, 1, 1).base_logits[0])).shape[1]
    shape = "wts::Resident<wts::ResidentShape{6, 3, 132, false}>"
    hold_in_cpp(
        '#include "walk_resident.cuh"',
        [
            f"wts::kRank == {RANK}",
            f"wts::kMaxSteps == {persistent.MAX_STEPS}",
            f"wts::LatentInt8::kRecordBytes == {record_bytes}",
            f"wts::LatentInt8::kSmemBytes == {LATENT_BYTES} && wts::LatentBf16::kSmemBytes <= {LATENT_BYTES}",
            f"wts::LatentBf16::kRecordBytes == {2 * RANK}",
            f"OFFSET(base, {shape}::Smem) - OFFSET(shared, {shape}::Smem) == {LOOP_BYTES}",
            f"{shape}::kWarps == {WARPS} && {shape}::kThreads == {resident_sm90._THREADS}",
            f"2 * wts::Mailboxes<{most_sms}>::kCopies * wts::Mailboxes<{most_sms}>::kSlots <= {persistent._EXCHANGE_WORDS}",
            f"2 * wts::KeyCountPair<{most_sms}>::kBank <= {persistent._EXCHANGE_WORDS}",
            f"64 * wts::Mailboxes<{most_sms}>::kPairs >= {most_sms} && 64 * wts::Mailboxes<132>::kPairs >= 132",
            f"wts::kLastRow > {most_rows}",
        ],
    )
    for template in persistent.EXCHANGES.values():
        hold_in_cpp('#include "common/exchange.cuh"', [f"sizeof(wts::{template}<132>) > 0"])
