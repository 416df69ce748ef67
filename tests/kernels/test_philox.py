"""Philox4x32-10 against the published answers, on the host and in CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch

from kernels.philox import philox, philox_key

pytestmark = pytest.mark.usefixtures("one_thread")
# Random123, tests/kat_vectors: philox4x32 with 10 rounds.
ONES = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    assert philox(torch.tensor(counter), torch.tensor(key)).tolist() == list(words)


def test_known_answers_in_cuda(hold_in_cpp: Callable[[str, Iterable[str]], None]) -> None:
    def facts(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> Iterable[str]:
        call = f"wts::philox({{{{{', '.join(f'{c}u' for c in counter)}}}}}, {{{key[0]}u, {key[1]}u}})"
        return (f"{call}.w[{i}] == {word}u" for i, word in enumerate(words))

    hold_in_cpp('#include "common/philox.cuh"', [fact for known in KNOWN for fact in facts(*known)])


def test_keys_are_the_two_words_of_a_seed_in_twos_complement(hold_in_cpp: Callable[[str, Iterable[str]], None]) -> None:
    seeds = {
        0: (0, 0),
        1: (1, 0),
        -1: (ONES, ONES),
        2**32: (0, 1),
        -(2**63): (0, 2**31),
        2**63 - 1: (ONES, 2**31 - 1),
        -2: (ONES - 1, ONES),
    }
    assert philox_key(torch.tensor(list(seeds))).tolist() == [list(key) for key in seeds.values()]
    facts = [
        f"wts::philox_key({seed + 1}ll - 1).lo == {lo}u && wts::philox_key({seed + 1}ll - 1).hi == {hi}u"
        for seed, (lo, hi) in seeds.items()
        if seed < 2**63 - 1
    ]
    hold_in_cpp('#include "common/philox.cuh"', facts)


def test_counters_and_keys_broadcast() -> None:
    counters, keys = torch.arange(24).view(3, 2, 4), torch.arange(6).view(3, 1, 2)
    together = philox(counters, keys)
    assert together.shape == (3, 2, 4)
    for i in range(3):
        for j in range(2):
            assert torch.equal(philox(counters[i, j], keys[i, 0]), together[i, j])


def test_every_bit_is_fair() -> None:
    """50,000 words at neighbouring counters: each of the 128 bits is set half the time, and flips half the time from one to the next."""
    counters = torch.zeros(50_000, 4, dtype=torch.int64)
    counters[:, 0] = torch.arange(50_000)
    words = philox(counters, torch.tensor([7, 0]))
    bits = (words[..., None] >> torch.arange(32)) & 1
    for share in (bits.double().mean(0), (bits[1:] ^ bits[:-1]).double().mean(0)):
        assert (share - 0.5).abs().max() < 5 * 0.5 / 50_000**0.5
