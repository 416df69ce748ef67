"""Text of a machine: known packages by name, copies left out, the same documents held out whatever the size."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.drafter import corpus
from experiments.drafter.corpus import Document, digest, machine_documents


def lines(seed: int, count: int = 150) -> str:
    return "\n".join(f"the value of quantity {seed}.{line} is {seed * line}" for line in range(count))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library and ten packages of three files each."""
    standard, packages = tmp_path / "lib", tmp_path / "lib" / "site-packages"
    for place, root in enumerate([standard, *(packages / f"package{number}" for number in range(10))]):
        root.mkdir(parents=True, exist_ok=True)
        for name in range(3):
            (root / f"file{name}.py").write_text(lines(10 * place + name))
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(standard), "purelib": str(packages)})
    return packages


@pytest.mark.usefixtures("machine")
def test_every_package_is_a_source() -> None:
    documents = machine_documents(1.0)
    assert len(documents) == 33
    assert {document.source for document in documents} == {"python", *(f"package{number}" for number in range(10))}
    assert documents == machine_documents(1.0)
    assert digest(documents) == digest(machine_documents(1.0)) != digest(documents[1:])


def test_what_is_no_text_or_a_copy_is_left_out(machine: Path) -> None:
    before = set(machine_documents(1.0))
    copied = (machine / "package0" / "file0.py").read_text()
    for name, text in (
        ("copy.py", copied),
        ("mostly.md", copied + "\n" + lines(999, 50)),
        ("short.py", "x = 1"),
        ("table.json", lines(998)),
    ):
        (machine / "package1" / name).write_text(text)
    (machine / "package1" / "latin.py").write_bytes(lines(997).encode() + b"\xe9")
    (machine / "package1-1.0.dist-info").mkdir()
    (machine / "package1-1.0.dist-info" / "LICENSE.txt").write_text(lines(996))
    (machine / "package1" / "new.rst").write_text(lines(995))
    after = machine_documents(1.0)
    assert len(after) == len(before) + 1, "one copy of two, whichever comes first, and the new file"
    assert {document.name for document in after} - {document.name for document in before} <= {
        "package1/new.rst",
        "package1/copy.py",
        "package1/mostly.md",
    }


@pytest.mark.usefixtures("machine")
def test_a_smaller_corpus_holds_out_the_same_documents() -> None:
    large, small = machine_documents(1.0), machine_documents(0.15)
    assert len(small) < len(large)
    assert set(small) <= set(large)


def test_some_documents_are_held_out() -> None:
    held = [Document("package", f"file{number}", "").held_out for number in range(2000)]
    assert 0.02 < sum(held) / len(held) < 0.06


def test_too_few_packages_are_an_error(machine: Path) -> None:
    for number in range(5):
        for path in (machine / f"package{number}").iterdir():
            path.unlink()
    with pytest.raises(ValueError, match=r"comes from 6 packages \(package5, .*\) and 9 are needed; install more"):
        machine_documents(1.0)
