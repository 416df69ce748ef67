"""A released pair from disk: a Qwen3 target and a DSpark drafter, each in its folder as the Hugging Face hub has it.

A repository's folder is `OWNER/NAME` under `~/.cache/weights-that-stay/pairs`, or where WTS_PAIR_CACHE says. Nothing is downloaded here;
`scripts/modal_acceptance.py` does that on rented machines. *Not run on a released checkpoint*: tests write tiny ones in the same layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from experiments.drafter.checkpoint import CheckpointError, cached_pairs
from experiments.drafter.dspark import DSpark, DSparkConfig
from experiments.drafter.model_folder import ModelFolder
from experiments.drafter.pair import ReleasedConfig
from experiments.drafter.qwen3 import Qwen3, Qwen3Config
from experiments.drafter.vocabulary import TokenizerVocabulary

_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
# In a drafter's files, but not of `DSpark`: copies of the target's, and the confidence head.
_COPIES = {"embed_tokens.weight": "embedding.weight", "lm_head.weight": "lm_head.weight"}
_LEFT_OUT = "confidence_head."
_T = TypeVar("_T")


@dataclass(frozen=True)
class ReleasedSizes:
    """`experiments.drafter.decodable.PairSizes`."""

    name: str
    block: int
    taps: tuple[int, ...]
    width: int


@dataclass(frozen=True)
class ReleasedPair:
    """`experiments.drafter.decodable.DecodablePair`. facts: what the record should know, the sha256 of the weights by repository."""

    config: ReleasedSizes
    target: Qwen3
    drafter: DSpark
    vocabulary: TokenizerVocabulary
    facts: dict[str, Any]


def load(config: ReleasedConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16) -> ReleasedPair:
    """The pair, with weights of `dtype`.

    Raises:
        CheckpointError: a file is missing or cut, or the two are not a target and its drafter.
    """
    of_target, of_drafter = (ModelFolder(cached_pairs() / repository, repository) for repository in (config.target, config.drafter))
    sizes, drafts = _said(of_target, Qwen3Config.from_json), _said(of_drafter, DSparkConfig.from_json)
    separator = _said(of_target, lambda said: int(said["bos_token_id"]))
    _check_fit(of_drafter, sizes, drafts)
    target = _target(of_target, sizes, drafts.taps, device, dtype)
    return ReleasedPair(
        config=ReleasedSizes(config.name, drafts.block, drafts.taps, drafts.width),
        target=target,
        drafter=_drafter(of_drafter, drafts, target, device, dtype),
        vocabulary=_vocabulary(of_target, sizes.vocab, separator, drafts.mask),
        facts={folder.repository: folder.sha256() for folder in (of_target, of_drafter)},
    )


def _said(folder: ModelFolder, read: Callable[[dict[str, Any]], _T]) -> _T:
    """What `read` makes of the folder's config.json."""
    try:
        return read(folder.json(_CONFIG))
    except KeyError as error:
        raise CheckpointError(f"{folder.path / _CONFIG} does not say {error}; take a checkpoint whose config does.") from error
    except ValueError as error:
        raise CheckpointError(f"{folder.path / _CONFIG}: {error}") from error


def _check_fit(folder: ModelFolder, target: Qwen3Config, drafter: DSparkConfig) -> None:
    own, others = (drafter.vocab, drafter.width), (target.vocab, target.width)
    if own != others:
        raise CheckpointError(f"{folder.path} has vocabulary and width {own} and its target {others}; take the drafter of this target.")
    # The last layer's output is what the target's own logits are made of; DeepSpec refuses it too, since transformers has it normed.
    last = target.layers - 2
    if not drafter.taps or list(drafter.taps) != sorted(set(drafter.taps) & set(range(-1, last + 1))):
        raise CheckpointError(
            f"{folder.path}: target_layer_ids {list(drafter.taps)} are not increasing ones from -1 to {last}; "
            "take the drafter of this target."
        )


def _target(folder: ModelFolder, config: Qwen3Config, taps: tuple[int, ...], device: torch.device | str, dtype: torch.dtype) -> Qwen3:
    with torch.device("meta"):  # weights come from the files alone
        model = Qwen3(config, taps)
    found = folder.tensors(device, dtype)
    if "embed_tokens.weight" in found:
        found["embedding.weight"] = found.pop("embed_tokens.weight")
        if config.tied:
            found["lm_head.weight"] = found["embedding.weight"]
    folder.fill(model, found)
    return model.eval().requires_grad_(False)


def _drafter(folder: ModelFolder, config: DSparkConfig, target: Qwen3, device: torch.device | str, dtype: torch.dtype) -> DSpark:
    with torch.device("meta"):
        model = DSpark(config)
    found = folder.tensors(device, dtype)
    _check_copies(folder, found, target)
    folder.fill(model, {name: found[name] for name in found if name not in _COPIES and not name.startswith(_LEFT_OUT)})
    return model.eval().requires_grad_(False)


def _check_copies(folder: ModelFolder, found: dict[str, Tensor], target: Qwen3) -> None:
    for copy, own in _COPIES.items():
        if copy in found and not torch.equal(found[copy], target.get_parameter(own)):
            raise CheckpointError(f"{folder.path} has another {copy} than its target; take the target that it was trained for.")


def _vocabulary(folder: ModelFolder, size: int, separator: int, mask: int) -> TokenizerVocabulary:
    from tokenizers import Tokenizer

    return TokenizerVocabulary(Tokenizer.from_str(folder.text(_TOKENIZER)), size, separator, mask)
