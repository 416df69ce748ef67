"""The launcher of released pairs, without an account and without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

modal = pytest.importorskip("modal", reason="needs the extra [modal]; `make test` installs it")

from experiments import provenance  # noqa: E402
from scripts import modal_acceptance, modal_bench  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = "experiment=smoke head.vocab=64 head.rank=8 experiment.timing.rounds=2 experiment.steps=[1]"


@pytest.fixture(scope="module", autouse=True)
def _a_known_revision() -> Iterator[None]:
    """The tests must not depend on the state of this checkout."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(provenance.VARIABLE, f"{'0123456789' * 4}@{provenance.source_digest()}")
        yield


def test_every_pair_is_a_plan_and_every_repository_comes_once() -> None:
    plans = modal_acceptance.compose("H100", ["qwen3_4b_block7", "qwen3_4b_b16"], SMALL)
    configs = [json.loads(plan)["config"] for plan in plans]
    assert [config["pair"]["name"] for config in configs] == ["qwen3_4b_block7", "qwen3_4b_b16"]
    assert {config["device"]["name"] for config in configs} == {"h100"}
    drafters = ["deepseek-ai/dspark_qwen3_4b_block7", "shreybirmiwal/Qwen3-4B-DSpark-b16"]
    assert modal_acceptance.repositories(plans) == ["Qwen/Qwen3-4B", *drafters]


def test_a_pair_of_our_own_is_refused() -> None:
    with pytest.raises(SystemExit, match="pair tiny is not a released one"):
        modal_acceptance.repositories(modal_acceptance.compose("H100", ["tiny"], SMALL))
    with pytest.raises(SystemExit, match="qwen3_4b_block8"):
        modal_acceptance.compose("H100", ["qwen3_4b_block8"], SMALL)


def test_a_repository_lands_where_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repository, **options: asked.update({repository: options}))
    modal_acceptance.fetch(["Qwen/Qwen3-4B"], tmp_path)
    assert asked["Qwen/Qwen3-4B"]["local_dir"] == tmp_path / "Qwen" / "Qwen3-4B"
    assert set(asked["Qwen/Qwen3-4B"]["allow_patterns"]) == {"*.json", "*.safetensors"}


def test_the_run_looks_for_checkpoints_in_the_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(modal_bench, "execute", lambda plan, **variables: seen.append(variables) or {plan: b""})
    with pytest.warns(match="mounted Volume"):
        assert modal_acceptance.measure.local("a plan") == {"a plan": b""}
    assert seen == [{"WTS_PAIR_CACHE": modal_acceptance.CHECKPOINTS}]


def test_downloads_come_before_rent_and_runs_come_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []

    class Download:
        def remote(self, repositories: list[str]) -> None:
            events.append(repositories)

    class Rented:
        def with_options(self, *, gpu: str) -> Rented:
            events.append(gpu)
            return self

        def starmap(self, inputs: list[tuple[str]], **options: Any) -> Iterator[dict[str, bytes]]:
            return (modal_bench.execute(modal_bench.compose("cpu", SMALL)[0]) for _ in inputs)

    monkeypatch.setattr(modal_acceptance, "download", Download())
    monkeypatch.setattr(modal_acceptance, "measure", Rented())
    modal_acceptance.main("--gpu", "H100", "--overrides", SMALL, "--output", str(tmp_path))
    assert events == [["Qwen/Qwen3-4B", "deepseek-ai/dspark_qwen3_4b_block7"], "H100!"]
    assert len(list(tmp_path.glob("smoke/*/run.json"))) == 1


def test_a_dry_run_needs_no_account(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MODAL_")} | {"HOME": str(tmp_path)}
    order = ["scripts/modal_acceptance.py", "--gpu", "B200", "--pairs", "qwen3_8b_block7", "--overrides", SMALL, "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-m", "modal", "run", *order], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "download: Qwen/Qwen3-8B, deepseek-ai/dspark_qwen3_8b_block7" in done.stdout
    assert "gpu: B200" in done.stdout
    assert '"name": "qwen3_8b_block7"' in done.stdout
