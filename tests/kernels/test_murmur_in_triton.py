"""The device twin of `kernels.murmur`: words bit for bit, noise within the platform's logarithms."""

from __future__ import annotations

import pytest
import torch

from kernels import murmur

pytest.importorskip("triton", reason="needs Triton; install it with: pip install -e '.[gpu]'")
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from kernels.triton.murmur import hashed_gumbel, hashed_uniform, hashed_word  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy talks about the hash's overflow
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N = 256


@triton.jit
def _words(seeds, position, words, BLOCK: tl.constexpr):
    row, last = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds + row)
    tl.store(words + row * BLOCK * tl.num_programs(1) + last, hashed_word(seed, seed >> 32, tl.load(position), last).to(tl.int64))


@triton.jit
def _noise(words, uniform, gumbel, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + at).to(tl.uint32)
    tl.store(uniform + at, hashed_uniform(word))
    tl.store(gumbel + at, hashed_gumbel(word))


@pytest.mark.parametrize(("round", "step"), [(0, 0), (3, 15), (1 << 22, 255), ((1 << 24) - 1, 7)])
def test_words_are_the_hosts(round: int, step: int) -> None:
    seeds = torch.tensor([0, 1, -1, 42, 1 << 32, -(1 << 63), (1 << 63) - 1], device=DEVICE)
    position = torch.tensor([murmur.position_of(round, step)], device=DEVICE)
    words = torch.empty(len(seeds), 2 * N, dtype=torch.int64, device=DEVICE)
    _words[(len(seeds), 2)](seeds, position, words, BLOCK=N)
    assert torch.equal(words, murmur.hashed_words(seeds, int(position), torch.arange(2 * N, device=DEVICE)))


def test_noise_is_the_hosts_up_to_logarithms() -> None:
    edges = [0, 1, 2, 1 << 16, (1 << 30) - 1, 1 << 30, (1 << 32) - 1, (1 << 32) - 2, (1 << 32) - 1 << 16 & (1 << 32) - 1]
    words = torch.randint(1 << 32, (4 * N,), generator=torch.Generator().manual_seed(0))
    words[: len(edges)] = torch.tensor(edges)
    words = words.to(DEVICE)
    uniform, gumbel = (torch.empty(len(words), device=DEVICE) for _ in range(2))
    _noise[(4,)](words, uniform, gumbel, BLOCK=N)
    assert torch.equal(uniform, murmur.uniform(words))
    expected = murmur.gumbel(uniform)
    assert ((gumbel - expected).abs() <= murmur.score_slack(expected, expected)).all()
    assert float(gumbel.min()) > -2.9
    assert float(gumbel.max()) < 22.9
