"""Walks that do a part of every step twice, as machine code: both passes are in it, whole, and one after the other. No GPU."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kernels.backends.resident_sm90 import TWICE, ResidentOptions, ResidentSm90
from kernels.device import load
from kernels.walk import Limits

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings; install it with: pip install -e '.[gpu]'")
TRITON = find_spec("triton")
NVDISASM = [program for place in (TRITON and TRITON.submodule_search_locations) or () for program in Path(place).rglob("bin/nvdisasm")]
pytestmark = pytest.mark.skipif(not NVDISASM, reason="needs nvdisasm, which comes with Triton: pip install triton")

# What can be told of a part by its instructions. A poll reads key and count.
MARKS = {
    "mma": r"IMMA\.",
    "logits": r"F2FP\.BF16",
    "max": r"REDUX\.",
    "barrier": r"BAR\.SYNC",
    "post key": r"REDG\.E\.MAX\.64",
    "post count": r"REDG\.E\.ADD\.64",
    "poll": r"LDG\.E\.128\.STRONG",
    "copy": r"LDGSTS\.",
    "landed": r"DEPBAR\.LE SB0, 0x0",
}
# What a step of the walk that does a part twice has more than a plain one.
MORE = {
    "none": {},
    "score": {"barrier": 1},  # the second pass is a turn of a loop
    "reduce": {"max": 2, "barrier": 1},
    "exchange": {"post key": 1, "post count": 1, "poll": 1},
    "latent": {"landed": 1, "copy": 2},
}


@cache
def lines(twice: str) -> list[str]:
    """The kernel for V = 151,936, disassembled: labels and instructions."""
    options = ResidentOptions(rf_tiles=6, twice=twice)
    _, kernel = ResidentSm90(options).fit(151_936, 256, Limits(1, 16), load("h200"))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(kernel.cubin)
        return subprocess.run([NVDISASM[0], "-c", file], capture_output=True, text=True, check=True).stdout.splitlines()


def loops(twice: str) -> list[list[str]]:
    """The marks between every label and a branch back to it, shortest loops first."""
    code, found = lines(twice), []
    labels = {line.strip(" :"): place for place, line in enumerate(code) if line.startswith(".L_")}
    for place, line in enumerate(code):
        target = re.search(r"BRA.*`\((\.L_\w+)\)", line)
        if target and labels[target[1]] < place:
            body = code[labels[target[1]] : place]
            found.append([mark for each in body for mark, pattern in MARKS.items() if re.search(pattern, each)])
    return sorted(found, key=len)


def step(twice: str) -> list[str]:
    """The marks of a step: of the shortest loop that scores and exchanges."""
    return next(marks for marks in loops(twice) if {"mma", "poll"} <= set(marks))


def follow(marks: list[str], *expected: str) -> bool:
    """Whether `expected` stand in `marks` one right after the other."""
    size = len(expected)
    return any(tuple(marks[place : place + size]) == expected for place in range(len(marks) - size + 1))


@pytest.mark.parametrize("twice", TWICE)
def test_a_second_pass_is_whole_and_nothing_else_is_more(twice: str) -> None:
    plain, doubled = Counter(step("none")), Counter(step(twice))
    assert (plain["mma"], plain["logits"]) == (72, 3), "eight k-steps of nine tiles; a pair of rows a lane of each of three groups of tiles"
    assert doubled == plain + Counter(MORE[twice])


def test_the_first_reduction_is_over_before_the_second() -> None:
    assert follow(step("none"), "logits", "max", "barrier", "max", "post key")
    assert follow(step("reduce"), "logits", "max", "barrier", "max", "max", "barrier", "max", "post key")


def test_the_second_post_waits_for_the_first_winner() -> None:
    assert follow(step("exchange"), "post key", "post count", "poll", "post key", "post count")
    assert any(marks == ["poll"] for marks in loops("exchange")), "the first wait fetches nothing"
    assert not any(marks == ["poll"] for marks in loops("none"))


def test_the_second_fetch_waits_for_the_first_to_land() -> None:
    for twice, passes in (("none", 1), ("latent", 2)):
        assert follow(step(twice), *["copy", "copy", "landed"] * passes, "barrier"), "planes, scale"


def test_the_second_scoring_is_the_same_instructions_once_more() -> None:
    def rounds(twice: str) -> list[list[str]]:
        return [marks for marks in loops(twice) if marks.count("mma") == 72 and "poll" not in marks]

    assert rounds("none") == []
    (turn,) = rounds("score")
    assert turn[0] == "barrier"
    assert Counter(turn) == {"barrier": 1, "mma": 72, "logits": 3}, "down to the logits, which only the last pass would need"
