"""The pruned walk of SGLang and vLLM (`markov_topk`): a block of every request in one kernel, over some tens of tokens a step. Approximate.

Stands for: SGLang's `speculative/dspark_components/dspark/dspark_markov_topk.py` and vLLM's `dspark/topk_markov.py` as their descriptions
have them. A step sees the K largest base logits and the M tokens whose bias after the previous token is largest; no other token can be
drafted. Once a model load: the table of M int32 tokens and fp32 biases for each previous token (8 V M bytes). A call: one top-k over all
base logits of the block (part of what is timed), then one launch, a program a request. Scores are fp32 base + bias, never rounded.

**Its tokens are not the exact walk's.** What it is held to is the same walk over the same candidates (`kernels.candidates`); how often the
whole vocabulary would have given another token is counted beside its time.

What differs from the originals, and by how much:
- K and M: the originals take them from the checkpoint (without it K is 0, which means no pruning, and M is 16). Here K is their limit, 64.
- Ties go to the lowest token, as in SGLang; vLLM takes the first candidate. A token in both halves counts once, with the table's bias.
- NaN counts as -inf, which the originals' descriptions leave open. torch.topk takes NaN for the largest, so it uses up candidates.
- T > 0: Gumbel noise by vLLM's newer hash of (seed, position, token); a device counter of rounds stands for the position, read by the
  kernel and raised by one tiny kernel a call. The scores that were drawn from stay in an fp32 buffer [max_batch, max_steps, vocab] of the
  prepared walk, -inf but for candidates, of which a call resets only what the last one touched. A draft with bf16 `logits` is refused.
- Anchors are clamped inside the kernel. Left out: inert rows, the scale of the bias, tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kernels.admission import admit_head, admit_limits, admit_walk
from kernels.candidates import CandidateHead
from kernels.device import DeviceSpec
from kernels.heads.markov import MarkovHead
from kernels.philox import MASK
from kernels.reference import ReferenceHead
from kernels.registry import register
from kernels.triton.admission import admit_triton
from kernels.walk import Draft, Head, Limits, NanRule, NoiseRule, Resources, Rounding, Unsupported, WalkInputs

if TYPE_CHECKING:
    from kernels.triton.candidate_walk import Kept

MAX_RANK, MAX_STEPS = 1024, 32
_CHUNK_ELEMENTS = 1 << 27  # of fp32 biases at once while the table is made: 512 MiB


@dataclass(frozen=True)
class CandidateOptions:
    """How many candidates a step has.

    base_candidates: K, by base logit, 1 to 64
    bias_candidates: M, by bias, 1 to 128
    """

    base_candidates: int = 64
    bias_candidates: int = 16

    def __post_init__(self) -> None:
        if not (1 <= self.base_candidates <= 64 and 1 <= self.bias_candidates <= 128):
            raise ValueError(
                f"candidate_walk has base_candidates from 1 to 64 and bias_candidates from 1 to 128; got {self.base_candidates} and "
                f"{self.bias_candidates}."
            )


@register
class CandidateWalk:
    """See the module's text. Greedy and sampled, any batch."""

    name: ClassVar[str] = "candidate_walk"
    archs: ClassVar[tuple[str, ...]] = ("cuda",)
    nan_rule: ClassVar[NanRule] = NanRule.LOSES
    rounding: ClassVar[Rounding] = Rounding.APPROXIMATE
    within: ClassVar[Rounding] = Rounding.NEVER
    Options: ClassVar[type[CandidateOptions]] = CandidateOptions

    def __init__(self, options: CandidateOptions) -> None:
        self.options = options

    def restricted(self, head: ReferenceHead) -> CandidateHead:
        """The head that the walk is exact for, see `kernels.reference.Approximation`."""
        return CandidateHead(head, self.options.base_candidates, self.options.bias_candidates)

    def prepare(self, head: Head, limits: Limits, device: DeviceSpec) -> CandidatePrepared:
        markov = admit_head(self.name, head, MarkovHead)
        admit_limits(self.name, limits, sampling=True)
        if markov.rank > MAX_RANK or limits.max_steps > MAX_STEPS:
            raise Unsupported(
                f"candidate_walk serves ranks up to {MAX_RANK} and up to {MAX_STEPS} steps; got rank {markov.rank} and max_steps "
                f"{limits.max_steps}; backend=sglang_folded serves any."
            )
        admit_triton(self.name, markov.device)
        return CandidatePrepared(markov, limits, self.options)


class CandidatePrepared:
    """The walk with its table and, if it samples, the scores it keeps."""

    noise: ClassVar[NoiseRule] = NoiseRule.HASH

    def __init__(self, head: MarkovHead, limits: Limits, options: CandidateOptions) -> None:
        self._head, self._limits = head, limits
        self._tops = min(options.base_candidates, head.vocab)
        self._w1, self._w2 = head.w1.contiguous(), head.w2.contiguous()
        self._table = bias_table(self._w1[: head.vocab], self._w2, min(options.bias_candidates, head.vocab))
        self._kept = self._empty() if limits.sampling else None

    @property
    def resources(self) -> Resources:
        """Nothing that a floor could count on: which rows are read follows from the tokens. The table is 8 V M bytes of HBM."""
        return Resources()

    @property
    def scores(self) -> Tensor:
        """[max_batch, max_steps, vocab] fp32 of the last launch: what its tokens were drawn from."""
        return self._drawing().scores

    def round(self) -> int:
        """The round of the next launch, see `kernels.walk.SampledWalk`."""
        return int(self._drawing().rounds.item()) & MASK

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        """One walk. Without `Limits.sampling` every row is greedy, whatever its temperature says.

        Raises:
            ValueError: the walk exceeds what was prepared, or `out` wants bf16 logits.
        """
        admit_walk(CandidateWalk.name, inputs, out, self._limits, self._head)
        if out.logits is not None:
            raise ValueError("candidate_walk keeps fp32 scores of its own and writes no bf16 logits; pass a draft without logits.")
        from kernels.triton.candidate_walk import walk

        drawn = None if self._kept is None else (inputs.temperature, inputs.seed, self._kept)
        walk(self._w1, self._w2, self._table, self._tops, inputs.base_logits, inputs.anchor, out.tokens, drawn)
        if self._kept is not None:
            self._kept.rounds.add_(1)

    def _empty(self) -> Kept:
        from kernels.triton.candidate_walk import Kept

        candidates = self._tops + self._table[0].shape[1]
        return Kept.empty(self._limits.max_batch, self._limits.max_steps, self._head.vocab, candidates, self._head.device)

    def _drawing(self) -> Kept:
        if self._kept is None:
            raise ValueError("this candidate_walk was prepared greedy, so it keeps no scores and has no rounds; prepare it with sampling.")
        return self._kept


def bias_table(w1: Tensor, w2: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[vocab, count] int32 tokens and fp32 biases: those whose bias is largest after each previous token.

    w1, w2: [vocab, rank] bf16. Products of bf16 are exact in fp32 (and their factors in TF32); only the sums round.
    """
    columns = w2.float().T
    tokens, biases = [], []
    for rows in w1.split(max(1, _CHUNK_ELEMENTS // len(w2))):
        found = (rows.float() @ columns).topk(count, dim=1)
        tokens.append(found.indices.to(torch.int32))
        biases.append(found.values)
    return torch.cat(tokens), torch.cat(biases)
