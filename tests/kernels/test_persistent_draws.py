"""Drawn tokens of the persistent walks on a GPU: kept logits, seeds, slots and rounds. That the tokens are the host's is checked with the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.agreement import stray_logits
from kernels.heads.markov import MarkovHead
from kernels.persistent import PersistentWalk
from kernels.sampling import is_sampled
from kernels.walk import Draft, WalkInputs
from tests.kernels.arm import H200, Arm, compile_all, first_of, head_on_gpu, inputs_on_gpu

pytestmark = pytest.mark.gpu

VOCAB = 151_936
UNTOUCHED = 7.0
INT8 = [Arm.resident(batch, sampling=True) for batch in (1, 2, 4, 8, 16, 29, 61)]
ARMS = [*INT8, Arm.resident(3, sampling=True, weights="bf16")]
GREEDY = {arm: Arm.resident(arm.limits.max_batch) for arm in INT8}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_all([(arm, vocab, H200) for arm in ARMS for vocab in (VOCAB, 49_153)] + [(arm, VOCAB, H200) for arm in GREEDY.values()])


def drawn(walk: PersistentWalk, inputs: WalkInputs) -> torch.Tensor:
    """[batch, steps] the tokens of one launch."""
    draft = Draft.like(inputs)
    walk.launch(inputs, draft)
    return draft.tokens


def assert_kept(arm: Arm, walk: PersistentWalk, head: MarkovHead, inputs: WalkInputs, storage: torch.Tensor, offset: int) -> None:
    """Drawn rows hold the very logits that were drawn from; greedy rows and the padding are untouched."""
    logits = storage[..., offset : offset + inputs.vocab]
    draft, round = Draft(Draft.like(inputs).tokens, logits), walk.round()
    walk.launch(inputs, draft)
    torch.cuda.synchronize()
    agreement = arm.agreement(walk, head, inputs, draft, round)
    assert agreement.ok, agreement.reason
    sampled = is_sampled(inputs.temperature)
    assert stray_logits(logits, draft.tokens, head, inputs, arm.rounding, rows=sampled) == 0
    assert bool((logits[~sampled] == UNTOUCHED).all()), "greedy rows"
    assert bool((storage[..., :offset] == UNTOUCHED).all() & (storage[..., offset + inputs.vocab :] == UNTOUCHED).all()), "padding"


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize("vocab", [VOCAB, 49_153])
def test_drawn_rows_keep_their_logits_and_greedy_rows_stay_untouched(arm: Arm, vocab: int) -> None:
    """Dense, padded, at odd addresses, and steps before requests."""
    head = head_on_gpu(vocab)
    walk, inputs = arm.prepare(head), inputs_on_gpu(vocab, 4, arm.temperatures)
    for padding, offset in ((0, 0), (8, 0), (15, 1), (15, 8)):
        storage = torch.full((inputs.batch, 4, vocab + padding), UNTOUCHED, dtype=torch.bfloat16, device="cuda")
        assert_kept(arm, walk, head, inputs, storage, offset)
    transposed = torch.full((4, inputs.batch, vocab + 8), UNTOUCHED, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
    assert_kept(arm, walk, head, inputs, transposed, 0)


@pytest.mark.parametrize("arm", INT8, ids=str)
def test_all_greedy_and_all_drawn_batches(arm: Arm) -> None:
    """One walk serves both, and greedy rows are those of a walk that cannot draw."""
    head = head_on_gpu(VOCAB)
    walk, inputs = arm.prepare(head), inputs_on_gpu(VOCAB, 7, arm.temperatures)
    for temperature in (0.0, 1.0, -torch.inf, torch.inf):
        inputs.temperature.fill_(temperature)
        arm.assert_right(walk, head, inputs)
    inputs.temperature.zero_()
    assert torch.equal(drawn(walk, inputs), drawn(GREEDY[arm].prepare(head), inputs))


def alike(inputs: WalkInputs) -> WalkInputs:
    """All requests have the logits, the anchor and the seed of the first, at temperature 1."""
    base, anchor, seed = inputs.base_logits, inputs.anchor, inputs.seed
    one = torch.ones_like(inputs.temperature)
    return WalkInputs(base[:1].expand_as(base), anchor[:1].expand_as(anchor).clone(), one, seed[:1].expand_as(seed).clone())


@pytest.mark.parametrize("arm", ARMS[1:], ids=str)
def test_slots_with_one_seed_draw_differently(arm: Arm) -> None:
    head = head_on_gpu(VOCAB)
    tokens = drawn(arm.prepare(head), alike(inputs_on_gpu(VOCAB, 16, arm.temperatures)))
    assert len(tokens.unique(dim=0)) == len(tokens)


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_seed_round_and_slot_give_the_tokens_again(arm: Arm) -> None:
    """In another prepared walk, whatever the other requests are; another round or seed gives others."""
    head = head_on_gpu(VOCAB)
    one, other = arm.prepare(head), arm.prepare(head)
    inputs = replace(inputs_on_gpu(VOCAB, 16, arm.temperatures), temperature=torch.ones(arm.limits.max_batch, device="cuda"))
    first, second = drawn(one, inputs), drawn(one, inputs)
    assert bool((first != second).any(dim=1).all()), "every request draws anew"
    assert torch.equal(drawn(other, inputs), first)
    changed = replace(inputs, seed=inputs.seed.clone(), temperature=inputs.temperature.clone())
    changed.seed[:-1] += 1
    changed.temperature[:-1:2] = 0.0
    third = drawn(other, changed)
    assert torch.equal(third[-1], second[-1]), "the last request has its seed, slot and round"
    assert bool((third[:-1] != second[:-1]).any(dim=1).all())
    assert one.round() == other.round() == 2


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_a_smaller_batch_draws_what_its_slots_draw_in_a_larger_one(arm: Arm) -> None:
    head = head_on_gpu(VOCAB)
    one, other = arm.prepare(head), arm.prepare(head)
    inputs, few = inputs_on_gpu(VOCAB, 5, arm.temperatures), arm.limits.max_batch // 2 + 1
    assert torch.equal(drawn(one, inputs)[:few], drawn(other, first_of(inputs, few, 5)))


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_the_round_wraps(arm: Arm) -> None:
    head = head_on_gpu(VOCAB)
    walk, inputs = arm.prepare(head), inputs_on_gpu(VOCAB, 3, arm.temperatures)
    walk.launches.fill_(-1)
    for round in (2**32 - 1, 0, 1):
        assert walk.round() == round
        arm.assert_right(walk, head, inputs)


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_graph_replays_draw_fresh_noise_and_read_new_temperatures(arm: Arm) -> None:
    """One captured graph serves greedy, drawn and mixed batches; every replay has the next round."""
    head = head_on_gpu(VOCAB)
    walk, inputs = arm.prepare(head), inputs_on_gpu(VOCAB, 7, arm.temperatures)
    draft = Draft.like(inputs)
    walk.launch(inputs, draft)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        walk.launch(inputs, draft)
    mixed, seen = inputs.temperature.clone(), []
    for temperature in (mixed, torch.ones_like(mixed), mixed.roll(1), torch.ones_like(mixed), torch.zeros_like(mixed)):
        inputs.temperature.copy_(temperature)
        round = walk.round()
        draft.tokens.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        agreement = arm.agreement(walk, head, inputs, draft, round)
        assert agreement.ok, agreement.reason
        seen.append(draft.tokens.clone())
    assert bool((seen[1] != seen[3]).any(dim=1).all()), "the same inputs, fresh noise"
