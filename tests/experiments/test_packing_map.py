"""The recorded maps against the packing, against the PTX ISA's own formulas, and against plain integer products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments import packing_map, record
from experiments.outcome import Incorrect, Outcome
from experiments.plan import Plan
from experiments.schema import HeadConfig, PackingMap
from kernels.heads.markov import MarkovHead
from kernels.packing import fragments
from kernels.quantize import exact_sums, int8_bias, two_planes
from kernels.walk import Unsupported
from tests.data import make_runs

RANK, BATCHES = 256, (1, 2, 4)
Array = NDArray[Any]


@pytest.fixture
def asked(plan: Plan) -> Plan:
    head = HeadConfig("test", vocab=40, rank=RANK)
    return replace(plan, config=replace(plan.config, head=head, experiment=PackingMap(row=11, batches=BATCHES)))


@pytest.fixture
def outcome(asked: Plan) -> Outcome:
    return packing_map.run(asked)


@pytest.fixture
def packing(outcome: Outcome) -> pd.DataFrame:
    return pd.DataFrame(outcome.tables["packing"])


def _of(packing: pd.DataFrame, operand: str, batch: int) -> dict[str, Array]:
    rows = packing[(packing["operand"] == operand) & (packing["batch"] == batch)]
    return {str(name): column.to_numpy() for name, column in rows.items()}


def test_the_map_of_a_unpacks_what_was_packed(packing: pd.DataFrame) -> None:
    original = torch.randint(256, (16, RANK), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    packed = fragments(original).numpy().reshape(RANK // 32, 32, 4, 4)
    for batch in BATCHES:
        a = _of(packing, "a", batch)
        unpacked, visits = np.zeros((16, RANK), np.uint8), np.zeros((16, RANK), int)
        unpacked[a["row"], a["k"]] = packed[a["k_step"], a["lane"], a["register"], a["byte"]]
        np.add.at(visits, (a["row"], a["k"]), 1)
        assert (visits == 1).all()
        assert (unpacked == original.numpy()).all()


@pytest.mark.parametrize("batch", BATCHES)
def test_every_byte_of_the_latents_is_held_once_a_pair_of_columns(packing: pd.DataFrame, batch: int) -> None:
    b = _of(packing, "b", batch)
    visits = np.zeros((batch, 2, RANK), int)
    np.add.at(visits, (b["request"], (b["plane"] == "lo").astype(int), b["k"]), 1)
    assert (visits == 4 // batch).all(), "the pairs of columns that no request needs are copies"
    assert (b["plane"] == np.where(b["column"] % 2, "lo", "hi")).all()
    if batch == 4:
        assert (b["request"] == b["column"] // 2).all()


def test_places_are_those_of_the_ptx_isa(packing: pd.DataFrame) -> None:
    """9.7.14.5.10, Matrix Fragments for mma.m16n8k32: groupID and threadID_in_group, element a_i, b_i or c_i."""
    a, b, d = (_of(packing, operand, 1) for operand in "abd")
    i = 4 * a["register"] + a["byte"]
    upper = ((i >= 4) & (i < 8)) | (i >= 12)
    assert (a["row"] == (a["lane"] >> 2) + 8 * upper).all()
    assert (a["column"] == a["lane"] % 4 * 4 + (i & 3) + 16 * (i >= 8)).all()
    i = 4 * b["register"] + b["byte"]
    assert (b["row"] == b["lane"] % 4 * 4 + (i & 3) + 16 * (i >= 4)).all()
    assert (b["column"] == b["lane"] >> 2).all()
    assert (d["row"] == (d["lane"] >> 2) + 8 * (d["register"] >= 2)).all()
    assert (d["column"] == d["lane"] % 4 * 2 + (d["register"] & 1)).all()
    assert [len(each["lane"]) for each in (a, b, d)] == [16 * RANK, 8 * RANK, 128]


def product(packing: pd.DataFrame, batch: int, w: Array, planes: Array) -> Array:
    """[batch, 16] sums: all k-steps multiplied by the recorded maps alone, then 256 d0 + d1 inside each lane. planes: [batch, 2, rank]."""
    a, b, d = (_of(packing, operand, batch) for operand in "abd")
    left, right = np.zeros((RANK // 32, 16, 32), np.int64), np.zeros((RANK // 32, 32, 8), np.int64)
    left[a["k_step"], a["row"], a["column"]] = w[a["row"], a["k"]]
    right[b["k_step"], b["row"], b["column"]] = planes[b["request"], (b["plane"] == "lo").astype(int), b["k"]]
    accumulators = np.zeros((32, 4), np.int64)
    accumulators[d["lane"], d["register"]] = (left @ right).sum(axis=0)[d["row"], d["column"]]
    place = {(lane, register): i for i, (lane, register) in enumerate(zip(d["lane"], d["register"], strict=True))}
    found = np.full((batch, 16), np.iinfo(np.int64).min)
    for lane in range(32):
        for register in (0, 2):
            hi, lo = place[lane, register], place[lane, register + 1]
            assert (d["plane"][hi], d["plane"][lo]) == ("hi", "lo")
            assert (d["row"][hi], d["request"][hi]) == (d["row"][lo], d["request"][lo]), "a thread has both planes of one row and request"
            total = 256 * accumulators[lane, register] + accumulators[lane, register + 1]
            before = found[d["request"][hi], d["row"][hi]]
            assert before in (np.iinfo(np.int64).min, total), "copies agree"
            found[d["request"][hi], d["row"][hi]] = total
    return found


@pytest.mark.parametrize("batch", BATCHES)
def test_the_product_by_the_maps_is_the_integer_product(packing: pd.DataFrame, batch: int) -> None:
    rng = np.random.default_rng(batch)
    w, planes = rng.integers(-127, 128, (16, RANK)), rng.integers(-128, 128, (batch, 2, RANK))
    expected = (256 * planes[:, 0] + planes[:, 1]) @ w.T
    assert (product(packing, batch, w, planes) == expected).all()


def test_the_example_is_the_int8_rule_in_numbers(asked: Plan, outcome: Outcome) -> None:
    (sums,) = outcome.tables["plane_sums"]
    codes = {name: np.array([row[name] for row in outcome.tables["plane_codes"]]) for name in outcome.tables["plane_codes"][0]}
    assert (codes["k"] == np.arange(RANK)).all()
    head = MarkovHead.synthetic(40, RANK)
    planes = two_planes(head.w1[sums["previous"]][None])
    assert codes["weight"].tolist() == head.w2[11].tolist()
    assert codes["latent"].tolist() == head.w1[sums["previous"]].tolist()
    hi, lo = int(codes["code"] @ codes["hi"]), int(codes["code"] @ codes["lo"])
    assert (sums["hi_sum"], sums["lo_sum"], sums["sum"]) == (hi, lo, 256 * hi + lo)
    assert sums["sum"] == int(exact_sums(head.int8, planes)[0, 11])
    scale = np.float32(sums["weight_scale"]) * np.float32(sums["latent_scale"])
    assert sums["bias"] == float(scale * np.float32(sums["sum"])) == float(int8_bias(head.int8, planes)[0, 11])
    assert sums["logit"] == float(torch.tensor(np.float32(sums["base"]) + np.float32(sums["bias"])).bfloat16())
    step = sums["latent_scale"]
    assert np.abs(codes["latent"] - step * (256 * codes["hi"] + codes["lo"])).max() <= 1.001 * step
    assert sums["bias"] == pytest.approx(float(codes["weight"] @ codes["latent"]), abs=0.02)


def test_the_tables_can_be_recorded(outcome: Outcome) -> None:
    assert {name: record.table(name, rows, "r").num_rows for name, rows in outcome.tables.items()} == {
        "packing": 3 * (24 * RANK + 128),
        "plane_codes": RANK,
        "plane_sums": 1,
    }


def test_the_fixture_run_has_the_real_map(asked: Plan, tmp_path: Path) -> None:
    """Its formulas are written down in tests/data, so this also holds the order of k."""
    config = replace(asked.config, head=HeadConfig("test", vocab=16, rank=128), experiment=PackingMap())
    real = pd.DataFrame(packing_map.run(replace(asked, config=config)).tables["packing"])
    fixture = pd.read_parquet(make_runs.packing_map(tmp_path) / "packing.parquet").drop(columns="run_id")
    order = ["batch", "operand", "k_step", "lane", "register", "byte"]
    tidy = [frame.sort_values(order, ignore_index=True)[list(real.columns)] for frame in (real, fixture)]
    pd.testing.assert_frame_equal(*tidy, check_dtype=False)


def _another_k_order(rows: Tensor) -> Tensor:
    return fragments(rows.unflatten(-1, (-1, 16)).flip(-2).flatten(-2))


def _rows_g_and_g_plus_8_swapped(rows: Tensor) -> Tensor:
    return fragments(rows.roll(8, dims=-2))


@pytest.mark.parametrize("wrong", [_another_k_order, _rows_g_and_g_plus_8_swapped])
def test_a_packing_that_the_latent_does_not_follow_is_not_recorded(
    asked: Plan, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Tensor], Tensor]
) -> None:
    monkeypatch.setattr(packing_map, "fragments", wrong)
    with pytest.raises(
        Incorrect, match=r"^row 0, request 0 of 1: the packed bytes give -?\d+ in columns 0 and 1, the exact sum is -?\d+\.$"
    ):
        packing_map.run(asked)


def test_swapped_planes_are_not_recorded(asked: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    right = packing_map.latent_records
    monkeypatch.setattr(packing_map, "latent_records", lambda planes: right(replace(planes, hi=planes.lo, lo=planes.hi)))
    with pytest.raises(Incorrect, match="the exact sum is"):
        packing_map.run(asked)


@pytest.mark.parametrize(("vocab", "rank"), [(15, 256), (64, 64), (64, 200), (64, 640)])
def test_a_head_without_a_packed_tile_is_refused(asked: Plan, vocab: int, rank: int) -> None:
    with pytest.raises(Unsupported, match=f"got vocab {vocab} and rank {rank}; use head=markov_v152k"):
        packing_map.run(replace(asked, config=replace(asked.config, head=HeadConfig("test", vocab, rank))))


@pytest.mark.parametrize(
    ("wrong", "words"), [({"row": 16}, "row: a tile has rows 0 to 15; got 16"), ({"batches": (1, 3)}, r"got \[1, 3\]")]
)
def test_rows_and_batches_are_those_of_a_tile(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PackingMap(**wrong)
