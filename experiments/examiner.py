"""Is what a replay wrote right? An examiner knows the inputs and the oracle, and remembers what it was told before.

Every replay that is read back is looked at: `examine` is thorough and comes before and after timing, `glance` is quick and comes after
every round. A greedy walk must repeat itself. A walk that samples must not:

- where the host can repeat its draws, its tokens must be the ones of its round, and no round may come twice;
- where it cannot (`NoiseRule.LIBRARY`), its tokens must at least differ from all that it drew before.

The corrected logits that a sampling walk writes must be the oracle's, given its own tokens.

An approximate walk is held to what it promises in the same ways, and what the exact walk would have chosen is counted beside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from experiments.outcome import Incorrect
from kernels.agreement import Agreement, check, stray_logits
from kernels.reference import ReferenceHead
from kernels.walk import Draft, NanRule, NoiseRule, Rounding, SampledWalk, WalkInputs

_ROUNDS = 2**32  # a round is a uint32


class Examiner(Protocol):
    """Asked after a replay on input set `which` is done and before the next one is enqueued. `draft` is what that replay wrote, or a copy."""

    def examine(self, which: int, draft: Draft) -> Agreement:
        """All that can be told of the draft.

        Raises:
            Incorrect: it is wrong; the message says where.
        """
        ...

    def glance(self, which: int, draft: Draft) -> None:
        """What can be told of the draft in a moment; raises as `examine`."""
        ...


@dataclass
class Repeating:
    """Of a greedy walk: `verify` asks the oracle, and once an answer was right, the same must come every time."""

    verify: Callable[[int, Tensor], Agreement]
    _answers: dict[int, Tensor] = field(default_factory=dict)

    def examine(self, which: int, draft: Draft) -> Agreement:
        agreement = _right(self.verify(which, draft.tokens), which)
        if which in self._answers:
            self.glance(which, draft)
        tokens = self._answers.setdefault(which, draft.tokens.cpu().clone())
        if any(torch.equal(tokens, answer) for other, answer in self._answers.items() if abs(other - which) == 1):
            raise RuntimeError("both input sets have the same answer, so a stale one would pass; choose another inputs.seed")
        return agreement

    def glance(self, which: int, draft: Draft) -> None:
        answer, tokens = self._answers[which], draft.tokens.cpu()
        if torch.equal(tokens, answer):
            return
        request, step = (int(place) for place in (tokens != answer).nonzero()[0])
        raise Incorrect(
            f"under timing, input set {which}, request {request} step {step}: token {int(tokens[request, step])}; "
            f"the checked answer is {int(answer[request, step])}"
        )


@dataclass(frozen=True)
class Oracle:
    """What the sampling walk's draft is held against: the head, the rules of its backend, and the inputs of a set."""

    head: ReferenceHead
    rounding: Rounding
    nan_rule: NanRule
    inputs: Callable[[int], WalkInputs]

    def agreement(self, which: int, draft: Draft, noise: NoiseRule, round: int = 0) -> Agreement:
        """Raises:
        Incorrect: a token is not what this noise draws.
        """
        tokens = draft.tokens.to(self.head.device)
        return _right(check(tokens, self.head, self.inputs(which), self.rounding, self.nan_rule, noise=noise, round=round), which)

    def assert_logits(self, which: int, draft: Draft) -> None:
        """Raises:
        Incorrect: a corrected logit is not the one of the draft's own tokens.
        """
        logits = _finite(draft)
        stray = stray_logits(logits, draft.tokens.to(self.head.device), self.head, self.inputs(which), self.rounding)
        if stray:
            raise Incorrect(
                f"input set {which}: {stray} of {logits.numel()} corrected logits are not those of its own tokens ({self.rounding} rule)"
            )


@dataclass
class Repeatable:
    """Of a walk whose draws the host can repeat: it must draw what its round says, and each round once.

    logits: whether its drafts have corrected logits; an approximate walk keeps scores of its own instead
    """

    oracle: Oracle
    walk: SampledWalk
    logits: bool = True
    _rounds: set[int] = field(default_factory=set)

    def examine(self, which: int, draft: Draft) -> Agreement:
        agreement = self._agreement(which, draft)
        if self.logits:
            self.oracle.assert_logits(which, draft)
        return agreement

    def glance(self, which: int, draft: Draft) -> None:
        self._agreement(which, draft)
        if self.logits:
            _finite(draft)

    def _agreement(self, which: int, draft: Draft) -> Agreement:
        last = (self.walk.round() - 1) % _ROUNDS
        if last in self._rounds:
            raise Incorrect(f"input set {which}: round {last} came twice, so its noise repeats")
        self._rounds.add(last)
        return self.oracle.agreement(which, draft, self.walk.noise, last)


@dataclass
class Unrepeatable:
    """Of a walk whose noise nobody else can draw: tokens of the vocabulary, never the same twice.

    chance: a draw that is likelier than this may come again, as one of a drafter that is sure of its tokens will among many input sets
    """

    oracle: Oracle
    chance: float = 1.0
    _drawn: list[Tensor] = field(default_factory=list)

    def examine(self, which: int, draft: Draft) -> Agreement:
        self.glance(which, draft)
        agreement = self.oracle.agreement(which, draft, NoiseRule.LIBRARY)
        self.oracle.assert_logits(which, draft)
        return agreement

    def glance(self, which: int, draft: Draft) -> None:
        tokens, vocab = draft.tokens.cpu().clone(), self.oracle.head.vocab
        outside = tokens[(tokens < 0) | (tokens >= vocab)]
        if outside.numel():
            raise Incorrect(f"input set {which}: token {int(outside[0])} is outside [0, {vocab})")
        if any(torch.equal(tokens, earlier) for earlier in self._drawn) and not self._likely(which, draft):
            raise Incorrect(f"input set {which}: all tokens are those of an earlier replay, so its noise repeats")
        self._drawn.append(tokens)
        _finite(draft)

    def _likely(self, which: int, draft: Draft) -> bool:
        """By the corrected logits that it wrote, which `examine` holds against the oracle."""
        if self.chance >= 1:
            return False
        logs = (_finite(draft).double() / self.oracle.inputs(which).temperature[:, None, None]).log_softmax(dim=2)
        return float(logs.gather(2, draft.tokens[..., None]).sum().exp()) > self.chance


@dataclass(frozen=True)
class Approximate:
    """Of a walk that promises less than the exact one: `judge` holds it to its promise. `exact` gives the tokens [batch, steps] that the exact
    walk chooses after those of a draft, with the same noise."""

    judge: Examiner
    exact: Callable[[int, Tensor], Tensor]

    def examine(self, which: int, draft: Draft) -> Agreement:
        agreement, tokens = self.judge.examine(which, draft), draft.tokens.cpu()
        return replace(agreement, astray=int((tokens != self.exact(which, tokens).cpu()).sum()))

    def glance(self, which: int, draft: Draft) -> None:
        self.judge.glance(which, draft)


def _right(agreement: Agreement, which: int) -> Agreement:
    if not agreement.ok:
        raise Incorrect(f"input set {which}: {agreement.reason}")
    return agreement


def _finite(draft: Draft) -> Tensor:
    """The corrected logits, all of them written."""
    if draft.logits is None:
        raise ValueError("a walk with temperature > 0 is examined with its corrected logits; pass Draft.like(inputs, logits=True)")
    missing = int((~draft.logits.isfinite()).sum())
    if missing:
        raise Incorrect(f"{missing} of {draft.logits.numel()} corrected logits are not finite, so they were not written, or wrongly")
    return draft.logits
