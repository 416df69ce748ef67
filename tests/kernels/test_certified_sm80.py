"""The certified walk: tokens are the oracle's, whatever the table settles, the lists lift or a search has to find. On a GPU where there is one,
and small ones on the CPU everywhere (tests/kernels/emulated.py)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import settled_logits
from kernels.agreement import Agreement, check, stray_logits
from kernels.backends import certified_sm80
from kernels.backends.certified_sm80 import CertifiedOptions, CertifiedSm80, CertifiedWalk
from kernels.device import load
from kernels.driver import LaunchShape
from kernels.heads.markov import MarkovHead
from kernels.noise import gumbel
from kernels.params import Params
from kernels.sampling import is_sampled
from kernels.settled_logits import LogitsLayout
from kernels.synthetic import synthetic_inputs
from kernels.walk import Draft, Limits, Rounding, Unsupported, WalkInputs
from tests.kernels.arm import H200, SPIN_LIMIT, TEMPERATURES
from tests.kernels.emulated import emulate, few_sms

BF16 = torch.bfloat16
VOCAB = 151_936
gpu = pytest.mark.gpu
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SPEC = H200 if ON_GPU else few_sms()


@pytest.fixture(scope="module")
def list_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lists")


@pytest.fixture(autouse=True)
def _somewhere(monkeypatch: pytest.MonkeyPatch, list_cache: Path) -> None:
    monkeypatch.setenv("WTS_LIST_CACHE", str(list_cache))
    if not ON_GPU:
        emulate(monkeypatch, certified_sm80, settled_logits)


def on_gpu(*case: Any) -> Any:
    """A case that is too large for the CPU."""
    return pytest.param(*case, marks=gpu)


@cache
def head_of(vocab: int, w2_std: float = 0.05) -> MarkovHead:
    return MarkovHead.synthetic(vocab, 256, 0, DEVICE, w2_std=w2_std)


def prepared(head: MarkovHead, batch: int = 1, steps: int = 7, sampling: bool = False, **options: Any) -> CertifiedWalk:
    return CertifiedSm80(CertifiedOptions(spin_limit=SPIN_LIMIT if ON_GPU else 0, **options)).prepare(
        head, Limits(batch, steps, sampling), SPEC
    )


def peaked(vocab: int, steps: int, batch: int, seed: int) -> WalkInputs:
    """Some rows of each step stand out, as a drafter's do."""
    inputs, generator = synthetic_inputs(vocab, steps, batch, seed, DEVICE), torch.Generator(DEVICE).manual_seed(seed)
    shape = (batch, steps, min(64, vocab))
    at = torch.randint(vocab, shape, generator=generator, device=DEVICE)
    lift = 6 + 6 * torch.rand(shape, generator=generator, device=DEVICE)
    inputs.base_logits.scatter_add_(2, at, lift.to(BF16))
    return inputs


def with_temperatures(inputs: WalkInputs) -> WalkInputs:
    hot = torch.tensor([TEMPERATURES[i % len(TEMPERATURES)] for i in range(inputs.batch)], device=DEVICE)
    return replace(inputs, temperature=hot)


def _wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def launched(walk: CertifiedWalk, inputs: WalkInputs) -> tuple[Agreement, list[int]]:
    """The oracle's verdict, and how many steps of the launch were weighed again and searched."""
    before, round, draft = walk.tally.sum(0), walk.round(), Draft.like(inputs)
    walk.launch(inputs, draft)
    _wait()
    noise = walk.noise if walk.limits.sampling else None
    return check(draft.tokens, walk.head, inputs, Rounding.TWICE, noise=noise, round=round), (walk.tally.sum(0) - before).tolist()


def assert_right(walk: CertifiedWalk, inputs: WalkInputs) -> list[int]:
    agreement, tally = launched(walk, inputs)
    assert agreement.ok, agreement.reason
    return tally


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize(
    ("vocab", "batch", "steps", "tables"),
    [
        *(
            on_gpu(*case)
            for case in (
                (VOCAB, 1, 1, None),
                (VOCAB, 1, 16, None),
                (VOCAB, 1, 16, False),
                (VOCAB, 4, 7, None),
                (VOCAB, 64, 3, None),
                (VOCAB, 64, 3, True),
                (248_320, 2, 15, None),
                (10_007, 5, 9, None),
                (65, 64, 4, None),
            )
        ),
        (3007, 2, 5, None),
        (3007, 2, 5, False),
        (1000, 3, 3, False),  # on the CPU as many requests as CTAs
        (1000, 2, 32, False),  # every warp has several slices
        (500, 1, 32, None),
        (1, 2, 3, False),
    ],
)
def test_tokens_are_the_oracles(vocab: int, batch: int, steps: int, tables: bool | None, sampling: bool) -> None:
    """Launch after launch, full and smaller ones, on peaked and on flat inputs, with tables and step by step."""
    walk = prepared(head_of(vocab), batch, steps, sampling, tables=tables)
    for seed, (some, fewer) in enumerate([(batch, steps), (batch, steps), (max(1, batch // 2), max(1, steps - 2)), (batch, steps)]):
        for made in (peaked(vocab, fewer, some, seed), synthetic_inputs(vocab, fewer, some, seed, DEVICE)):
            assert_right(walk, with_temperatures(made) if sampling else made)


@pytest.mark.parametrize("options", [{}, {"previous": 32}, {"candidates": 256, "previous": 64}, {"tables": False}])
@pytest.mark.parametrize("vocab", [3007, on_gpu(VOCAB)])
def test_where_many_rows_tie_none_takes_another_ones_place(vocab: int, options: dict[str, Any]) -> None:
    """Base logits in steps of a half: a threshold between two of them leaves places empty, or would leave too few."""
    walk = prepared(head_of(vocab), 1, 7, **options)
    for seed in range(6):
        inputs = synthetic_inputs(vocab, 7, 1, seed, DEVICE)
        assert_right(walk, replace(inputs, base_logits=(2 * inputs.base_logits).round() / 2))


@gpu
@pytest.mark.parametrize(
    "options",
    [
        {"candidates": 128},
        {"candidates": 256, "tables": False},
        {"previous": 256},
        {"previous": 32},
        {"listed": 32},
        {"listed": 256},
        {"wanted": 1},
        {"vectors": 1},
        {"vectors": 8, "wanted": 3},
    ],
)
def test_any_layout_is_right(options: dict[str, Any]) -> None:
    walk = prepared(head_of(VOCAB), 2, 5, True, **options)
    for seed in range(2):
        assert_right(walk, with_temperatures(peaked(VOCAB, 5, 2, seed)))


@gpu
@pytest.mark.parametrize(
    ("batch", "steps", "sampling"),
    [(1, 7, False), (1, 16, False), (1, 16, True), (4, 16, True), (16, 7, False), (64, 7, False), (64, 7, True)],
)
def test_the_build_that_is_timed_is_right(batch: int, steps: int, sampling: bool) -> None:
    """Without bounded spins ptxas makes other code: one such build read what was not there yet, where every test above passed."""
    walk = CertifiedSm80(CertifiedOptions()).prepare(head_of(VOCAB), Limits(batch, steps, sampling), SPEC)
    for seed in range(8):
        for made in (peaked(VOCAB, steps, batch, seed), synthetic_inputs(VOCAB, steps, batch, seed, DEVICE)):
            assert_right(walk, with_temperatures(made) if sampling else made)


@gpu
def test_peaked_steps_are_settled_by_the_table_and_flat_ones_are_searched() -> None:
    assert assert_right(prepared(head_of(VOCAB), 1, 16), peaked(VOCAB, 16, 1, 0)) == [0, 0]
    again, searched = assert_right(prepared(head_of(VOCAB, 0.15), 1, 16), synthetic_inputs(VOCAB, 16, 1, 0, DEVICE))
    assert 0 < searched <= again <= 16


@pytest.mark.parametrize("tables", [True, False])
@pytest.mark.parametrize("vocab", [3007, on_gpu(VOCAB)])
def test_every_winner_comes_from_a_list(vocab: int, tables: bool) -> None:
    """Biases of standard deviation 48 beside logits of 2: what the table and its extra entries do not have is weighed on the spot; none is searched."""
    walk, inputs = prepared(head_of(vocab, 3.0), 1, 7, tables=tables), synthetic_inputs(vocab, 7, 1, 0, DEVICE)
    again, searched = assert_right(walk, inputs)
    assert (again > 0) == tables
    assert searched == 0


def test_extra_entries_of_an_earlier_launch_are_none_of_this_one() -> None:
    """Where a launch leaves its extra entries, proved ones lie that name row 0 after every token of the walk."""
    walk, inputs = prepared(head_of(1000, 1.0), 1, 7, previous=32), synthetic_inputs(1000, 7, 1, 0, DEVICE)
    draft = Draft.like(inputs)
    walk.launch(inputs, draft)
    _wait()
    proved_row_0 = 1 << 31 | ((1 << 18) - 1) << 10
    extra = walk._scratch["extra"].view(7, -1)
    extra[1:] = (draft.tokens[0, :-1, None] << 32) | proved_row_0
    assert assert_right(walk, inputs)[0] > 0, "some step has no entry, so the extra entries were asked for"


@pytest.mark.parametrize("tables", [True, False])
@pytest.mark.parametrize("sampling", [False, True])
def test_where_all_rows_are_alike_every_row_is_searched(sampling: bool, tables: bool) -> None:
    """The lowest token wins where all tie; with noise, the row that it favours."""
    one = torch.ones(3000, 256, dtype=BF16, device=DEVICE)
    inputs = WalkInputs(
        torch.ones(2, 4, 3000, dtype=BF16, device=DEVICE),
        torch.tensor([5, 2999], device=DEVICE),
        torch.tensor([0.0, 1.0 if sampling else 0.0], device=DEVICE),
        torch.tensor([1, 2], device=DEVICE),
    )
    walk, draft = prepared(MarkovHead(one, one), 2, 4, sampling, tables=tables), Draft.like(inputs)
    assert_right(walk, inputs)
    walk.launch(inputs, draft)
    assert draft.tokens[0].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("tables", [True, False])
@pytest.mark.parametrize("candidates", [128, 256])
@pytest.mark.parametrize("others", ["alike", "apart"])
@pytest.mark.parametrize(("score", "token"), [(10.0, 3), (10.0625, 4000), (9.9375, 3)])
def test_a_tie_at_the_bound_is_no_proof(candidates: int, score: float, token: int, others: str, tables: bool) -> None:
    """Row 3 has the bound itself: base 8.9375, next below the candidates' 9, and bias 1.0625, the largest outside the list, 10 in all. The best of the rows
    named is row 4000 with `score`, an ulp of bf16 above, level with or below it: where they tie row 3 wins, for it is lower. Where all others are alike more rows of its
    slice tie than have a place, so it keeps row 3 back; else it offers it."""
    vocab = 8192
    base = torch.full((vocab,), -20.0)
    if others == "apart":
        base -= torch.rand(vocab, generator=torch.Generator().manual_seed(0)) * 60
    bias = torch.full((vocab,), -50.0)
    named = torch.arange(16 * (251 - candidates), 16 * 251, 16) % vocab  # one of every sector: as many in every slice and for every warp
    base[named] = 9.0
    listed = torch.arange(1, 1 + 64 * 60, 60)
    listed = listed[(listed % 16 != 0) & (listed != 3)]
    base[3], bias[3] = 8.9375, 1.0625
    base[listed], bias[listed] = -100.0, 3.0
    extra = torch.tensor([r for r in range(5, 200) if r % 16 and r not in set(listed.tolist())])[: 64 - len(listed)]
    base[extra], bias[extra] = -100.0, 3.0
    base[4000], bias[4000] = 9.0, score - 9.0
    assert int((base >= 9).sum()) == candidates, "as many as there is room for, so that row 3 is none"
    assert int((bias > 2).sum()) == 64, "as many as the list names, so that row 3 is none"
    w1, w2 = torch.zeros(vocab, 256), torch.zeros(vocab, 256)
    w1[:, 0] = 1.0
    w2[:, 0] = bias
    head = MarkovHead(w1.to(BF16).to(DEVICE), w2.to(BF16).to(DEVICE))
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    inputs = WalkInputs(base.to(BF16).to(DEVICE)[None, None], zero, torch.zeros(1, device=DEVICE), zero)
    walk, draft = prepared(head, 1, 1, candidates=candidates, listed=64, tables=tables), Draft.like(inputs)
    walk.launch(inputs, draft)
    assert draft.tokens.item() == token
    assert walk.tally[0].tolist() == ([0, 0] if score > 10 else [1, 1])


@pytest.mark.parametrize("tables", [True, False])
def test_a_row_that_was_offered_and_has_no_place_is_found(tables: bool) -> None:
    """200 rows tie, more than there is room for, so none of them is a candidate; one of them wins by a bias that is not listed."""
    vocab = 8192
    base = -20 - torch.rand(vocab, generator=torch.Generator().manual_seed(0)) * 60
    named = 32 * torch.arange(200)  # of every other sector
    base[named], base[7] = 9.0, 9.5
    bias = torch.zeros(vocab)
    bias[named[150]], bias[1:1025:16] = 1.0, 3.0
    base[1:1025:16] = -100.0
    w1, w2 = torch.zeros(vocab, 256), torch.zeros(vocab, 256)
    w1[:, 0], w2[:, 0] = 1.0, bias
    head = MarkovHead(w1.to(BF16).to(DEVICE), w2.to(BF16).to(DEVICE))
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    inputs = WalkInputs(base.to(BF16).to(DEVICE)[None, None], zero, torch.zeros(1, device=DEVICE), zero)
    walk, draft = prepared(head, 1, 1, listed=64, tables=tables), Draft.like(inputs)
    walk.launch(inputs, draft)
    assert draft.tokens.item() == named[150]
    assert walk.tally[0].tolist() == [1, 1]


@pytest.mark.parametrize("tables", [True, False])
@pytest.mark.parametrize(("bias", "token"), [(1.0625, 3), (1.0, 4000)])
def test_a_listed_row_at_what_bounds_the_others_is_looked_at(bias: float, token: int, tables: bool) -> None:
    """The best candidate is row 4000 with 10. Row 3 is none: its base logit is the next below the candidates', 8.9375. Its listed bias lifts it to 10 too,
    and it is the lower row; or to 9.9375, which is not enough."""
    vocab = 8192
    base, biases = torch.full((vocab,), -20.0), torch.full((vocab,), -50.0)
    base[torch.arange(16 * 123, 16 * 251, 16)] = 9.0  # one of every sector, as many as there is room for
    base[3], biases[3], biases[4000] = 8.9375, bias, 1.0
    base[4000] = 9.0
    w1, w2 = torch.zeros(vocab, 256), torch.zeros(vocab, 256)
    w1[:, 0], w2[:, 0] = 1.0, biases
    head = MarkovHead(w1.to(BF16).to(DEVICE), w2.to(BF16).to(DEVICE))
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    inputs = WalkInputs(base.to(BF16).to(DEVICE)[None, None], zero, torch.zeros(1, device=DEVICE), zero)
    walk, draft = prepared(head, 1, 1, tables=tables), Draft.like(inputs)
    walk.launch(inputs, draft)
    assert draft.tokens.item() == token
    assert walk.tally[0].tolist() == [0, 0]


@pytest.mark.parametrize("sampling", [False, True])
def test_nan_and_infinities(sampling: bool) -> None:
    rows = [
        ([1.0, torch.nan, 3.0, torch.nan], 502),
        ([-torch.inf] * 4, 0),
        ([torch.nan] * 4, 0),
        ([-torch.nan, 2.0, torch.nan, 2.0], 501),
        ([1.0, torch.inf, torch.inf, -torch.inf], 501),
        ([-torch.inf, -3e38, -torch.inf, -torch.inf], 501),
    ]
    base = torch.full((1, len(rows), 600), -torch.inf, dtype=BF16)
    base[0, :, 500:504] = torch.tensor([row for row, _ in rows], dtype=BF16)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for temperature in (0.0, 1.0) if sampling else (0.0,):
        inputs = WalkInputs(base.to(DEVICE), zero, torch.full((1,), temperature, device=DEVICE), zero)
        walk, draft = prepared(head_of(600), 1, len(rows), sampling), Draft.like(inputs)
        walk.launch(inputs, draft)
        if temperature == 0:
            assert draft.tokens[0].tolist() == [token for _, token in rows]
        assert_right(walk, inputs)


_BOUNDS = """#include "certified/rule.cuh"
extern "C" __global__ void __launch_bounds__(128, 1) noise_bounds(const __grid_constant__ wts::Params p) {
  const int i = blockIdx.x * 128 + threadIdx.x;
  reinterpret_cast<float*>(p.logits)[i] = wts::gumbel_bound(reinterpret_cast<const uint32_t*>(p.base)[i]);
}
"""


def test_no_noise_exceeds_its_bound() -> None:
    """By the hardware's logarithm, on the CPU by the library's. It is close where it matters: for words below the median, whose rows may win."""
    few = torch.cat([torch.arange(64), 2 ** torch.arange(32), 2**32 - 1 - torch.arange(64)])
    words = torch.cat([few, torch.randint(2**32, (128 * 512 - len(few),), generator=torch.Generator().manual_seed(0))])
    given, bounds = (words - (words >> 31 << 32)).int().to(DEVICE), torch.zeros(len(words), device=DEVICE)
    kernel = certified_sm80.build(_BOUNDS, "noise_bounds", SPEC.arch)
    certified_sm80.load(kernel, LaunchShape(512, 128)).launch(Params(base=given.data_ptr(), logits=bounds.data_ptr()))
    _wait()
    above = bounds.cpu().double() - gumbel(words).double()
    assert above.min() > 2.0**-13, "half of its slack is left"
    assert above[words < 2**31].max() < 0.05


UNTOUCHED = 7.0


@pytest.mark.parametrize(
    ("vocab", "batch", "steps", "tables"),
    [
        on_gpu(VOCAB, 1, 16, True),
        on_gpu(10_007, 5, 7, True),
        on_gpu(VOCAB, 64, 7, False),
        (501, 3, 7, True),
        (501, 3, 7, False),
    ],
)
@pytest.mark.parametrize(("padding", "offset"), [(0, 0), (15, 1), (8, 8)])
def test_drawn_rows_keep_their_logits_and_greedy_rows_stay_untouched(
    vocab: int, batch: int, steps: int, tables: bool, padding: int, offset: int
) -> None:
    walk, inputs = prepared(head_of(vocab), batch, steps, True, tables=tables), with_temperatures(peaked(vocab, steps, batch, 0))
    storage = torch.full((batch, steps, vocab + padding), UNTOUCHED, dtype=BF16, device=DEVICE)
    logits = storage[..., offset : offset + vocab]
    draft, round = Draft(Draft.like(inputs).tokens, logits), walk.round()
    walk.launch(inputs, draft)
    _wait()
    found = check(draft.tokens, walk.head, inputs, Rounding.TWICE, noise=walk.noise, round=round)
    assert found.ok, found.reason
    sampled = is_sampled(inputs.temperature)
    assert stray_logits(logits, draft.tokens, walk.head, inputs, Rounding.TWICE, rows=sampled) == 0
    assert bool((logits[~sampled] == UNTOUCHED).all()), "greedy rows"
    assert bool((storage[..., :offset] == UNTOUCHED).all() & (storage[..., offset + vocab :] == UNTOUCHED).all()), "padding"


@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("vocab", [501, on_gpu(10_007)])
def test_strided_base_at_odd_addresses_and_wild_anchors(vocab: int, offset: int) -> None:
    plain, walk = peaked(vocab, 5, 3, 0), prepared(head_of(vocab), 3, 5)
    padded = torch.full((5, 3, vocab + 17), 1e4, dtype=BF16, device=DEVICE).transpose(0, 1)
    padded[..., offset : offset + vocab] = plain.base_logits
    anchors = torch.tensor([-5, 10**12, 7], device=DEVICE)
    assert_right(walk, WalkInputs(padded[..., offset : offset + vocab], anchors, plain.temperature, plain.seed))


@gpu
@pytest.mark.parametrize(("batch", "sampling"), [(1, False), (3, True), (5, True), (64, False)])
def test_graph_replay(batch: int, sampling: bool) -> None:
    inputs, walk = peaked(VOCAB, 7, batch, 1), prepared(head_of(VOCAB), batch, 7, sampling)
    inputs = with_temperatures(inputs) if sampling else inputs
    draft = Draft.like(inputs, logits=sampling)
    walk.launch(inputs, draft)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        walk.launch(inputs, draft)
    for seed in range(20):
        inputs.base_logits.copy_((peaked if seed % 2 else synthetic_inputs)(VOCAB, 7, batch, seed).base_logits.to(DEVICE))
        draft.tokens.fill_(-1)
        round = walk.round()
        graph.replay()
        _wait()
        found = check(draft.tokens, walk.head, inputs, Rounding.TWICE, noise=walk.noise if sampling else None, round=round)
        assert found.ok, found.reason
        if draft.logits is not None:
            sampled = is_sampled(inputs.temperature)
            assert stray_logits(draft.logits, draft.tokens, walk.head, inputs, Rounding.TWICE, rows=sampled) == 0


def test_refusals() -> None:
    head = MarkovHead.synthetic(8, 256)
    backend = CertifiedSm80(CertifiedOptions())
    for bad, limits, device, message in (
        (MarkovHead.synthetic(8, 128), Limits(), H200, "rank 256 and vocabularies up to 262,144; got rank 128"),
        (head, Limits(max_batch=65), H200, "up to 64 requests and 32 steps"),
        (head, Limits(max_steps=33), H200, "up to 64 requests and 32 steps"),
        (head, Limits(), load("cpu"), "needs a CUDA GPU"),
        (MarkovHead(head.w1, head.w2 * torch.nan), Limits(), H200, "NaN or infinite weights"),
    ):
        with pytest.raises(Unsupported, match=message):
            backend.prepare(bad, limits, device)
    little = replace(H200, smem_bytes_per_cta=101_376)  # as GPUs without much shared memory have it
    for limits in (Limits(), Limits(64, 7)):
        assert backend.place(VOCAB, limits, little).smem_bytes < little.smem_bytes_per_cta
    with pytest.raises(Unsupported, match="need 113,664 bytes of shared memory a CTA and h200 has 101,376; ask for fewer of them"):
        CertifiedSm80(CertifiedOptions(vectors=8)).place(VOCAB, Limits(), little)
    with pytest.raises(Unsupported, match="64 requests need a CTA each and h200 has 40 SMs; ask for fewer requests"):
        backend.place(VOCAB, Limits(64, 7), replace(H200, sms=40))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"candidates": 64}, "candidates of 128, 256"),
        ({"listed": 48}, "listed of 32, 64, 128, 256, 512"),
        ({"previous": 8}, "previous of 32"),
        ({"vectors": 9}, "1 to 8"),
        ({"wanted": 0}, "1 to 15"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            CertifiedOptions(**options)


@pytest.mark.parametrize("vocab", [1, 63, 10_007, VOCAB, 248_320, 262_144])
@pytest.mark.parametrize("batch", [1, 5, 64])
@pytest.mark.parametrize("steps", [1, 7, 16, 32])
def test_layouts_cover_the_vocabulary_and_the_previous_tokens(vocab: int, batch: int, steps: int) -> None:
    layout = CertifiedSm80(CertifiedOptions()).place(vocab, Limits(batch, steps), H200)
    assert layout.slices * layout.vectors * 256 >= vocab
    assert layout.previous % (layout.parts * layout.block) == 0
    assert layout.parts == 1 or layout.parts * batch * steps <= layout.ctas
    assert 1 <= layout.team <= layout.ctas // batch
    assert layout.ctas == H200.sms
    assert layout.smem_bytes <= H200.smem_bytes_per_cta


@pytest.mark.parametrize("smem_bytes", [H200.smem_bytes_per_cta, 166_912, 101_376])
@pytest.mark.parametrize("columns", [1, 16, 17, 112, 256, 257, 448, 1024, 2048])
def test_every_column_has_its_place(columns: int, smem_bytes: int) -> None:
    layout = LogitsLayout.of(columns, replace(H200, smem_bytes_per_cta=smem_bytes))
    assert 16 * layout.tiles * layout.groups >= columns
    assert 16 * layout.tiles * (layout.groups - 1) < columns, "no group without columns"
    assert 1 <= layout.stages <= 3
    assert layout.smem_bytes <= smem_bytes
    with pytest.raises(Unsupported, match="logits of a settled walk need 75,008 bytes of shared memory and h200 has 65,536"):
        LogitsLayout.of(columns, replace(H200, smem_bytes_per_cta=65_536))
