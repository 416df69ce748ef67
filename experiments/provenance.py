"""Where a record comes from: the source revision and the software. A record never lacks its commit.

The revision comes from Git, or from the plan that is executed, or from the variable WTS_REVISION (`SHA[+dirty][@DIGEST]`,
printed by `python -m experiments.plan --revision`), in that order of trust: plan, variable, Git.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "experiments", "configs")  # what decides a measured number
VARIABLE = "WTS_REVISION"
_SOURCES = {".py", ".cu", ".cuh", ".h", ".json", ".yaml"}
_PACKAGES = ("torch", "triton", "numpy", "pyarrow", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-cccl", "nvidia-ml-py")


class NoRevision(RuntimeError):
    """Nothing says which commit this tree is."""


@dataclass(frozen=True)
class Revision:
    """A commit, whether the tree differs from it, and a digest of the rooms that decide a number.

    plan_digest: the digest that the plan was made from, kept only where the executing tree has another one (then dirty is true).
    """

    sha: str
    dirty: bool
    digest: str
    plan_digest: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "plan_digest" or value}

    def __str__(self) -> str:
        return f"{self.sha}{'+dirty' if self.dirty else ''}@{self.digest}"


def source_digest(root: Path = ROOT) -> str:
    """sha256 over names and contents of the source files in ROOMS. Needs no Git, so both ends of a plan can compute it."""
    total = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((root / room).rglob("*")):
            name = path.relative_to(root)
            if path.suffix in _SOURCES and not any(part.startswith((".", "__pycache__")) for part in name.parts):
                total.update(f"{name.as_posix()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def revision(planned: Revision | None = None, root: Path = ROOT) -> Revision:
    """The revision of the tree at `root`.

    Raises:
        NoRevision: neither a plan, nor the variable, nor Git knows it.
    """
    here = source_digest(root)
    if planned is not None:
        return _as_executed(planned, here)
    if VARIABLE in os.environ:
        return _from_variable(os.environ[VARIABLE], here)
    return _from_git(root, here)


def _as_executed(planned: Revision, here: str) -> Revision:
    if planned.digest == here:
        return planned
    return Revision(planned.sha, dirty=True, digest=here, plan_digest=planned.digest)


def _from_variable(text: str, here: str) -> Revision:
    match = re.fullmatch(r"([0-9a-f]{40})(\+dirty)?(?:@([0-9a-f]{64}))?", text.strip())
    if match is None:
        raise NoRevision(
            f"{VARIABLE}={text!r} is not SHA[+dirty][@DIGEST]; print the right value with: python -m experiments.plan --revision"
        )
    sha, dirty, digest = match.groups()
    # without a digest nothing proves that this tree is that commit
    return _as_executed(Revision(sha, bool(dirty) or digest is None, digest or here), here)


def _from_git(root: Path, here: str) -> Revision:
    top = _git(root, "rev-parse", "--show-toplevel")
    sha = _git(root, "rev-parse", "--verify", "HEAD") if top and Path(top).resolve() == root.resolve() else None
    changes = _git(root, "status", "--porcelain", "--", *ROOMS)
    if not sha or changes is None:
        raise NoRevision(
            f"{root} has no Git commit, and a record never lacks its commit; where the commit is, make a plan with "
            "'python -m experiments.plan -o plan.json KEY=VALUE ...' and run it here with 'python -m experiments.run --plan plan.json', "
            f"or set {VARIABLE} to what 'python -m experiments.plan --revision' prints there."
        )
    return Revision(sha, dirty=bool(changes), digest=here)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def software() -> dict[str, str]:
    """Versions of what runs a walk; a package that is not here is left out."""
    found = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
