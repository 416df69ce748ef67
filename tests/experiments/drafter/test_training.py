"""Training lowers the loss, repeats itself by seed, and goes on where it was killed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from experiments.drafter.checkpoint import Pair
from experiments.drafter.drafter import Drafter
from experiments.drafter.pair import OPTIMIZERS, TrainingConfig
from experiments.drafter.snapshot import Snapshot, SnapshotError
from experiments.drafter.target import Target
from experiments.drafter.training import Progress, train_drafter, train_target
from tests.experiments.drafter.conftest import config

TEXT = torch.arange(2000) % 37 + 20  # a text that can be learnt


def trained_target(
    state: Path, steps: int = 30, stop: int | None = None, rate: float = 6e-3, optimizer: str = "adamw"
) -> tuple[Target, list[Progress]]:
    made = config(target=TrainingConfig(steps=steps, batch=4, rate=rate, optimizer=optimizer))
    torch.manual_seed(0)
    target, log = Target(made), list[Progress]()

    def report(progress: Progress) -> None:
        log.append(progress)
        if progress.step == stop:
            raise KeyboardInterrupt

    train_target(target, TEXT, report, 7, state)
    return target, log


def test_a_target_learns_once(tmp_path: Path) -> None:
    target, log = trained_target(tmp_path / "target.snapshot")
    assert [progress.step for progress in log] == list(range(1, 31))
    assert log[-1].losses["cross_entropy"] < 0.9 * log[0].losses["cross_entropy"]
    assert [path.name for path in tmp_path.iterdir()] == ["target.snapshot"]
    again, log = trained_target(tmp_path / "target.snapshot")
    assert not log, "it is over"
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in target.state_dict().items())


def test_muon_turns_the_matrices_of_the_blocks_and_nothing_else(tmp_path: Path) -> None:
    """One step: Muon's singular values are near the rate (its Newton-Schulz iteration is rough), AdamW's entries are the rate itself."""
    made = config(target=TrainingConfig(steps=1, batch=4, rate=0.01, optimizer="muon"))
    torch.manual_seed(0)
    target = Target(made)
    torch.nn.init.normal_(next(iter(target.blocks)).merge.weight, std=0.1)  # at zero nothing reaches the values
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    train_target(target, TEXT, lambda _: None, 7, tmp_path / "state")
    moved = {name: before[name] - weight for name, weight in target.state_dict().items()}
    values = torch.linalg.svdvals(moved["blocks.0.value.weight"]) / 0.01
    assert 0.5 < float(values.median()) < 1.3
    assert float(values.max()) < 1.3
    head = moved["lm_head.weight"].abs()
    assert torch.quantile(head, 0.5).item() == pytest.approx(0.003, rel=0.01)


def test_a_snapshot_waits_longer_the_longer_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, took_s, model = [0.0], [0.1], torch.nn.Linear(2, 2)

    def save(state: object, path: Path) -> None:
        path.touch()
        clock[0] += took_s[0]

    monkeypatch.setattr("experiments.drafter.snapshot.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(torch, "save", save)
    snapshot = Snapshot(tmp_path / "state", model, [torch.optim.AdamW(model.parameters())], torch.Generator())
    for took_s[0], wait_s in ((0.1, 60), (6.0, 200)):
        snapshot.keep(1)
        clock[0] += wait_s - 1
        assert not snapshot.due
        clock[0] += 1.001
        assert snapshot.due


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_killed_training_ends_as_one_that_was_not(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.drafter.snapshot._EVERY_S", 0.0)
    monkeypatch.setattr("experiments.drafter.snapshot._SHARE", math.inf)
    whole, _ = trained_target(tmp_path / "whole.snapshot", steps=8, optimizer=optimizer)
    with pytest.raises(KeyboardInterrupt):
        trained_target(tmp_path / "killed.snapshot", steps=8, stop=5, optimizer=optimizer)
    again, log = trained_target(tmp_path / "killed.snapshot", steps=8, optimizer=optimizer)
    assert [progress.step for progress in log] == [6, 7, 8]
    for name, weight in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


def test_a_drafter_learns_and_the_target_stays(pair: Pair, tmp_path: Path) -> None:
    target, _ = trained_target(tmp_path / "target.snapshot")
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    made = config(drafter=TrainingConfig(steps=40, batch=4, rate=6e-3))
    torch.manual_seed(1)
    drafter, log = Drafter(made, 1), list[Progress]()
    train_drafter(drafter, target, TEXT, log.append, 7, tmp_path / "drafter.snapshot")
    assert log[-1].losses["distance"] < 0.8 * log[0].losses["distance"]
    assert log[-1].losses["cross_entropy"] < log[0].losses["cross_entropy"]
    assert all(torch.equal(before[name], weight) for name, weight in target.state_dict().items())


def test_a_loss_that_is_no_number_stops_at_once(tmp_path: Path) -> None:
    made = config()
    target = Target(made)
    with torch.no_grad():
        target.lm_head.weight[3] = torch.nan
    with pytest.raises(FloatingPointError, match="the loss is nan at step 0 of 3"):
        train_target(target, TEXT, lambda _: None, 0, tmp_path / "state")


@pytest.mark.parametrize("damage", [b"", b"not a snapshot"])
def test_a_damaged_snapshot_is_a_sentence(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(damage)
    model = torch.nn.Linear(2, 2)
    snapshot = Snapshot(path, model, [torch.optim.AdamW(model.parameters())], torch.Generator())
    with pytest.raises(SnapshotError, match=r"state is no snapshot of this training \(\w+\); delete it to begin anew"):
        snapshot.restore()
