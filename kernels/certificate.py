"""Steps of a walk that a few rows of W2 prove: the certificate, and a walk that is exact because it falls back where there is none.

Theorem. Let a step have base logits b_i and biases v_i (W2 u, in any order of fp32 sums), and corrected logits s_i = f(b_i, v_i), where f is one of
the roundings of `kernels.rounding`. Let C be some rows, with t >= b_i and v >= v_i for every row i outside C. If the largest s_i of C is above
f(t, v), then the lowest row of C that has it is the token of the whole vocabulary.

Proof. Rounding to bf16 or fp32 and adding are monotone, and so is f in both arguments: s_i = f(b_i, v_i) <= f(t, v) < max over C of s for every i
outside C. So no such row reaches the maximum, also not with a lower index. A maximum that equals f(t, v) proves nothing: the row outside that has
it may be the lower one. A row with a NaN among its base logits is not proved, since NaN is in no order, nor one whose best is not finite.

With noise (rule GUMBEL) the token is the row with the largest score s_i / T + g_i. Let n_i = b_i / T + g_i, t >= n_i outside C, and let no base logit be
larger than B in size. Then s_i <= b_i + v + e with e what rounding b_i + v_i may add, so the score of a row outside is at most t + (v + e) / T; the slack of
the fp32 operations on top. The noise stays apart from the bias because it belongs to the row, not to the previous token. Rounding to bf16 comes before
the noise, hence e = 2^-8 (B + |v|), and 2^-8 |v| more where the bias is rounded too: at T = 1 with logits up to 10 and biases up to 5 that is 0.08.

C is here the rows with the largest base logits of the step, t the next one's; and the rows with the largest biases after the previous token, v the
next one's. Those are known before any walk: `bias_lists` makes them once for a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kernels.reference import ReferenceHead, check_inputs, chosen, greedy, previous_tokens
from kernels.rounding import corrected
from kernels.sampling import Draws, gumbel_noise, gumbel_scores, is_sampled
from kernels.walk import NanRule, NoiseRule, Rounding, WalkInputs

_CHUNK_TOKENS = 64  # previous tokens at once: 78 MB of fp64 biases at V = 151,936


@dataclass(frozen=True)
class BiasLists:
    """What a previous token's bias can lift.

    ids:   [vocab, width] int64, its rows with the largest biases; of a token that was not asked for no row, which is `vocab`
    bound: [vocab] fp32, which no other row's bias exceeds, in any order of fp32 sums; -inf where there is no other row, +inf for a token that
           was not asked for, so that nothing is proved after it
    """

    ids: Tensor
    bound: Tensor


@dataclass(frozen=True)
class Candidates:
    """Rows of a step with the largest base logits, or with noise the largest base / T + noise: ids [batch, count] int64, and `bound` [batch] fp32, the
    largest of the others; -inf without any."""

    ids: Tensor
    bound: Tensor


@dataclass(frozen=True)
class CertifiedWalk:
    """tokens: [batch, steps] int64, those of the walk; proved: [batch, steps] bool, by the rows named; listed: [batch, steps] bool, proved tokens that
    are not among the candidates."""

    tokens: Tensor
    proved: Tensor
    listed: Tensor


@dataclass(frozen=True)
class Proof:
    """token: [batch] int64, the best of the rows named, with the score `best` [batch] fp32; proved: [batch] bool, whether it is the step's token."""

    token: Tensor
    best: Tensor
    proved: Tensor


@dataclass(frozen=True, eq=False)
class Step:
    """One step of some walks: its biases and its noise, made once, to be proved by any rows.

    previous: [batch] int64; base: [batch, vocab]; scores: [batch, vocab] fp32, the corrected logits, or with noise logit / T + noise;
    noise: [batch, vocab] fp32, of the draws, if there are any
    """

    previous: Tensor
    base: Tensor
    scores: Tensor
    rounding: Rounding
    draws: Draws | None
    noise: Tensor | None

    @classmethod
    def of(cls, head: ReferenceHead, previous: Tensor, base: Tensor, rounding: Rounding, draws: Draws | None = None) -> Step:
        """rounding: TWICE, ONCE or NEVER; draws: the noise of the rows, which are then all sampled."""
        logits = head.step_logits(previous, base, rounding)
        if draws is None:
            return cls(previous, base, logits, rounding, None, None)
        noise = gumbel_noise(head.vocab, draws)
        return cls(previous, base, gumbel_scores(logits, draws, noise), rounding, draws, noise)

    @cached_property
    def reach(self) -> Tensor:
        """[batch, vocab] fp32, what candidates are chosen by: base logits, or with noise base / T + noise."""
        return _reach(self.base, self.draws, self.noise)

    @property
    def token(self) -> Tensor:
        """[batch] int64, of the whole vocabulary."""
        return greedy(self.scores, NanRule.LOSES)

    def proof(self, found: Candidates, lists: BiasLists) -> Proof:
        """By the candidates and the rows that the previous tokens list."""
        batch, vocab = self.base.shape
        rows = torch.cat([found.ids, lists.ids[self.previous]], dim=1)
        named = torch.zeros(batch, vocab + 1, dtype=torch.bool, device=self.base.device).scatter_(1, rows, True)[:, :vocab]
        scores = self.scores.masked_fill(~named, -torch.inf)
        token = greedy(scores, NanRule.LOSES)
        best = scores.gather(1, token[:, None])[:, 0]
        bound = self._bound(found.bound[:, None], lists)[:, 0]
        return Proof(token, best, (best > bound) & best.isfinite() & ~self.base.isnan().any(dim=1))

    def survivors(self, proofs: Sequence[Proof], lists: BiasLists) -> list[Tensor]:
        """Of each proof by these lists, [batch] int64: the rows that a search has to score, named ones among them, since their bounds reach the best of
        those named; 0 where that is proved."""
        bound = self._bound(self.reach, lists)
        return [(bound >= proof.best[:, None]).sum(dim=1).masked_fill(proof.proved, 0) for proof in proofs]

    def _bound(self, reach: Tensor, lists: BiasLists) -> Tensor:
        """[batch, n] no score of an unlisted row exceeds it whose `reach` [batch, n] is at most this."""
        bias = lists.bound[self.previous][:, None]
        if self.draws is None:
            return corrected(reach, bias, self.rounding)
        return _noisy_bound(reach, bias, self.base, self.rounding, self.draws)


def bias_lists(head: ReferenceHead, width: int, tokens: Tensor | None = None) -> BiasLists:
    """The `width` largest biases after every token, or after some `tokens` [n] int64 in [0, vocab).

    Raises:
        ValueError: no such width.
    """
    return nested_lists(head, [width], tokens)[0]


def nested_lists(head: ReferenceHead, widths: Sequence[int], tokens: Tensor | None = None) -> list[BiasLists]:
    """The same of several widths, from one top-k; raises as `bias_lists`."""
    for width in widths:
        if not 1 <= width <= head.vocab:
            raise ValueError(f"a list has 1 to {head.vocab} rows; got width {width}.")
    asked = torch.arange(head.vocab, device=head.device) if tokens is None else tokens.unique()
    parts = [_tops(_highest_biases(head, some), widths) for some in asked.split(_CHUNK_TOKENS)]
    return [_placed(head, asked, [part[place] for part in parts]) for place in range(len(widths))]


def candidates(base: Tensor, count: int, draws: Draws | None = None) -> Candidates:
    """base: [batch, vocab]; draws: the noise of the rows, which are all sampled. Which of equal logits are taken is the top-k's affair."""
    return nested_candidates(_reach(base, draws), [count])[0]


def nested_candidates(reach: Tensor, counts: Sequence[int]) -> list[Candidates]:
    """Several counts of candidates by `reach` (see `Step`), from one top-k, so that the fewer are among the more."""
    return [Candidates(*top) for top in _tops(reach, counts)]


def prove(
    head: ReferenceHead,
    previous: Tensor,
    base: Tensor,
    found: Candidates,
    lists: BiasLists,
    rounding: Rounding,
    draws: Draws | None = None,
) -> tuple[Tensor, Tensor]:
    """The best of the rows named, [batch] int64, and whether that is the step's token, [batch] bool.

    previous: [batch] int64; base: [batch, vocab]; rounding: TWICE, ONCE or NEVER; draws: as `candidates` had them
    """
    proof = Step.of(head, previous, base, rounding, draws).proof(found, lists)
    return proof.token, proof.proved


def _noisy_bound(noised: Tensor, bias: Tensor, base: Tensor, rounding: Rounding, draws: Draws) -> Tensor:
    """[batch, n] fp64: no score outside exceeds it. noised: [batch, n], the largest base / T + noise there; bias: [batch, 1], the largest bias."""
    t, v, inverse = noised.double(), bias.double(), draws.inverse.double()[:, None]
    largest = base.abs().nan_to_num(posinf=0.0).amax(dim=1, keepdim=True).double()
    of_base, of_bias = {Rounding.TWICE: (1, 2), Rounding.ONCE: (1, 1), Rounding.NEVER: (0, 0)}[
        rounding
    ]  # roundings to bf16 that each meets
    slack = 2.0**-8 * (1 + 2.0**-7) * (of_base * largest + of_bias * v.abs()) + 2.0**-23 * (largest + v.abs())
    bound = t + (v + slack) * inverse
    bound = bound + 2.0**-22 * (t.abs() + bound.abs())  # of the fused multiply-adds that made t and will make the score
    return torch.where(t.isneginf() | v.isneginf(), -torch.inf, bound)


def certified_walk(
    head: ReferenceHead, inputs: WalkInputs, count: int, lists: BiasLists, rounding: Rounding, round: int = 0
) -> CertifiedWalk:
    """A walk over `count` candidates a step and the lists, drawn by rule GUMBEL where a row has temperature > 0; a step that they do not prove is one over
    the whole vocabulary. round: the launch whose noise is meant.

    Raises:
        ValueError: another vocabulary than the head's.
    """
    check_inputs(head, inputs, NoiseRule.GUMBEL)
    tokens = torch.empty(inputs.batch, inputs.steps, dtype=torch.int64, device=head.device)
    proved, listed = (torch.zeros_like(tokens, dtype=torch.bool) for _ in range(2))
    for step in range(inputs.steps):
        previous, base = previous_tokens(inputs, tokens, step), inputs.base_logits[:, step]
        whole = chosen(head.step_logits(previous, base, rounding), inputs, step, NanRule.LOSES, NoiseRule.GUMBEL, round)
        draws, hot = Draws.of(inputs.temperature, inputs.seed, step, round), is_sampled(inputs.temperature)
        for rows, noise in ((~hot, None), (hot, draws)):
            at = rows.nonzero()[:, 0]
            own = noise.rows(at) if noise else None
            found = candidates(base[at], count, own)
            best, proved[at, step] = prove(head, previous[at], base[at], found, lists, rounding, own)
            listed[at, step] = proved[at, step] & ~(found.ids == best[:, None]).any(dim=1)
            tokens[at, step] = torch.where(proved[at, step], best, whole[at])
    return CertifiedWalk(tokens, proved, listed)


def _highest_biases(head: ReferenceHead, tokens: Tensor) -> Tensor:
    """[n, vocab] the highest bias that fp32 sums may give, which the exact one differs little from."""
    nothing = torch.zeros(len(tokens), head.vocab, device=head.device)
    return head.step_interval(tokens, nothing, Rounding.NEVER)[1]


def _placed(head: ReferenceHead, asked: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> BiasLists:
    """The lists of the tokens `asked` among those of all tokens."""
    rows, bounds = (torch.cat(column) for column in zip(*parts, strict=True))
    ids = torch.full((head.vocab, rows.shape[1]), head.vocab, device=head.device)
    bound = torch.full((head.vocab,), torch.inf, device=head.device)
    ids[asked], bound[asked] = rows, bounds
    return BiasLists(ids, bound)


def _reach(base: Tensor, draws: Draws | None, noise: Tensor | None = None) -> Tensor:
    return base.float() if draws is None else gumbel_scores(base.float(), draws, noise)


def _tops(values: Tensor, counts: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """For each count the places of as many of the largest of each row, and the largest of the others."""
    vocab = values.shape[1]
    most = values.topk(min(max(counts) + 1, vocab), dim=1)
    none = values.new_full(values.shape[:1], -torch.inf)
    return [(most.indices[:, :count], most.values[:, count] if count < vocab else none) for count in counts]
