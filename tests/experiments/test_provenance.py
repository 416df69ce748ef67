from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.provenance import NoRevision, Revision, revision, software, source_digest


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WTS_REVISION", raising=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for room in ("kernels", "experiments", "configs"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "a.py").write_text(f"# {room}\n")
    return tmp_path


@pytest.fixture
def repository(tree: Path) -> Path:
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tree), *words], check=True)
    return tree


def test_a_clean_commit(repository: Path) -> None:
    found = revision(root=repository)
    assert (len(found.sha), found.dirty, found.digest) == (40, False, source_digest(repository))


@pytest.mark.parametrize(("file", "dirty"), [("kernels/a.py", True), ("configs/new.yaml", True), ("README.md", False)])
def test_only_the_rooms_that_decide_a_number_make_a_tree_dirty(repository: Path, file: str, dirty: bool) -> None:
    (repository / file).write_text("changed\n")
    assert revision(root=repository).dirty is dirty


def test_the_digest_sees_names_and_contents_but_no_caches(tree: Path) -> None:
    before = source_digest(tree)
    (tree / "kernels" / "__pycache__").mkdir()
    (tree / "kernels" / "__pycache__" / "a.py").write_text("x")
    (tree / "kernels" / "notes.txt").write_text("x")
    assert source_digest(tree) == before
    (tree / "kernels" / "a.py").rename(tree / "kernels" / "b.py")
    moved = source_digest(tree)
    (tree / "kernels" / "b.py").write_text("# other\n")
    assert len({before, moved, source_digest(tree)}) == 3


def test_without_git_and_plan_a_run_is_refused_with_the_remedy(tree: Path) -> None:
    with pytest.raises(NoRevision, match=r"python -m experiments\.plan -o plan\.json"):
        revision(root=tree)


def test_a_repository_without_commits_has_no_revision(tree: Path) -> None:
    subprocess.run(["git", "-C", str(tree), "init", "-q"], check=True)
    with pytest.raises(NoRevision):
        revision(root=tree)


def test_the_commit_of_an_outer_repository_is_not_ours(repository: Path) -> None:
    inner = repository / "vendored"
    (inner / "kernels").mkdir(parents=True)
    with pytest.raises(NoRevision):
        revision(root=inner)


def test_a_plan_brings_its_revision_and_a_changed_tree_is_dirty_with_both_digests(tree: Path) -> None:
    planned = Revision("a" * 40, dirty=False, digest=source_digest(tree))
    assert revision(planned, tree) == planned
    (tree / "kernels" / "a.py").write_text("# patched on the node\n")
    found = revision(planned, tree)
    assert (found.sha, found.dirty, found.digest, found.plan_digest) == ("a" * 40, True, source_digest(tree), planned.digest)
    assert found.as_dict()["plan_digest"] == planned.digest
    assert "plan_digest" not in planned.as_dict()


def test_the_variable_is_believed_as_far_as_its_digest_goes(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Revision("b" * 40, dirty=False, digest=source_digest(tree))
    monkeypatch.setenv("WTS_REVISION", str(right))
    assert revision(root=tree) == right
    monkeypatch.setenv("WTS_REVISION", str(replace(right, dirty=True)))
    assert revision(root=tree).dirty
    monkeypatch.setenv("WTS_REVISION", "b" * 40)  # nothing proves that this tree is that commit
    assert revision(root=tree).dirty
    monkeypatch.setenv("WTS_REVISION", str(replace(right, digest="0" * 64)))
    assert revision(root=tree).dirty
    monkeypatch.setenv("WTS_REVISION", "main")
    with pytest.raises(NoRevision, match="experiments.plan --revision"):
        revision(root=tree)


def test_software_names_what_ran() -> None:
    assert {"python", "torch", "pyarrow"} <= set(software())
