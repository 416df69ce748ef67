"""Text that every machine has: the sources and documentation of Python and of the packages beside it, by package, without duplicates."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MIN_SOURCES = 9
HELD_OUT_PERCENT = 4
_SUFFIXES = frozenset({".py", ".pyi", ".md", ".rst", ".txt"})
_SMALLEST, _LARGEST = 400, 200_000  # bytes of a file: shorter ones say little, longer ones are tables
_LINE = 20  # characters from which on a line tells texts apart
_COPIED = 0.5  # share of known lines from which on a document is a copy
_SOURCE_BYTES = 200_000  # what a package must have to be a source of its own


@dataclass(frozen=True)
class Document:
    """One file: source is the package that has it, name its path from there."""

    source: str
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether no model is trained on it; decided by its name alone, so that a larger corpus holds out the same files."""
        return _number(f"{self.source}/{self.name}") % 100 < HELD_OUT_PERCENT


def machine_documents(megabytes: float) -> list[Document]:
    """Up to so much text of this machine, spread over its files by the hash of their names: the same on machines with the same packages.

    Raises:
        ValueError: fewer than MIN_SOURCES packages have text enough.
    """
    files = sorted(_files(), key=lambda found: _number(f"{found[0]}/{found[1]}"))
    kept = list(_without_copies(files, int(megabytes * 1e6)))
    sizes: dict[str, int] = defaultdict(int)
    for document in kept:
        sizes[document.source] += len(document.text)
    large = {source for source, size in sizes.items() if size >= min(_SOURCE_BYTES, 0.01 * megabytes * 1e6)}
    if len(large) < MIN_SOURCES:
        raise ValueError(
            f"the text of this machine comes from {len(large)} packages ({', '.join(sorted(large))}) and {MIN_SOURCES} are needed; "
            "install more, for instance with: pip install sympy networkx scipy pandas matplotlib"
        )
    return [
        document if document.source in large else Document("other packages", f"{document.source}/{document.name}", document.text)
        for document in kept
    ]


def digest(documents: Sequence[Document]) -> str:
    """sha256 over names and texts, for the record."""
    total = hashlib.sha256()
    for document in documents:
        total.update(f"{document.source}\0{document.name}\0{document.text}\0".encode())
    return total.hexdigest()


def _files() -> Iterator[tuple[str, str, Path]]:
    """Source, name and path of every file that may be text."""
    paths = sysconfig.get_paths()
    standard, packages = Path(paths["stdlib"]), Path(paths["purelib"])
    for root in dict.fromkeys((standard, packages)):
        for folder, folders, files in os.walk(root):
            if folder == str(root):
                folders[:] = [each for each in folders if not each.endswith("-info")]
            if root == standard:
                folders[:] = [each for each in folders if each != "site-packages"]
            for name in files:
                path = Path(folder, name)
                if path.suffix in _SUFFIXES and _SMALLEST <= path.stat().st_size <= _LARGEST:
                    relative = path.relative_to(root)
                    yield "python" if root == standard else relative.parts[0].removesuffix(".py"), relative.as_posix(), path


def _without_copies(files: Sequence[tuple[str, str, Path]], most: int) -> Iterator[Document]:
    seen: set[int] = set()
    size = 0
    for source, name, path in files:
        if size >= most:
            return
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        lines = {hash(line.strip()) for line in text.splitlines() if len(line.strip()) >= _LINE}
        if len(lines) < 5 or len(lines & seen) > _COPIED * len(lines):
            continue
        seen |= lines
        size += len(text)
        yield Document(source, name, text)


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
