"""A trained pair on disk: two safetensors files, the vocabulary, and what was trained on what. Written whole or not at all.

A pair's folder is named by its config and by the sources of this room, so that a pair trained by other code is another pair. One that is committed
stands in `checkpoints/` beside this file (`tiny`); others are kept in `~/.cache/weights-that-stay/pairs`, or where WTS_PAIR_CACHE says.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from experiments.drafter.drafter import Drafter
from experiments.drafter.pair import PairConfig
from experiments.drafter.target import Target
from experiments.drafter.vocabulary import BytePairs, QwenBytePairs, Vocabulary
from experiments.head_file import COUNTS_NAME

ROOM = Path(__file__).resolve().parent
COMMITTED = ROOM / "checkpoints"


class CheckpointError(RuntimeError):
    """A folder that is no pair, or not the pair that was asked for."""


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, in bf16 on a GPU and fp32 on a CPU, with their vocabulary. counts: [vocab] int64; facts: what the record should know."""

    config: PairConfig
    target: Target
    drafter: Drafter
    vocabulary: Vocabulary
    counts: Tensor
    facts: dict[str, Any]


@cache
def source_key() -> str:
    """Twelve hex digits of the sources that decide what a training makes."""
    names = (
        "backbone", "block_layout", "chunked_loss", "corpus", "drafter", "serial_heads", "target", "text", "training", "transformer", "vocabulary"
    )  # fmt: skip
    total = hashlib.sha256()
    for name in names:
        total.update((ROOM / f"{name}.py").read_bytes())
    return total.hexdigest()[:12]


def folder_of(config: PairConfig) -> Path:
    """Where the pair of this config is, or would be: the committed one if there is one with this config."""
    committed = COMMITTED / config.name
    if (committed / "pair.json").exists() and _facts(committed)["key"] == config.key:
        return committed
    return cached_pairs() / f"{config.name}-{config.key}-{source_key()}"


def cached_pairs() -> Path:
    """The folder of pairs that are not in the repository."""
    return Path(os.environ.get("WTS_PAIR_CACHE") or Path.home() / ".cache" / "weights-that-stay" / "pairs")


def save(pair: Pair, folder: Path) -> None:
    """Every tensor in bf16, the counts in int64."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".pair-"))
    try:
        save_file(_bf16(pair.target), scratch / "target.safetensors")
        save_file(_bf16(pair.drafter) | {COUNTS_NAME: pair.counts.cpu()}, scratch / "drafter.safetensors")
        if isinstance(pair.vocabulary, BytePairs):
            (scratch / "vocabulary.json").write_text(pair.vocabulary.json)
        facts = pair.facts | {"key": pair.config.key, "source_key": source_key(), "config": asdict(pair.config)}
        (scratch / "pair.json").write_text(json.dumps(facts, indent=1) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        scratch.replace(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def load(config: PairConfig, folder: Path, device: torch.device | str = "cpu") -> Pair:
    """The pair in `folder`.

    Raises:
        CheckpointError: it is not there, not whole, or another config's.
    """
    again = f"train it with: python -m experiments.run experiment=train_pair pair={config.name}"
    if not (folder / "pair.json").exists():
        raise CheckpointError(f"{folder} holds no trained pair; {again}")
    facts = _facts(folder)
    if facts["key"] != config.key:
        raise CheckpointError(f"{folder} holds the pair {facts['key']} and the config is {config.key}; {again}")
    try:
        vocabulary = QwenBytePairs() if config.vocabulary == "qwen" else BytePairs((folder / "vocabulary.json").read_text())
        weights = load_file(folder / "drafter.safetensors")
        counts = weights.pop(COUNTS_NAME)
        target, drafter = Target(config), Drafter(config, vocabulary.mask)
        for model, state in ((target, load_file(folder / "target.safetensors")), (drafter, weights)):
            model.load_state_dict(state)
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is not whole ({error}); delete it and {again}") from error
    for model in (target, drafter):
        model.to(device, _working_dtype(device)).eval().requires_grad_(False)
    return Pair(config, target, drafter, vocabulary, counts, facts)


def _working_dtype(device: torch.device | str) -> torch.dtype:
    """A CPU without bf16 units multiplies bf16 nine times slower than fp32."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def _bf16(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in model.state_dict().items()}


def _facts(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "pair.json").read_text())
