"""`python -m kernels.placement`: every byte is told once, capacities beside it; a refusal is one sentence. No torch takes part."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.cost import predict, rates
from kernels.device import load
from kernels.placement import BatchedPlacement, plan
from kernels.plan_report import main, report, shares
from kernels.unsupported import Unsupported

ROOT = Path(__file__).resolve().parent.parent.parent
H200 = load("h200")


@given(
    st.integers(1, 700_000),
    st.sampled_from([1, 2, 3, 4, 5, 8, 9, 16, 32, 64]),
    st.integers(1, 32),
    st.booleans(),
    st.sampled_from(["int8", "bf16"]),
)
def test_every_byte_is_told_once(vocab: int, batch: int, steps: int, sampling: bool, weights: str) -> None:
    try:
        placed = plan(vocab, 256, H200, batch=batch, steps=steps, sampling=sampling, weights=weights)
    except Unsupported:
        return
    told = shares(placed, H200)
    shared = {share.what: share.cta_bytes for share in told if share.place == "shared memory"}
    total = shared.pop("total")
    assert total == placed.smem_bytes_per_cta == sum(shared.values())
    assert min(share.cta_bytes for share in told) >= 0
    weight = [share.cta_bytes for share in told if share.what.startswith("W2")]
    row_bytes = 512 if placed_weights(placed) == "bf16" else 256
    assert sum(weight) == placed.rows_per_cta * row_bytes, "registers, shared memory and the stream hold every row"
    assert all(share.cta_bytes <= share.capacity_bytes for share in told if share.capacity_bytes)
    text = report(placed, H200)
    assert f"{placed.ctas * placed.smem_bytes_per_cta:,}" in text
    assert f"{placed.streamed_bytes:,}" in text


def placed_weights(placed: object) -> str:
    return "int8" if isinstance(placed, BatchedPlacement) else getattr(placed, "weights", "")


def test_the_papers_head(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--vocab", "151936"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "W2 [151,936, 256] in int8 (38.9 MB) on h200: up to 1 request, up to 16 steps, greedy.",
        "132 of 132 SMs, 152,064 rows.",
        "registers W2, 6 tiles a warp (192 a thread) 196,608 262,144 75% 25,952,256",
        "shared memory W2, 3 tiles a warp 98,304 12,976,128",
        "shared memory base logits of 16 steps 36,864 4,866,048",
        "L2, every step W2, streamed (L2 has 62,914,560) 0 0",
        "kernels/cost.py says where that does not hold",
    ):
        assert words in text
    cost = predict(plan(151_936, 256, H200), rates("h200"))
    assert f"{cost.entry_us:.1f} us to enter and {cost.step_us:.2f} us a step; {cost.at(16):.1f} us at 16 steps" in text


def test_what_is_streamed_and_what_costs_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--vocab", "248320", "--batch", "64", "--sampling", "--device", "h100"]) == 0
    text = capsys.readouterr().out
    placed = plan(248_320, 256, load("h100"), batch=64, sampling=True)
    assert f"{placed.streamed_bytes:,}" in text
    assert placed.streamed_bytes > 0
    assert "up to 64 requests" in text
    assert "Expected cost: unknown; no rates of device=h100 were measured" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vocab", "151936", "--rank", "128"], "serves rank 256 only; got rank 128"),
        (["--vocab", "151936", "--device", "b200"], "device=b200 is sm_100a"),
        (["--vocab", "151936", "--batch", "65"], "got batch 65"),
        (["--vocab", "9000000"], "bytes of shared memory a CTA"),
        (["--vocab", "0"], "at least 1"),
        (["--vocab", "1000", "--rf-tiles", "99"], "got 99"),
    ],
)
def test_a_refusal_is_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("placement: ")
    assert words in err


def test_the_command_needs_no_torch() -> None:
    program = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv[0] = 'x'; runpy.run_module('kernels.placement', run_name='__main__')"
    )
    done = {
        arguments: subprocess.run([sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
        for arguments in (("--help",), ("--vocab", "129280"), ("--vocab", "1", "--rank", "3"))
    }
    assert [run.returncode for run in done.values()] == [0, 0, 2], [run.stderr for run in done.values()]
    texts = [run.stdout for run in done.values()]
    assert "Where a resident walk keeps every byte of W2" in " ".join(texts[0].split())
    assert "W2 [129,280, 256] in int8" in texts[1]
