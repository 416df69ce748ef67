"""What a previous token's bias can lift, for every token of a head: the static half of the certificate, made once a head and kept on disk.

`kernels.certificate.bias_lists` is the same from exact sums; this one is by the matrix units, with a margin for the order of their sums.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.heads.markov import MarkovHead
from kernels.walk import Unsupported

_MARGIN = "v1"  # of the bound: lists that an older formula made are not read, so another formula needs another name
_CHUNK_BYTES = 1 << 30  # of fp32 biases at once; finding the largest takes as much again


@dataclass(frozen=True)
class KernelLists:
    """rows: [vocab, width] int32, of every token the rows with the largest biases; biases: [vocab, width] bf16, those; bound: [vocab] fp32, which no
    other row's bias exceeds in any order of fp32 sums; -inf where there is no other row."""

    rows: Tensor
    biases: Tensor
    bound: Tensor


def list_bytes(vocab: int, width: int) -> int:
    """What the lists of a head take: 117 MB at V = 151,936 and width 128."""
    return vocab * (6 * width + 4)


def kernel_lists(head: MarkovHead, width: int) -> KernelLists:
    """The `width` largest biases after every token, from `~/.cache/weights-that-stay/bias-lists` (WTS_LIST_CACHE) if they were made before.

    Making them takes the product of W1 and W2, 2 vocab^2 rank operations, and the largest of each row.

    Raises:
        Unsupported: they do not fit into the GPU's memory.
    """
    path = _cache() / f"{head.sha256}-{width}-{_MARGIN}.pt"
    kept = _read(path, head, width)
    if kept is None:
        kept = make_lists(head, width)
        _write(path, kept)
    return kept


def make_lists(head: MarkovHead, width: int) -> KernelLists:
    """The same, made anew. A vocabulary of fewer rows is listed whole, its last row again and again.

    Raises:
        Unsupported: as above.
    """
    device, vocab, listed = head.device, head.vocab, min(width, head.vocab)
    some = max(1, min(vocab, _CHUNK_BYTES // (4 * vocab)))
    _assert_room(head, width, some)
    rows = torch.empty(vocab, width, dtype=torch.int32, device=device)
    biases = torch.empty(vocab, width, dtype=torch.bfloat16, device=device)
    bound = torch.full((vocab,), -torch.inf, device=device)
    longest = float(head.w2.float().norm(dim=1).max())
    for start in _progress(range(0, vocab, some)):
        at = slice(start, min(start + some, vocab))
        latents = head.w1[at]
        most = _products(latents, head.w2).topk(min(width + 1, vocab), dim=1)
        rows[at], biases[at] = most.indices[:, listed - 1, None].int(), most.values[:, listed - 1, None].bfloat16()
        rows[at, :listed], biases[at, :listed] = most.indices[:, :listed].int(), most.values[:, :listed].bfloat16()
        if vocab > width:
            # Twice the bound of kernels.agreement, for these sums and for any other; a sum of products is at most the product of norms.
            slack = 2 * (head.rank + 2) * 2.0**-23 * longest * latents.float().norm(dim=1)
            value = most.values[:, width]
            bound[at] = value + slack + 2.0**-22 * value.abs()
    return KernelLists(rows, biases, bound)


def _products(latents: Tensor, w2: Tensor) -> Tensor:
    """[n, rank] x [vocab, rank] bf16 -> [n, vocab] fp32 sums."""
    if latents.is_cuda:
        return torch.mm(latents, w2.T, out_dtype=torch.float32)
    return latents.float() @ w2.float().T


def _assert_room(head: MarkovHead, width: int, some: int) -> None:
    if head.device.type != "cuda":
        return
    needed, (free, _) = list_bytes(head.vocab, width) + 3 * 4 * some * head.vocab, torch.cuda.mem_get_info(head.device)
    if needed > free:
        raise Unsupported(
            f"lists of {width} biases for {head.vocab:,} tokens need {needed / 1e9:.1f} GB while they are made "
            f"({list_bytes(head.vocab, width) / 1e6:.0f} MB after) and the GPU has {free / 1e9:.1f} GB free; free some, or list fewer: "
            "backend.options.listed=32."
        )


def _progress(chunks: range) -> Any:
    from tqdm import tqdm

    return tqdm(chunks, desc="bias lists", disable=None, leave=False)


def _cache() -> Path:
    return Path(os.environ.get("WTS_LIST_CACHE") or Path.home() / ".cache" / "weights-that-stay" / "bias-lists")


def _read(path: Path, head: MarkovHead, width: int) -> KernelLists | None:
    """None where there is nothing, or nothing whole."""
    try:
        kept = KernelLists(**torch.load(path, map_location=head.device, weights_only=True))
    except (OSError, EOFError, pickle.UnpicklingError, RuntimeError, TypeError, ValueError):
        return None
    shapes = [(kept.rows, (head.vocab, width)), (kept.biases, (head.vocab, width)), (kept.bound, (head.vocab,))]
    return kept if all(tensor.shape == shape for tensor, shape in shapes) else None


def _write(path: Path, lists: KernelLists) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        partial = Path(scratch) / path.name
        torch.save(asdict(lists), partial)
        partial.replace(path)
