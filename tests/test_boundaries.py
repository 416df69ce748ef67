"""The walls between the rooms of architecture and README, held by reading imports: nothing is executed, so a forbidden import cannot hide
behind a function, a TYPE_CHECKING block or a missing package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "experiments", "analysis", "figures", "scripts", "notebooks")

# What the files of a room may never import, anywhere. `results/` is the only door between experiments and analysis.
NEVER = {
    "kernels": {"experiments", "analysis", "figures", "scripts", "notebooks", "hydra", "omegaconf", "matplotlib"},
    "experiments": {"analysis", "figures", "scripts", "notebooks", "matplotlib"},
    "analysis": {"kernels", "experiments", "figures", "scripts", "notebooks", "torch", "triton", "matplotlib", "hydra", "omegaconf"},
    "figures": {"kernels", "experiments", "scripts", "notebooks", "torch", "triton", "hydra", "omegaconf"},
    "scripts": {"notebooks"},
    "notebooks": {"scripts"},
}
# Packages that a machine may lack: who may import them, and only inside functions.
INSIDE_FUNCTIONS = {
    "hydra": {"experiments/run.py", "experiments/compose.py"},
    "omegaconf": {"experiments/run.py", "experiments/compose.py"},
    "cuda": {"kernels/build.py", "kernels/driver.py"},
}
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}


@dataclass(frozen=True)
class Import:
    """One import of `package` (the first part of the module's name)."""

    package: str
    line: int
    inside_function: bool


def imports(source: str, package: str) -> Iterator[Import]:
    """Every import of a file that lives in `package`, at any depth, `import_module("x")` and `__import__("x")` included."""
    tree = ast.parse(source)
    inside = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        for name in _imported(node, package):
            yield Import(name.split(".")[0], getattr(node, "lineno", 0), id(node) in inside)


def _imported(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [package if node.level else node.module or ""]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        return [str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant)]
    return []


def violations(root: Path) -> list[str]:
    """Every broken boundary of the tree at `root`, one sentence each."""
    files = [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
    found = [sentence for path in files for sentence in _of_file(path, path.relative_to(root))]
    return found + list(_of_backends(root))


def _of_file(path: Path, name: Path) -> Iterator[str]:
    room, source = name.parts[0], path.read_text()
    for each in imports(source, room):
        if each.package in NEVER[room]:
            yield f"{name}:{each.line} imports {each.package}, which {room} must not know"
        allowed = INSIDE_FUNCTIONS.get(each.package)
        if allowed is not None and (name.as_posix() not in allowed or not each.inside_function):
            yield f"{name}:{each.line} imports {each.package}; only {', '.join(sorted(allowed))} may, inside functions"
    for part in (*name.parts[1:-1], name.stem):
        if part in EMPTY_NAMES:
            yield f"{name}: {part!r} says nothing; name the file by its idea"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Manager"):
            yield f"{name}:{node.lineno} class {node.name}: name it by what it is"


def _of_backends(root: Path) -> Iterator[str]:
    registered = set()
    for path in sorted((root / "kernels" / "backends").glob("[!_]*.py")):
        names = list(_registered_names(path.read_text()))
        if len(names) != 1:
            yield f"kernels/backends/{path.name} registers {len(names)} backends ({', '.join(names) or 'none'}); it must register exactly one"
        registered.update(names)
    configured = {path.stem for path in (root / "configs" / "backend").glob("*.yaml")}
    for name in sorted(registered - configured):
        yield f"backend {name} has no configs/backend/{name}.yaml"
    for name in sorted(configured - registered):
        yield f"configs/backend/{name}.yaml belongs to no backend"


def _registered_names(source: str) -> Iterator[str]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(each).split(".")[-1] == "register" for each in node.decorator_list):
            yield next((_text(each) for each in node.body if _assigned(each) == "name"), f"{node.name} without a name")


def _assigned(node: ast.stmt) -> str:
    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
    return target.id if isinstance(target, ast.Name) else ""


def _text(node: ast.stmt) -> str:
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    return str(value.value) if isinstance(value, ast.Constant) else ast.unparse(node)


def test_no_boundary_is_broken() -> None:
    assert violations(ROOT) == []


def _plant(root: Path, file: str, source: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


BACKEND = "@register\nclass B:\n    name: ClassVar[str] = '{}'\n"


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("kernels/walk.py", "import hydra", "imports hydra"),
        ("kernels/heads/x.py", "def f():\n    from matplotlib import pyplot", "x.py:2 imports matplotlib"),
        ("experiments/x.py", "from analysis.load import load", "imports analysis"),
        ("experiments/x.py", "def f():\n    import hydra", "only experiments/compose.py, experiments/run.py may"),
        ("experiments/run.py", "import hydra", "inside functions"),
        ("kernels/backends/x.py", BACKEND.format("y") + "from cuda.bindings import driver", "only kernels/build.py, kernels/driver.py may"),
        ("analysis/x.py", "if TYPE_CHECKING:\n    import torch", "imports torch"),
        ("analysis/x.py", "import importlib\nimportlib.import_module('kernels.walk')", "imports kernels"),
        ("figures/fig01.py", "def f():\n    from experiments import record", "imports experiments"),
        ("figures/fig01.py", "from scripts.publish import main", "imports scripts"),
        ("analysis/utils.py", "", "'utils' says nothing"),
        ("kernels/common/x.py", "", "'common' says nothing"),
        ("experiments/x.py", "class RunManager: ...", "class RunManager"),
        ("kernels/backends/two.py", BACKEND.format("y") + BACKEND.format("z"), "registers 2 backends (y, z)"),
        ("kernels/backends/none.py", "x = 1", "registers 0 backends"),
        ("kernels/backends/x.py", BACKEND.format("x"), "no configs/backend/x.yaml"),
        ("configs/backend/ghost.yaml", "", "belongs to no backend"),
    ],
)
def test_a_planted_violation_is_caught(tmp_path: Path, file: str, source: str, expected: str) -> None:
    _plant(tmp_path, "configs/backend/y.yaml", "")
    _plant(tmp_path, "kernels/backends/y.py", BACKEND.format("y"))
    assert violations(tmp_path) == []
    _plant(tmp_path, file, source)
    assert any(expected in sentence for sentence in violations(tmp_path)), violations(tmp_path)


def test_the_doors_that_are_open(tmp_path: Path) -> None:
    for file, source in {
        "experiments/run.py": "from kernels import walk\ndef main():\n    import hydra\n    from omegaconf import OmegaConf",
        "kernels/driver.py": "def driver():\n    from cuda.bindings import driver",
        "kernels/cuda/common/key.cuh": "// headers may live in common/",
        "figures/fig04.py": "import matplotlib\nfrom analysis.slope import fit\nfrom . import style",
        "scripts/publish.py": "from experiments import record\nimport analysis.load",
    }.items():
        _plant(tmp_path, file, source)
    assert violations(tmp_path) == []


WITHOUT = """
import importlib, pkgutil, sys
for missing in {missing!r}:
    sys.modules[missing] = None  # importing it raises ImportError
def everything(*rooms):
    for room in rooms:
        for module in pkgutil.walk_packages(importlib.import_module(room).__path__, room + "."):
            importlib.import_module(module.name)
{work}
"""


@pytest.mark.parametrize(
    ("work", "missing"),
    [
        ("everything('analysis', 'figures')", ("torch", "triton", "kernels", "experiments", "hydra", "omegaconf")),
        (
            "everything('kernels', 'experiments')",
            ("hydra", "omegaconf", "cuda", "pynvml", "matplotlib", "scipy", "pandas", "analysis", "figures"),
        ),
        ("from kernels import registry; registry.backends()", ("triton", "cuda", "pynvml", "pyarrow", "hydra", "omegaconf")),
    ],
    ids=["drawing needs no torch", "running needs no Hydra and no CUDA", "listing backends needs no Triton"],
)
def test_a_room_imports_without_what_it_must_not_need(work: str, missing: tuple[str, ...]) -> None:
    """For real, in a fresh interpreter: what a third package drags in counts as well."""
    command = [sys.executable, "-c", WITHOUT.format(work=work, missing=missing)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
