"""A real speculative decoder: prefill, draft, walk by any backend, verify, roll back. Requests of a batch go at their own pace.

What the target has read of a request lies in its cache; one token, the anchor, is known beyond that. A round drafts the tokens after the anchor, lets
the target read the anchor and the draft in one pass, and keeps what it accepts and one token of its own: the next anchor. All shapes of a round
are fixed, so that on a GPU it is one CUDA graph, and a target's logits depend on what is read, not on how it came to be drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from experiments.drafter.decodable import DecodablePair
from experiments.drafter.requests import Requests
from experiments.drafter.target import Cache
from experiments.drafter.verify import Rule, Verdict, draw, expected_to_pass, verify_greedy, verify_sampled
from kernels.heads.markov import MarkovHead
from kernels.walk import Draft, PreparedWalk, Unsupported, WalkInputs


@dataclass(frozen=True)
class Decoded:
    """What became of one prompt. accepted: drafted tokens that passed, of every round; a round adds one token of the target's own. expected: how many
    were expected to pass in all, see `verify.Verdict`; beside: likewise of the drafts of `Decoder.beside`."""

    tokens: tuple[int, ...]
    accepted: tuple[int, ...]
    expected: float
    beside: tuple[float, ...] = ()


@dataclass(frozen=True)
class Round:
    """What one round worked on, for those who record it: the walk's inputs, its draft, the verdict, and which requests were still at work [batch].

    On a GPU the next round writes into the same tensors.
    """

    inputs: WalkInputs
    draft: Draft
    verdict: Verdict
    live: Tensor


@dataclass
class Decoder:
    """One arm: a pair whose serial head is walked by `walk`, prepared for the batch and for `steps` tokens.

    steps: drafted at once, up to the pair's block; temperature: of every request, 0 for greedy; seed: of the target's own draws and of the
    requests' noise; watch: called after every round; beside: other walks, which draft every sampled round too. What the target would have said of it
    counts, and nothing is kept: arms that are compared so have the same text, and texts differ more than arms
    """

    pair: DecodablePair
    walk: PreparedWalk
    steps: int
    temperature: float = 0.0
    seed: int = 0
    rule: Rule = Rule.SGLANG
    watch: Callable[[Round], None] = lambda _: None
    beside: tuple[PreparedWalk, ...] = ()
    _coins: torch.Generator = field(init=False)
    _advance: _Advance | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= self.pair.config.block:
            raise ValueError(f"pair {self.pair.config.name} drafts 1 to {self.pair.config.block} tokens at once; got steps {self.steps}.")
        if self.beside and self.temperature <= 0:
            raise ValueError(f"walks are compared on the same rounds where these are sampled; got temperature {self.temperature:g}.")
        self._coins = torch.Generator().manual_seed(self.seed)

    @torch.no_grad()
    def decode(self, prompts: Tensor, count: int, batch: int | None = None) -> list[Decoded]:
        """`count` tokens after each prompt.

        prompts: [n, tokens] int64, of one length; batch: requests that are decoded together, n if not given. With fewer prompts slots stay idle.
        """
        advance = self._advancing(batch or len(prompts), prompts.shape[1], count)
        requests = advance.requests
        logits = requests.admit(self.pair, prompts, self._toss(count, requests.batch, self.steps + 1))
        requests.settle(self._first(logits))
        while bool(requests.live.any()):
            self.watch(advance())
        return [Decoded(*each) for each in requests.decoded(len(prompts))]

    def _advancing(self, batch: int, length: int, count: int) -> _Advance:
        """Decoding again in the same shape takes the same tensors and the same graph."""
        last = self._advance
        if last is None or (last.requests.batch, last.requests.length, last.requests.count) != (batch, length, count):
            requests = Requests(self.pair, batch, length, count, self.steps, len(self.beside))
            last = self._advance = _Advance(requests, lambda: self._round(requests))
        return last

    def _round(self, requests: Requests) -> Round:
        live = requests.live
        inputs = self._inputs(requests)
        for place, walk in enumerate(self.beside):
            requests.beside[place] += torch.where(live, self._expected(walk, inputs, requests), 0.0)
        draft = Draft.like(inputs, logits=self.temperature > 0)
        self.walk.launch(inputs, draft)
        read = self.pair.target.extend(torch.cat([requests.anchor[:, None], draft.tokens], dim=1), requests.cache)
        verdict = self._verify(draft, self.pair.target.logits(read.hidden), requests)
        requests.keep(read.taps, draft.tokens, verdict, live)
        return Round(inputs, draft, verdict, live)

    def _expected(self, walk: PreparedWalk, inputs: WalkInputs, requests: Requests) -> Tensor:
        """[batch] how many of this walk's draft the target would be expected to let through. It is read and forgotten."""
        draft = Draft.like(inputs, logits=True)
        walk.launch(inputs, draft)
        assert draft.logits is not None
        start = requests.cache.length.clone()
        read = self.pair.target.extend(torch.cat([requests.anchor[:, None], draft.tokens], dim=1), requests.cache)
        requests.cache.length.copy_(start)
        return expected_to_pass(draft.tokens, draft.logits, self.pair.target.logits(read.hidden), self.temperature)

    def _inputs(self, requests: Requests) -> WalkInputs:
        base = self.pair.drafter.base_logits(self.pair.target, requests.taps, requests.anchor[:, None], requests.cache.length[:, None])
        return WalkInputs(
            base_logits=base[:, 0, : self.steps].bfloat16(),
            anchor=requests.anchor.clone(),  # of this round: `keep` writes the next one's
            temperature=torch.full((requests.batch,), self.temperature, dtype=torch.float32, device=base.device),
            seed=self.seed + torch.arange(requests.batch, device=base.device),
        )

    def _verify(self, draft: Draft, target: Tensor, requests: Requests) -> Verdict:
        if self.temperature <= 0:
            return verify_greedy(draft.tokens, target)
        assert draft.logits is not None, "a walk that samples writes the logits it sampled from"
        coins = requests.coins.index_select(0, requests.rounds)[0]
        return verify_sampled(draft.tokens, draft.logits, target, self.temperature, coins, self.rule)

    def _first(self, logits: Tensor) -> Tensor:
        """[batch, vocab] -> [batch] the target's own token after a prompt."""
        if self.temperature <= 0:
            return logits.argmax(dim=1)
        return draw(torch.softmax(logits.double() / self.temperature, dim=1), self._toss(len(logits)).to(logits.device))

    def _toss(self, *shape: int) -> Tensor:
        """Coins, drawn on the host, so that every device has the same."""
        return torch.rand(shape, generator=self._coins, dtype=torch.float64)


class _Advance:
    """One round of `requests`, again and again. On a GPU the first is run as it is, which sets up libraries, and then captured for all others."""

    def __init__(self, requests: Requests, round: Callable[[], Round]) -> None:
        self.requests, self._round = requests, round
        self._warm, self._captured = False, None

    def __call__(self) -> Round:
        if not self._warm or not self.requests.taps.is_cuda:
            self._warm = True
            return self._round()
        if self._captured is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = self._round()
            self._captured = graph, found
        graph, found = self._captured
        graph.replay()
        return found


@torch.no_grad()
def decode_plainly(pair: DecodablePair, prompts: Tensor, count: int) -> list[tuple[int, ...]]:
    """The target alone, greedy, one token after the other: what speculative greedy decoding must repeat."""
    cache = Cache(pair.target, len(prompts), prompts.shape[1] + count)
    found, fresh = [], prompts
    for _ in range(count):
        fresh = pair.target.logits(pair.target.extend(fresh, cache).hidden[:, -1:]).argmax(dim=2)
        found.append(fresh)
    return [tuple(row) for row in torch.cat(found, dim=1).tolist()]


def markov_head(pair: DecodablePair) -> MarkovHead:
    """The serial head of the pair, on its device.

    Raises:
        Unsupported: it is not a vanilla Markov head, which alone the backends walk.
    """
    try:
        weights = pair.drafter.markov_head.state_dict()
        return MarkovHead.from_tensors({f"markov_head.{name}": weight.bfloat16() for name, weight in weights.items()})
    except ValueError as error:
        raise Unsupported(f"pair {pair.config.name}: {error}") from error
