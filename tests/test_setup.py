"""The set-up of a bare machine: what the Makefile installs, when, and what it says when it cannot. No network: a stand-in plays Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Plays python3: makes a "venv" of itself, and writes down what pip was asked for. Pip fails while the file `broken` is there.
STAND_IN = """#!/bin/sh
here={here}
case "$*" in
  -V) echo "Python {version}" ;;
  "-c import sys"*) exit {too_old} ;;
  "-c import ensurepip"*) exit {no_venv} ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *"pip install"*) test ! -e $here/broken || exit 1; for lock; do :; done; echo "$lock" >> $here/installed ;;
  *) echo "$*" >> $here/ran ;;
esac
"""


class BareMachine:
    """A copy of the set-up files in an empty folder, and a stand-in for its Python."""

    def __init__(self, folder: Path, *, too_old: bool = False, no_venv: bool = False) -> None:
        self.folder = folder
        shutil.copy(ROOT / "Makefile", folder)
        shutil.copytree(ROOT / "requirements", folder / "requirements")
        self.python = folder / "python"
        self.python.write_text(
            STAND_IN.format(here=folder, version="3.9.2" if too_old else "3.11.2", too_old=int(too_old), no_venv=int(no_venv))
        )
        self.python.chmod(0o755)

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["make", f"PYTHON={self.python}", *arguments]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)

    def lines(self, name: str) -> list[str]:
        return (self.folder / name).read_text().split("\n")[:-1] if (self.folder / name).exists() else []


def test_drawing_installs_only_what_drawing_needs_and_only_once(tmp_path: Path) -> None:
    machine = BareMachine(tmp_path)
    for _ in range(2):
        assert machine.make("figures").returncode == 0
    assert machine.lines("installed") == ["requirements/figures.txt"]
    assert machine.lines("ran") == ["-m figures.draw"] * 2
    for _ in range(2):
        assert machine.make("test").returncode == 0
    assert machine.lines("installed") == ["requirements/figures.txt", "requirements/dev.txt"]


def test_an_interrupted_install_is_taken_up_again(tmp_path: Path) -> None:
    machine = BareMachine(tmp_path)
    (tmp_path / "broken").touch()
    assert machine.make("figures").returncode != 0
    assert machine.lines("ran") == []
    (tmp_path / "broken").unlink()
    assert machine.make("figures").returncode == 0
    assert machine.lines("ran") == ["-m figures.draw"]


def test_a_new_lock_is_installed(tmp_path: Path) -> None:
    machine = BareMachine(tmp_path)
    machine.make("figures")
    stamp = (tmp_path / ".venv" / ".installed-figures").stat().st_mtime
    lock = tmp_path / "requirements" / "figures.txt"
    os.utime(lock, (stamp + 10, stamp + 10))
    machine.make("figures")
    assert machine.lines("installed") == ["requirements/figures.txt"] * 2


@pytest.mark.parametrize(
    ("lacks", "sentence"),
    [
        (
            {"too_old": True},
            "This needs Python 3.11 or newer and {python} is not it (Python 3.9.2); name one that is: make PYTHON=python3.12 ...",
        ),
        ({"no_venv": True}, "{python} cannot make a virtual environment; on Debian or Ubuntu: apt install python3-venv"),
    ],
)
def test_a_machine_that_cannot_says_why(tmp_path: Path, lacks: dict[str, bool], sentence: str) -> None:
    machine = BareMachine(tmp_path, **lacks)
    done = machine.make("figures")
    assert done.returncode != 0
    assert sentence.format(python=machine.python) in done.stdout
    assert not (tmp_path / ".venv").exists()


def test_a_python_of_your_own_installs_nothing(tmp_path: Path) -> None:
    machine = BareMachine(tmp_path)
    assert machine.make("bench", f"RUN_WITH={machine.python}", "DEVICE=b200").returncode == 0
    assert machine.lines("installed") == []
    ran = machine.lines("ran")
    assert "-m experiments.run experiment=step_slope device=b200" in ran
    assert "-m experiments.run experiment=walk_latency device=b200 head=markov_v152k experiment.steps=[7,16]" in ran


def test_help_lists_every_target(tmp_path: Path) -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony is not None
    shown = BareMachine(tmp_path).make().stdout
    assert re.findall(r"^  make (\w+) +\S", shown, re.MULTILINE) == phony[1].split()


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(re.split(r"==|[ ;]", line)[:2] for line in lines if line and not line.startswith("#"))


def test_locks_pin_everything_and_agree() -> None:
    drawing, testing = _pins("figures.txt"), _pins("dev.txt")
    assert drawing.items() <= testing.items()
    assert not {"torch", "triton", "hydra-core"} & set(drawing)
    assert testing["torch"] == "2.13.0"
    assert {testing[name].rsplit(".", 1)[0] for name in testing if name.startswith(("nvidia-cuda-", "cuda-bindings"))} == {"13.0"}
    for line in (ROOT / "requirements" / "dev.txt").read_text().splitlines():
        assert line.startswith("#") or re.match(r"[\w.-]+==[\w.+]+( |$)", line), line


def test_the_lock_leaves_torchs_own_cuda_libraries_to_torch() -> None:
    assert not {"cuda-toolkit", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "nvidia-nvjitlink"} & set(_pins("dev.txt"))
