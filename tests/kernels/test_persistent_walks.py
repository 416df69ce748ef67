"""The persistent Hopper walks on a GPU: the oracle's tokens, whatever the batch, the vocabulary, the temperatures and what the inputs hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.heads.markov import MarkovHead
from kernels.walk import ClockedWalk
from tests.kernels.arm import FAMILIES, H200, ONE_REQUEST, SPIN_LIMIT, Arm, compile_all, first_of, head_on_gpu, inputs_on_gpu

pytestmark = pytest.mark.gpu

NAN, INF = torch.nan, torch.inf
BATCHES = [1, 2, 3, 4, 5, 8, 16, 17, 32, 33, 64]
VOCABS = [1_000, 32_000, 49_153, 129_280, 151_936, 154_880, 163_840, 201_024, 248_320, 262_144]
# Every vocabulary with five batches from small to large, every batch with four or five vocabularies, greedy and sampled in turn.
GRID = [(vocab, Arm.resident(BATCHES[(5 * i + 2 * j) % 11], sampling=(i + j) % 2 == 0)) for i, vocab in enumerate(VOCABS) for j in range(5)]
BF16 = [(vocab, Arm.resident(batch, batch > 1, weights="bf16")) for vocab, batch in ((129_280, 1), (248_320, 3), (262_144, 1))]
# Few SMs have as much to do for each as a large vocabulary has for 132, so that all tiers take part; and shapes that 132 never have.
FEW_SMS = [
    (sms, tiles, arm)
    for sms, tiles in ((1, 9), (2, 16), (3, 5), (4, 6), (5, 13))
    for arm in (
        Arm.resident(),
        Arm.resident(3, True),
        Arm.resident(6),
        Arm.resident(7, True),
        Arm.resident(13),
        Arm.resident(17),
        Arm.resident(61, True),
    )
]
SPLITS = [(rf_tiles, batch) for rf_tiles in (0, 1, 3, 5) for batch in (1, 4)]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    cases = [(arm, vocab, H200) for vocab, arm in GRID + BF16]
    cases += [(arm, vocab, H200) for vocab in (1_000, 151_936, 200_058) for arm in FAMILIES]
    cases += [(arm, 128 * sms * tiles, replace(H200, sms=sms)) for sms, tiles, arm in FEW_SMS]
    compile_all(cases + [(Arm.resident(batch, rf_tiles=rf_tiles), 151_936, H200) for rf_tiles, batch in SPLITS])


@pytest.mark.parametrize("arm", ONE_REQUEST, ids=str)
@pytest.mark.parametrize("vocab", [1_000, 151_936])
def test_every_length_gives_the_oracles_tokens(arm: Arm, vocab: int) -> None:
    head = head_on_gpu(vocab)
    walk, longest = arm.prepare(head), inputs_on_gpu(vocab, 16, arm.temperatures, 1)
    for steps in range(1, 17):
        arm.assert_right(walk, head, first_of(longest, 1, steps))


@pytest.mark.parametrize(("vocab", "arm"), GRID, ids=str)
def test_every_batch_and_vocabulary_gives_the_oracles_tokens(vocab: int, arm: Arm) -> None:
    """The longest walk of the largest batch, then of fewer requests and steps than the walk was prepared for, then the largest again."""
    head, most = head_on_gpu(vocab), arm.limits.max_batch
    walk, largest = arm.prepare(head), inputs_on_gpu(vocab, 16, arm.temperatures, most)
    for batch, steps in ((most, 16), (most // 2 + 1, 3), (1, 1), (most, 7)):
        arm.assert_right(walk, head, first_of(largest, batch, steps))


@pytest.mark.parametrize(
    "arm", [Arm.resident(steps=32), Arm.resident(4, True, steps=32), Arm.resident(8, steps=32), Arm.resident(16, True, steps=32)], ids=str
)
def test_the_longest_walk(arm: Arm) -> None:
    """32 steps: slots of base logits and stages are used again and again."""
    head = head_on_gpu(201_024)
    arm.assert_right(arm.prepare(head), head, inputs_on_gpu(201_024, 32, arm.temperatures))


@pytest.mark.parametrize(("sms", "tiles", "arm"), FEW_SMS, ids=str)
def test_a_few_sms_with_much_to_do(sms: int, tiles: int, arm: Arm) -> None:
    """The last CTA is short by one row, and by a tile of each warp."""
    device = replace(H200, sms=sms)
    for vocab in (128 * sms * tiles - 1, 128 * sms * (tiles - 1) + 3):
        head = head_on_gpu(vocab)
        arm.assert_right(arm.prepare(head, device), head, inputs_on_gpu(vocab, 9, arm.temperatures))


@pytest.mark.parametrize(("vocab", "arm"), BF16, ids=str)
def test_bf16_weights_partly_resident(vocab: int, arm: Arm) -> None:
    head = head_on_gpu(vocab)
    walk = arm.prepare(head)
    assert walk.resources.streamed_bytes > 0
    for seed in range(3):
        agreement = arm.launched(walk, head, inputs_on_gpu(vocab, 16, arm.temperatures, seed))
        assert agreement.ok, agreement.reason
        assert agreement.near_ties <= agreement.tokens // 8, "few tokens depend on the order of fp32 sums"


@pytest.mark.parametrize(("rf_tiles", "batch"), SPLITS)
def test_the_split_between_registers_and_shared_memory_changes_nothing(rf_tiles: int, batch: int) -> None:
    """Down to no register tiles, where most of the weights are streamed."""
    head, arm = head_on_gpu(151_936), Arm.resident(batch, rf_tiles=rf_tiles)
    arm.assert_right(arm.prepare(head), head, inputs_on_gpu(151_936, 16, arm.temperatures, rf_tiles))


def special_rows(vocab: int) -> torch.Tensor:
    """[14, vocab] bf16: ties across lanes, warps and CTAs, -0 and +0, NaN, infinities, rows of nothing."""
    last, half = vocab - 1, vocab // 2
    rows = torch.full((14, vocab), -5.0, dtype=torch.bfloat16, device="cuda")
    places: list[dict[int, float]] = [
        {7: 3.0, 15: 3.0, 16: 3.0, last: 3.0},
        {last - 1: 2.0, last: 2.0},
        {3: NAN, 500: 1.0, 501: NAN},
        {0: INF, last: INF},
        {9: -0.0, 10: 0.0},
        {10: 0.0, 9: -0.0, 8: NAN},
        {last: INF, 5: NAN},
        {11: 4.0, 19: 4.0, 27: 4.0},
        {half: 6.0, half + 1: 6.0, half - 200: 6.0, last: 6.0},
    ]
    for row, place in enumerate(places):
        for token, value in place.items():
            rows[row, token] = value
    rows[9], rows[10], rows[11], rows[12], rows[13] = -INF, NAN, -INF, INF, 1.0
    rows[11, last] = -3e38
    return rows


@pytest.mark.parametrize("arm", FAMILIES, ids=str)
@pytest.mark.parametrize("vocab", [1_000, 151_936])
def test_ties_nan_and_infinities(arm: Arm, vocab: int) -> None:
    """With W2 = 0 the logits are the base's. Every request meets every row, each in another step."""
    head = MarkovHead(*(torch.full((vocab, 256), value, dtype=torch.bfloat16, device="cuda") for value in (1.0, 0.0)))
    walk, rows = arm.prepare(head), special_rows(vocab)
    inputs = inputs_on_gpu(vocab, len(rows), arm.temperatures)
    base = torch.stack([rows.roll(3 * request, dims=0) for request in range(inputs.batch)])
    arm.assert_right(walk, head, replace(inputs, base_logits=base))


@pytest.mark.parametrize("arm", FAMILIES, ids=str)
def test_broken_weights_keep_tokens_inside_the_vocabulary(arm: Arm) -> None:
    vocab = 5_000
    w1, w2 = torch.randn(vocab, 256).bfloat16(), torch.randn(vocab, 256).bfloat16()
    w1[17] = NAN
    w2[::3] = INF
    w2[1::3, 5] = NAN
    head = MarkovHead(w1, w2).to("cuda")
    inputs = inputs_on_gpu(vocab, 8, arm.temperatures)
    inputs.anchor[::2] = 17
    arm.assert_right(arm.prepare(head), head, inputs)


def laid_out(base: torch.Tensor) -> list[torch.Tensor]:
    """The same logits in other places, all with a padding that would win if it were read."""
    batch, steps, vocab = base.shape
    views = []
    for padding, offset in ((7, 0), (15, 1), (15, 8), (966, 0)):
        storage = torch.full((batch, steps, vocab + padding), 100.0, dtype=torch.bfloat16, device="cuda")
        views.append(storage[:, :, offset : offset + vocab])
    views.append(torch.full((steps, batch, vocab + 8), 100.0, dtype=torch.bfloat16, device="cuda")[:, :, :vocab].transpose(0, 1))
    for view in views:
        view.copy_(base)
    return views


@pytest.mark.parametrize("arm", FAMILIES, ids=str)
@pytest.mark.parametrize("vocab", [1_003, 200_058])
def test_strided_padded_and_unaligned_base_logits(arm: Arm, vocab: int) -> None:
    """200,058 tokens in rows of 201,024; rows at odd addresses; steps before requests."""
    head = head_on_gpu(vocab)
    walk, inputs = arm.prepare(head), inputs_on_gpu(vocab, 3, arm.temperatures)
    for base in laid_out(inputs.base_logits):
        arm.assert_right(walk, head, replace(inputs, base_logits=base))


@pytest.mark.parametrize("arm", FAMILIES, ids=str)
def test_anchors_out_of_range_are_clamped_into_the_vocabulary(arm: Arm) -> None:
    """A W1 with more rows than the vocabulary makes no difference."""
    vocab = 3_000
    w1, w2 = torch.randn(vocab + 500, 256, device="cuda").bfloat16(), torch.randn(vocab, 256, device="cuda").bfloat16()
    head, inputs = MarkovHead(w1, w2), inputs_on_gpu(vocab, 4, arm.temperatures)
    walk = arm.prepare(head)
    anchors = torch.tensor([-1, vocab, 0, vocab - 1, vocab + 499, 2**31, 2**40, -(2**40), 2**63 - 1, -(2**63)], device="cuda")
    for first in range(0, len(anchors), inputs.batch):
        inputs.anchor.copy_(anchors[(first + torch.arange(inputs.batch, device="cuda")) % len(anchors)])
        arm.assert_right(walk, head, inputs)


@pytest.mark.parametrize(
    "arm",
    [Arm.resident(exchange=exchange, spin_limit=SPIN_LIMIT) for exchange in ("pair", "mailboxes")]
    + [Arm.resident(64, True, spin_limit=SPIN_LIMIT), Arm.streaming(spin_limit=SPIN_LIMIT)],
    ids=str,
)
def test_bounded_spins_do_not_change_tokens(arm: Arm) -> None:
    head = head_on_gpu(151_936)
    arm.assert_right(arm.prepare(head), head, inputs_on_gpu(151_936, 16, arm.temperatures))


@pytest.mark.parametrize("arm", [Arm.resident(clocks=True), Arm.resident(4, True, clocks=True), Arm.streaming(clocks=True)], ids=str)
def test_step_clocks_rise(arm: Arm) -> None:
    head = head_on_gpu(151_936)
    walk = arm.prepare(head)
    assert isinstance(walk, ClockedWalk)
    arm.assert_right(walk, head, inputs_on_gpu(151_936, 16, arm.temperatures))
    cycles, nanoseconds = walk.step_stamps().diff(dim=0).unbind(dim=1)
    assert int(cycles.min()) > 500, cycles.tolist()
    assert int(cycles.max()) < 100_000, cycles.tolist()
    assert 1.0 < float(cycles.sum() / nanoseconds.sum()) < 2.1, "GHz: the two clocks tell of the same walk"
