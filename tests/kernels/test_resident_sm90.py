"""Options of the resident walk, and how many register tiles the compiler leaves it. No GPU, and nothing is compiled."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from kernels.backends import resident_sm90
from kernels.backends.resident_sm90 import ResidentOptions, ResidentSm90
from kernels.build import Kernel, SpillError
from kernels.device import load
from kernels.placement import SMALL_BATCH, Placement, plan
from kernels.walk import Limits, Unsupported

H200 = load("h200")


@pytest.mark.parametrize(
    ("options", "limits", "message"),
    [
        ({"exchange": "mailboxes"}, Limits(2, 4), "exchange=mailboxes serves one greedy request; got max_batch 2, sampling False"),
        ({"exchange": "mailboxes"}, Limits(1, 4, sampling=True), "got max_batch 1, sampling True; take exchange=pair"),
        ({"exchange": "mailboxes"}, Limits(64, 4), "exchange=mailboxes serves one greedy request; got max_batch 64"),
        ({"clocks": True}, Limits(64, 4), "clocks=true serves up to .*; got max_batch 64; leave clocks out"),
        ({"twice": "score"}, Limits(2, 4), "twice=score serves one greedy request .*; got max_batch 2, sampling False, 0 streamed tiles;"),
        ({"twice": "latent"}, Limits(1, 4, sampling=True), "got max_batch 1, sampling True, 0 streamed tiles; leave twice out"),
        ({"twice": "reduce"}, Limits(64, 4), "twice=reduce serves one greedy request .*; got max_batch 64, sampling False"),
        ({"weights": "bf16"}, Limits(64, 4), f"bf16 weights serve up to {SMALL_BATCH} requests; got batch 64; take weights=int8"),
    ],
)
def test_options_that_do_not_go_with_the_limits(options: dict[str, Any], limits: Limits, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        ResidentSm90(ResidentOptions(**options)).place(1_000, 256, limits, H200)


def test_no_part_is_done_twice_where_weights_are_streamed() -> None:
    with pytest.raises(Unsupported, match="twice=score serves .* whose weights are all resident; got .*, sampling False, 5 streamed tiles"):
        ResidentSm90(ResidentOptions(twice="score")).place(248_320, 256, Limits(1, 16), H200)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "fp8"}, "has weights int8 or bf16; got 'fp8'"),
        ({"rf_tiles": 10}, "rf_tiles from 0 to 9 and spin_limit >= 0; got 10 and 0"),
        ({"spin_limit": -1}, "got None and -1"),
        ({"twice": "step"}, "has twice none, score, reduce, exchange, latent; got 'step'"),
        ({"twice": "exchange", "exchange": "mailboxes"}, "twice=exchange goes with weights=int8 and exchange=pair; got int8 and mailboxes"),
        ({"twice": "score", "weights": "bf16"}, "twice=score goes with weights=int8 and exchange=pair; got bf16 and pair"),
        ({"exchange": "carrier pigeon"}, "exchange must be one of pair, mailboxes; got 'carrier pigeon'"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResidentOptions(**options)


def spills_above(most: int) -> Callable[..., Kernel]:
    """A compiler for which `most` register tiles are the most without spills."""

    def build(source: str, entry: str, arch: str, *, allow_spills: bool = False) -> Kernel:
        tiles = re.search(r"\.tiles_rf = (\d+)", source)
        if tiles and int(tiles[1]) > most and not allow_spills:
            raise SpillError(f"{tiles[1]} tiles spill")
        return Kernel(entry, arch, b"", 250, 0, 0, "", "")

    return build


@pytest.mark.parametrize("batch", [1, 4, 8])
@pytest.mark.parametrize("most", [2, 4, 9])
def test_register_tiles_are_the_most_that_do_not_spill(batch: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_sm90, "build", spills_above(most))
    limits, first = Limits(batch, 16), plan(151_936, 256, H200, batch=batch)
    assert isinstance(first, Placement)
    placement, _ = ResidentSm90(ResidentOptions()).fit(151_936, 256, limits, H200)
    assert placement == plan(151_936, 256, H200, batch=batch, rf_tiles=min(most, first.register_tiles))


def test_register_tiles_that_were_asked_for_or_allowed_to_spill_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_sm90, "build", spills_above(3))
    with pytest.raises(SpillError, match="5 tiles spill"):
        ResidentSm90(ResidentOptions(rf_tiles=5)).fit(151_936, 256, Limits(), H200)
    placement, _ = ResidentSm90(ResidentOptions(allow_spills=True)).fit(151_936, 256, Limits(), H200)
    assert placement == plan(151_936, 256, H200)


def test_what_always_spills_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_sm90, "build", spills_above(0))
    with pytest.raises(SpillError, match="1 tiles spill"):
        ResidentSm90(ResidentOptions()).fit(151_936, 256, Limits(), H200)
