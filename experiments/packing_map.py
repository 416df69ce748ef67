"""Which lane of a warp holds which byte of a tile of W2 and of the latents, and the numbers of one row (Figure 7).

The maps are not written down, they are observed: bytes that name their own place go through the packing that the kernels load.
What is written down is the hardware's side, the operand layouts of mma.sync.m16n8k32 .s8 (PTX ISA 9.7.14.5.10), and how the
kernels read a latent (`operand_b`). Both sides must agree: the tile, multiplied by these maps, has to give the exact sums of
`kernels.quantize`, or nothing is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor

from experiments.outcome import Incorrect, Outcome, Row
from experiments.plan import Plan
from experiments.schema import GREEDY, PackingMap
from kernels.heads.markov import MarkovHead
from kernels.packing import FRAGMENT_ROWS, fragments, latent_records
from kernels.quantize import MAX_RANK, Int8Rows, TwoPlanes, exact_sums, int8_bias, quantize_rows, two_planes
from kernels.rounding import corrected
from kernels.synthetic import synthetic_inputs
from kernels.walk import Rounding, Unsupported

PLANES = ("hi", "lo")
LANES = range(32)


def run(plan: Plan) -> Outcome:
    """The tables `packing`, `plane_codes` and `plane_sums`, on the CPU: the first tile of the head, at the first step of its walk.

    Raises:
        Unsupported: the head is smaller than a tile, or its rank has no packing.
        Incorrect: the maps do not give the exact sums.
    """
    config, ask = plan.config, cast(PackingMap, plan.config.experiment)
    size = config.head
    if size.vocab < FRAGMENT_ROWS or size.rank % 128 or size.rank > MAX_RANK:
        raise Unsupported(
            f"packing_map needs {FRAGMENT_ROWS} rows and a rank that is a multiple of 128 up to {MAX_RANK}; got vocab {size.vocab} and "
            f"rank {size.rank}; use head=markov_v152k."
        )
    head = MarkovHead.synthetic(size.vocab, size.rank, size.seed, "cpu", size.w1_std, size.w2_std)
    inputs = synthetic_inputs(size.vocab, 1, max(ask.batches), config.inputs.seed, "cpu", config.inputs.base_std, GREEDY)
    w2, latents, base = head.w2[:FRAGMENT_ROWS], head.w1[inputs.anchor], inputs.base_logits[:1, 0, :FRAGMENT_ROWS]
    rows, planes = quantize_rows(w2), two_planes(latents)
    for batch in ask.batches:
        check(rows, TwoPlanes(planes.hi[:batch], planes.lo[:batch], planes.scale_lo[:batch]))
    named = {"head": size.name, "vocab": size.vocab, "rank": size.rank, "row": ask.row, "previous": int(inputs.anchor[0])}
    tables = {
        "packing": [row for batch in ask.batches for row in places(batch, size.rank)],
        "plane_codes": codes(w2[ask.row], latents[0], rows.q[ask.row], planes),
        "plane_sums": [named | sums(rows, planes, base, ask.row)],
    }
    return Outcome(
        tables, protocol={"packing": "places sent through kernels.packing", "check": "a product by these maps equals exact_sums"}
    )


def operand_b(records: Tensor, rank: int) -> Tensor:
    """[batch, 2 rank + 16] latent records -> [rank / 32, 32 lanes, 8]: bytes of b0, then of b1, as the kernels read them.

    The mirror of `chunks` in kernels/cuda/common/latent.cuh and of `column` and `project` in walk_resident.cuh: lane (g, t) takes
    request g / 2 % batch, plane g % 2, and of chunk t + 4 (k / 2) the half k % 2.
    """
    batch = len(records)
    chunks = records[:, : 2 * rank].reshape(batch, 2, rank // 16, 2, 8)  # request, plane, chunk, half, byte
    lane, k_step = torch.arange(32), torch.arange(rank // 32)[:, None]
    group, thread = lane // 4, lane % 4
    return chunks[group // 2 % batch, group % 2, thread + 4 * (k_step // 2), k_step % 2]


def origins(pack: Callable[[Tensor], Tensor], *shape: int) -> Tensor:
    """Where each byte of `pack`'s result lay in its uint8 argument of this shape (at most 65,536 bytes): flat places, int64."""
    named = torch.arange(math.prod(shape)).reshape(shape)
    low, high = (pack((named >> shift & 255).to(torch.uint8)).long() for shift in (0, 8))
    return high << 8 | low


def places(batch: int, rank: int) -> Iterator[Row]:
    """The table `packing` for one batch.

    row and column are an element's place in its operand, A [16, 32], B [32, 8] or D [16, 8]. An element of A is the row of W2 that
    `fragments` put there; k is the column of W2, or the element of the latent, that a byte of A or B holds, -1 for D.
    """
    packed_a = origins(fragments, FRAGMENT_ROWS, rank).reshape(-1, 32, 16).tolist()
    packed_b = origins(lambda named: operand_b(_records(named), rank), batch, 2, rank).tolist()
    meaning: dict[int, Row] = {}  # of a column of B, and so of D
    for k_step, (of_a, of_b) in enumerate(zip(packed_a, packed_b, strict=True)):
        for lane in LANES:
            common = {"batch": batch, "k_step": k_step, "lane": lane}
            for i, place in enumerate(of_a[lane]):
                row, k = divmod(place, rank)
                at = {"register": i // 4, "byte": i % 4, "row": row, "column": _place_a(lane, i)[1]}
                yield {**common, "operand": "a", **at, "k": k, "plane": "", "request": -1}
            for i, place in enumerate(of_b[lane]):
                (request, plane), k = divmod(place // rank, 2), place % rank
                row, column = _place_b(lane, i)
                at = {"register": i // 4, "byte": i % 4, "row": row, "column": column}
                meaning[column] = {"plane": PLANES[plane], "request": request}
                yield {**common, "operand": "b", **at, "k": k, **meaning[column]}
    for lane in LANES:
        for register in range(4):
            row, column = _place_d(lane, register)
            at = {"register": register, "byte": 0, "row": row, "column": column}
            yield {"batch": batch, "k_step": -1, "lane": lane, "operand": "d", **at, "k": -1, **meaning[column]}


def check(rows: Int8Rows, planes: TwoPlanes) -> None:
    """Multiply one tile as the tensor cores do, from packed bytes by the PTX layouts, and compare with the exact sums.

    Raises:
        Incorrect: a sum differs; packing, latent order and layouts do not belong together.
    """
    rank, batch = rows.q.shape[1], len(planes.hi)
    held_a = fragments(rows.q.view(torch.uint8)).reshape(-1, 32, 16).view(torch.int8).long()
    held_b = operand_b(latent_records(planes), rank).view(torch.int8).long()
    a, b = torch.zeros(len(held_a), 16, 32, dtype=torch.int64), torch.zeros(len(held_a), 32, 8, dtype=torch.int64)
    for lane in LANES:
        for i in range(16):
            a[(slice(None), *_place_a(lane, i))] = held_a[:, lane, i]
        for i in range(8):
            b[(slice(None), *_place_b(lane, i))] = held_b[:, lane, i]
    d = (a @ b).sum(dim=0)
    found, expected = 256 * d[:, 0::2] + d[:, 1::2], exact_sums(rows, planes).long()
    for pair in range(4):
        if not torch.equal(found[:, pair], expected[pair % batch]):
            row = int((found[:, pair] != expected[pair % batch]).nonzero()[0])
            raise Incorrect(
                f"row {row}, request {pair % batch} of {batch}: the packed bytes give {int(found[row, pair])} in columns {2 * pair} and {2 * pair + 1}, "
                f"the exact sum is {int(expected[pair % batch, row])}."
            )


def codes(weight: Tensor, latent: Tensor, code: Tensor, planes: TwoPlanes) -> list[Row]:
    """The table `plane_codes`: a row of W2 and the latent of request 0, [rank] each, before and after quantization."""
    columns = zip(*(column.tolist() for column in (weight, code, latent, planes.hi[0], planes.lo[0])), strict=True)
    return [dict(zip(("k", "weight", "code", "latent", "hi", "lo"), (k, *values), strict=True)) for k, values in enumerate(columns)]


def sums(rows: Int8Rows, planes: TwoPlanes, base: Tensor, row: int) -> Row:
    """The table `plane_sums`: one row times request 0, from the integers to the logit."""
    code, bias = rows.q[row].long(), int8_bias(rows, planes)[:1]
    return {
        "hi_sum": int(code @ planes.hi[0].long()),
        "lo_sum": int(code @ planes.lo[0].long()),
        "sum": int(exact_sums(rows, planes)[0, row]),
        "weight_scale": float(rows.scale[row]),
        "latent_scale": float(planes.scale_lo[0]),
        "base": float(base[0, row]),
        "bias": float(bias[0, row]),
        "logit": float(corrected(base, bias, Rounding.INT8)[0, row]),
    }


def _records(named: Tensor) -> Tensor:
    planes = named.view(torch.int8)
    return latent_records(TwoPlanes(planes[:, 0], planes[:, 1], torch.zeros(len(named))))


def _place_a(lane: int, i: int) -> tuple[int, int]:
    """Row and column in A [16, 32] of byte i of a lane's four registers."""
    return lane // 4 + 8 * (i // 4 % 2), lane % 4 * 4 + i % 4 + 16 * (i // 8)


def _place_b(lane: int, i: int) -> tuple[int, int]:
    """Row and column in B [32, 8] of byte i of a lane's two registers."""
    return lane % 4 * 4 + i % 4 + 16 * (i // 4), lane // 4


def _place_d(lane: int, register: int) -> tuple[int, int]:
    """Row and column in D [16, 8] of a lane's accumulator."""
    return lane // 4 + 8 * (register // 2), lane % 4 * 2 + register % 2
