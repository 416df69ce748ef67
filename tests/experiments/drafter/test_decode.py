"""Speculative decoding is the target's decoding: the same tokens if greedy, the same distribution if not; each request at its own pace."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from scipy import stats

from experiments.drafter.checkpoint import Pair
from experiments.drafter.decode import Decoder, Round, decode_plainly
from experiments.drafter.verify import Rule, verify_greedy, verify_sampled
from kernels.device import load
from kernels.heads.markov import MarkovHead
from kernels.registry import create
from kernels.walk import Limits, PreparedWalk
from tests.experiments.drafter.test_target import tokens


@pytest.fixture(scope="module")
def willing(pair: Pair) -> Pair:
    """A target whose logits are tame, so that drafts pass now and then."""
    torch.manual_seed(3)
    target = type(pair.target)(pair.config)
    target.load_state_dict(pair.target.state_dict())
    torch.nn.init.normal_(target.lm_head.weight, std=0.02)
    target.lm_head.weight.data[:8] += 0.3 * torch.randn(8, 16)
    return replace(pair, target=target.eval().requires_grad_(False))


def walk(pair: Pair, steps: int, batch: int, sampling: bool) -> PreparedWalk:
    weights = {name: weight.bfloat16() for name, weight in pair.drafter.markov_head.state_dict().items()}
    head = MarkovHead(0.1 * weights["markov_w1.weight"], 0.1 * weights["markov_w2.weight"])
    return create("reference").prepare(head, Limits(batch, steps, sampling), load("cpu"))


@pytest.mark.parametrize(("steps", "batch", "count"), [(4, 1, 20), (2, 3, 17), (1, 2, 5), (4, 3, 1)])
def test_greedy_output_is_the_targets_own(willing: Pair, steps: int, batch: int, count: int) -> None:
    prompts, rounds = tokens(batch, 6, 5), list[Round]()
    decoder = Decoder(willing, walk(willing, steps, batch, False), steps, watch=rounds.append)
    decoded = decoder.decode(prompts, count)
    assert [each.tokens for each in decoded] == decode_plainly(willing, prompts, count)
    for row, each in enumerate(decoded):
        assert len(each.accepted) == sum(bool(round.live[row]) for round in rounds)
        assert 1 + sum(each.accepted) + len(each.accepted) >= count, "one from the prompt, and one a round beside what passed"
    if count > 10:
        passed = [accepted for each in decoded for accepted in each.accepted]
        assert min(passed) < max(passed), "some drafts pass and some do not"


def test_a_decoder_decodes_again_and_leaves_slots_idle(willing: Pair) -> None:
    """The second batch takes the first one's tensors, and has one prompt fewer than slots."""
    prompts = tokens(5, 6, 5)
    decoder = Decoder(willing, walk(willing, 4, 3, False), 4)
    decoded = [each.tokens for part in prompts.split(3) for each in decoder.decode(part, 9, batch=3)]
    assert decoded == decode_plainly(willing, prompts, 9)


def test_walks_beside_draft_the_same_rounds_and_nothing_of_theirs_is_kept(willing: Pair) -> None:
    """A twin of the decoder's own walk draws the same tokens, so as many are expected to pass; one that has walked before draws others. The text and what was
    expected of it are those of a decoder alone, whose target has read nothing else."""
    prompts, steps = tokens(3, 6, 5), 4
    alone, twin, own = (walk(willing, steps, 3, True) for _ in range(3))
    ahead = walk(willing, steps, 3, True)
    plain = Decoder(willing, alone, steps, 1.0)
    expected = plain.decode(prompts, 20)
    Decoder(willing, ahead, steps, 1.0).decode(prompts, 9)
    decoded = Decoder(willing, own, steps, 1.0, beside=(twin, ahead)).decode(prompts, 20)
    assert [(each.tokens, each.accepted, each.expected) for each in decoded] == [
        (each.tokens, each.accepted, each.expected) for each in expected
    ]
    for each in decoded:
        assert each.beside[0] == pytest.approx(each.expected, abs=1e-9)
        assert 0 < each.beside[1] < steps * len(each.accepted)
    assert any(abs(each.beside[1] - each.expected) > 1e-6 for each in decoded)
    with pytest.raises(ValueError, match="on the same rounds where these are sampled; got temperature 0"):
        Decoder(willing, own, steps, beside=(twin,))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
def test_a_captured_round_decodes_what_the_target_says(willing: Pair, batch: int) -> None:
    """On a GPU all rounds but the first are replays of a graph; batches of any size read the same shapes again."""
    pair = replace(willing, target=copy.deepcopy(willing.target).cuda(), drafter=copy.deepcopy(willing.drafter).cuda())
    weights = {name: 0.1 * weight.bfloat16() for name, weight in pair.drafter.markov_head.state_dict().items()}
    head = MarkovHead(weights["markov_w1.weight"], weights["markov_w2.weight"])
    prepared = create("sglang_folded").prepare(head, Limits(batch, 4), load("h200"))
    prompts, decoder = tokens(6, 6, 5).cuda(), Decoder(pair, prepared, 4)
    decoded = [each.tokens for part in prompts.split(batch) for each in decoder.decode(part, 20, batch=batch)]
    plain = [each for part in prompts.split(batch) for each in decode_plainly(pair, part, 20)]
    assert decoded == plain


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_a_sampled_verdict_is_the_engines_by_the_book(rule: Rule, temperature: float) -> None:
    """Against whole softmaxes and a loop over requests. Coins are far enough from the limits for fp32 not to matter."""
    generator = torch.Generator().manual_seed(1)
    draft, target = (torch.randn(64, rows, 9, generator=generator) for rows in (3, 4))
    draft[:, :, 0] = -torch.inf
    drafted, coins = torch.randint(9, (64, 3), generator=generator), torch.rand(64, 4, generator=generator, dtype=torch.float64)
    found = verify_sampled(drafted, draft, target, temperature, coins, rule)
    for row in range(64):
        p, q = (torch.softmax(logits[row].double() / temperature, dim=1) for logits in (target, draft))
        accepted = 0
        while accepted < 3 and coins[row, accepted] * q[accepted, drafted[row, accepted]] < p[accepted, drafted[row, accepted]]:
            accepted += 1
        rest = (p[accepted] - q[accepted]).clamp(min=0) if accepted < 3 else p[3]
        bonus = int((rest.cumsum(0) > coins[row, 3] * rest.sum()).long().argmax())
        assert (int(found.accepted[row]), int(found.bonus[row])) == (accepted, bonus)


@pytest.mark.parametrize("rule", list(Rule))
def test_what_is_expected_to_pass_has_the_mean_of_what_passes_and_less_variance(rule: Rule) -> None:
    """4,000 drafts of each of 16 pairs of distributions, under their coins: five standard errors. Certainties are kept: all pass, or none does."""
    generator = torch.Generator().manual_seed(6)
    draft, target = (torch.randn(16, rows, 9, generator=generator) for rows in (3, 4))
    target[0, :3] = -torch.inf
    target[0, :3, 0] = 0.0
    draft[0, :, 0] = -torch.inf
    target[1, :3] = draft[1]
    accepted, expected = torch.empty(4000, 16), torch.empty(4000, 16)
    for trial in range(4000):
        drafted = torch.stack([torch.multinomial(row.softmax(1), 1, generator=generator)[:, 0] for row in draft.unbind(1)], dim=1)
        coins = torch.rand(16, 4, generator=generator, dtype=torch.float64)
        verdict = verify_sampled(drafted, draft, target, 1.0, coins, rule)
        assert torch.equal(verify_sampled(drafted, draft, target, 1.0, 1 - coins, rule).expected, verdict.expected), (
            "it does not depend on the coins"
        )
        accepted[trial], expected[trial] = verdict.accepted, verdict.expected
    error = (accepted - expected).std(dim=0) / 4000**0.5
    assert ((accepted - expected).mean(dim=0).abs() <= 5 * error + 1e-6).all()
    assert (expected[:, 2:].var(dim=0) < accepted[:, 2:].var(dim=0) / 2).all()
    assert expected[:, 0].eq(0).all()
    assert expected[:, 1].sub(3).abs().max() < 1e-5


@pytest.mark.parametrize("rule", list(Rule))
def test_sampled_tokens_have_the_targets_distribution(rule: Rule) -> None:
    """One round of 20,000 requests: the first token, drafted or resampled, must be the target's."""
    generator = torch.Generator().manual_seed(4)
    requests, vocab, steps = 20_000, 12, 2
    draft, target = (torch.randn(1, rows, vocab, generator=generator).expand(requests, -1, -1) for rows in (steps, steps + 1))
    q = torch.softmax(draft[0] / 0.7, dim=1)
    drafted = torch.stack([torch.multinomial(row, requests, replacement=True, generator=generator) for row in q], dim=1)
    coins = torch.rand(requests, steps + 1, generator=generator, dtype=torch.float64)
    verdict = verify_sampled(drafted, draft, target, 0.7, coins, rule)
    assert 0.2 < float(verdict.accepted.float().mean()) < 1.8
    p = torch.softmax(target[0].double() / 0.7, dim=1)
    first = torch.where(verdict.accepted > 0, drafted[:, 0], verdict.bonus)
    assert stats.chisquare(first.bincount(minlength=vocab).numpy(), (p[0] * requests).numpy()).pvalue > 1e-3
    through = verdict.accepted > 0
    second = torch.where(verdict.accepted > 1, drafted[:, 1], verdict.bonus)[through]
    assert stats.chisquare(second.bincount(minlength=vocab).numpy(), (p[1] * int(through.sum())).numpy()).pvalue > 1e-3
    whole = verdict.bonus[verdict.accepted == steps]
    assert stats.chisquare(whole.bincount(minlength=vocab).numpy(), (p[2] * len(whole)).numpy()).pvalue > 1e-3


def test_a_drafter_that_lies_about_its_distribution_is_caught() -> None:
    """The check above has teeth: drafts from another distribution than the one stated are not repaired."""
    generator = torch.Generator().manual_seed(4)
    draft, target = (torch.randn(1, rows, 12, generator=generator).expand(20_000, -1, -1) for rows in (1, 2))
    drafted = torch.randint(12, (20_000, 1), generator=generator)
    coins = torch.rand(20_000, 2, generator=generator, dtype=torch.float64)
    verdict = verify_sampled(drafted, draft, target, 1.0, coins)
    first = torch.where(verdict.accepted > 0, drafted[:, 0], verdict.bonus)
    p = torch.softmax(target[0, 0].double(), dim=0)
    assert stats.chisquare(first.bincount(minlength=12).numpy(), (p * 20_000).numpy()).pvalue < 1e-6


def test_a_greedy_verdict_stops_at_the_first_difference() -> None:
    target = torch.full((3, 4, 5), 0.0)
    for row, wanted in enumerate(([1, 2, 3, 4], [1, 2, 3, 4], [0, 2, 3, 4])):
        target[row, torch.arange(4), torch.tensor(wanted)] = 1.0
    verdict = verify_greedy(torch.tensor([[1, 2, 3], [1, 0, 3], [1, 2, 3]]), target)
    assert verdict.accepted.tolist() == [3, 1, 0]
    assert verdict.bonus.tolist() == [4, 2, 0]
    assert verdict.expected.tolist() == [3, 1, 0]


def test_sampled_decoding_repeats_itself_by_seed_and_only_by_seed(willing: Pair) -> None:
    prompts = tokens(2, 6, 5)

    def decoded(seed: int) -> list[tuple[int, ...]]:
        decoder = Decoder(willing, walk(willing, 3, 2, True), 3, temperature=1.0, seed=seed)
        return [each.tokens for each in decoder.decode(prompts, 12)]

    assert decoded(1) == decoded(1)
    assert decoded(1) != decoded(2)


def test_more_steps_than_a_block_has_are_refused(willing: Pair) -> None:
    with pytest.raises(ValueError, match="pair small drafts 1 to 4 tokens at once; got steps 5"):
        Decoder(willing, walk(willing, 5, 1, False), 5)
