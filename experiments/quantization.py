"""What 8-bit formats lose of a head: errors of W1, W2 and the bias, the tokens that change, and how the weights lie among the levels (Figure 6).

Every error is a relative Frobenius norm, |quantized - exact| / |exact|, of one scale a row. Nothing is timed, and CPU and GPU agree up to the order
of fp64 sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import cast

import torch
from torch import Tensor

from experiments import head_file, recorded_rounds
from experiments.convert import ConfigError
from experiments.head_file import Checkpoint
from experiments.outcome import Outcome, Row
from experiments.plan import Plan
from experiments.quantized_bias import FORMATS, Latents, exact_bias, linear_biases, quantized_biases, two_plane_bias
from experiments.recorded_rounds import Rounds
from experiments.schema import TRAINED, Config, Quantization
from experiments.trained_inputs import files_of
from kernels.device import check_live
from kernels.float8 import E4M3, E5M2, quantize_float8
from kernels.heads.markov import MarkovHead
from kernels.quantize import quantize_rows
from kernels.reference import greedy
from kernels.rounding import corrected
from kernels.walk import NanRule, Rounding, Unsupported

GRID = 448  # magnitudes are recorded at multiples of 1/448: the steps of e4m3 and e5m2 widen at some of them
GAP_WIDTH, GAP_BINS = 0.125, 64  # top-1 minus top-2, in logits; a last bin has all beyond
SYNTHETIC_ROUNDS, SYNTHETIC_STEPS = 8, 7
_CHUNK_ROWS = 1024  # of W2: 32 MiB of fp64 bias for 4,096 tokens
_POSITIONS = 512  # rounds times steps at once: 150 MiB of bf16 base logits at V = 151,936
_EXACT = "bf16"
_MATRIX_FORMATS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "int8": lambda rows: quantize_rows(rows).dequantized(),
    "e4m3": lambda rows: quantize_float8(rows, E4M3).dequantized(),
    "e5m2": lambda rows: quantize_float8(rows, E5M2).dequantized(),
}
_PROTOCOL = {
    "error": "Frobenius norm of what a format changes over that of the bf16 weights, or of the fp64 bias of bf16 weights and latents",
    "formats": "int8, e4m3, e5m2: rows of W2 so, latents in bf16; int8_one_plane, int8_two_planes: int8 rows and such latents",
    "tokens": "random: drawn from all rows of W1 without replacement; used: likewise from the tokens that the training text has",
    "flips": "steps whose argmax differs from that of the bf16 head, both rounded twice; every step follows the recorded token",
    "gaps": "top-1 less top-2 of the bf16 head's logits, rounded twice; the last bin is open and ends at the largest fp32",
}


def run(plan: Plan) -> Outcome:
    """The tables `quantization`, `argmax_flips`, `top2_gaps` and `magnitudes`, of every checkpoint or of the synthetic head.

    Raises:
        convert.ConfigError: a file that cannot be read, or does not fit.
        Unsupported: the device of the config is not here, or a head whose errors would mean nothing.
    """
    config, ask = plan.config, cast(Quantization, plan.config.experiment)
    device = check_live(config.device)
    ask = _with_trained(config, ask)
    heads = list(_heads(config, ask))  # all files are read before the first is measured
    names = [found.name for found in heads]
    if len(set(names)) != len(names):
        raise ConfigError(f"experiment.checkpoints: heads are named by their pairs or files, which need different names; got {names}")
    tables: dict[str, list[Row]] = {"quantization": [], "argmax_flips": [], "top2_gaps": [], "magnitudes": []}
    for place, found in enumerate(heads):
        head, of = found.head.to(device), {"head": found.name, "weights": "checkpoint" if ask.checkpoints else "synthetic"}
        sized = {**of, "vocab": head.vocab, "rank": head.rank}
        tables["quantization"] += [{**sized, **row} for row in chain(_weight_errors(head), _latent_errors(head, _tokens(found, ask)))]
        tables["magnitudes"] += [{**of, "magnitude": at, "share": share} for at, share in _magnitudes(head.w2)]
        decided = _decisions(head, _rounds(config, ask, head, place))
        told = {"head": found.name, "inputs": "rounds" if ask.rounds else "synthetic"}
        tables["argmax_flips"] += [{**told, **row} for row in decided.flip_rows()]
        tables["top2_gaps"] += [{**told, **row} for row in decided.gap_rows()]
    return Outcome(tables, protocol=dict(_PROTOCOL))


@dataclass(frozen=True, eq=False)
class _Lead:
    """The best logits of some positions so far: token [p] int64, first and second [p] fp32."""

    token: Tensor
    first: Tensor
    second: Tensor

    @classmethod
    def none(cls, positions: int, device: torch.device) -> _Lead:
        lowest = torch.full((positions,), -torch.inf, device=device)
        return cls(torch.zeros(positions, dtype=torch.int64, device=device), lowest, lowest)

    def after(self, logits: Tensor, start: int) -> _Lead:
        """With the logits [p, v] of the tokens from `start` on. Ties go to the lowest token, NaN loses."""
        logits = logits.masked_fill(logits.isnan(), -torch.inf)
        here = greedy(logits, NanRule.LOSES)
        leads = logits.gather(1, here[:, None])[:, 0] > self.first
        best = torch.cat([self.first[:, None], self.second[:, None], logits.topk(min(2, logits.shape[1])).values], dim=1).topk(2).values
        return _Lead(torch.where(leads, here + start, self.token), best[:, 0], best[:, 1])

    @property
    def gap(self) -> Tensor:
        """[p] first less second; 0 where both are infinite."""
        return (self.first - self.second).nan_to_num(nan=0.0, posinf=torch.inf)


@dataclass(frozen=True, eq=False)
class _Decisions:
    """Counts over rounds. flips: by format, [steps]. gaps: [steps, GAP_BINS + 1]."""

    walks: int
    flips: Mapping[str, Tensor]
    gaps: Tensor

    def flip_rows(self) -> Iterator[Row]:
        for name, counts in self.flips.items():
            for step, flips in enumerate(counts.tolist()):
                yield {"format": name, "step": step, "walks": self.walks, "flips": flips}

    def gap_rows(self) -> Iterator[Row]:
        for step, counts in enumerate(self.gaps.tolist()):
            for place, count in enumerate(counts):
                high = (place + 1) * GAP_WIDTH if place < GAP_BINS else torch.finfo(torch.float32).max
                yield {"step": step, "low": place * GAP_WIDTH, "high": high, "count": count}


def _with_trained(config: Config, ask: Quantization) -> Quantization:
    """With inputs=trained the checkpoint and the rounds are the pair's, which `experiments.trained_inputs` has made."""
    if config.inputs.family != TRAINED:
        return ask
    files = files_of(config)
    return replace(ask, checkpoints=(str(files.checkpoint),), rounds=(str(files.rounds),))


def _heads(config: Config, ask: Quantization) -> Iterator[Checkpoint]:
    size = config.head
    if not ask.checkpoints:
        head = MarkovHead.synthetic(size.vocab, size.rank, size.seed, "cpu", size.w1_std, size.w2_std)
        yield _measurable(Checkpoint(size.name, head))
    for place, path in enumerate(ask.checkpoints):
        yield _measurable(head_file.read(path, f"experiment.checkpoints[{place}]"))


def _measurable(found: Checkpoint) -> Checkpoint:
    for name, weights in (("W1", found.head.w1), ("W2", found.head.w2)):
        broken = int((~weights.isfinite()).sum())
        if broken or not bool(weights.any()):
            what = f"{broken} values that are not finite" if broken else "only zeros"
            raise Unsupported(f"{name} of {found.name} has {what}, so its relative errors mean nothing; give another head.")
    return found


def _tokens(found: Checkpoint, ask: Quantization) -> dict[str, Tensor]:
    """Up to `ask.tokens` different tokens of each kind; `used` only where the checkpoint knows them."""
    generator = torch.Generator().manual_seed(ask.seed)
    kinds = {"random": torch.arange(found.head.w1.shape[0])} | ({} if found.used is None else {"used": found.used})
    return {kind: ids[torch.randperm(len(ids), generator=generator)[: ask.tokens]] for kind, ids in kinds.items()}


def _rounds(config: Config, ask: Quantization, head: MarkovHead, place: int) -> Iterable[Rounds]:
    if ask.rounds:
        return recorded_rounds.read(ask.rounds[place], head.vocab, head.w1.shape[0], _POSITIONS)
    inputs = config.inputs
    return [recorded_rounds.synthetic(head.vocab, SYNTHETIC_STEPS, SYNTHETIC_ROUNDS, inputs.seed, inputs.base_std)]


def _weight_errors(head: MarkovHead) -> Iterator[Row]:
    for matrix, weights in (("w2", head.w2), ("w1", head.w1)):
        chunks, size = weights.split(_CHUNK_ROWS), sum(_squares(rows.double()) for rows in weights.split(_CHUNK_ROWS))
        for name, dequantized in _MATRIX_FORMATS.items():
            error = sum(_squares(dequantized(rows) - rows.double()) for rows in chunks)
            yield _error_row(matrix, name, "", len(weights), error, size)


def _latent_errors(head: MarkovHead, drawn: Mapping[str, Tensor]) -> Iterator[Row]:
    """Of the latents themselves, and of the bias that they give."""
    for kind, ids in drawn.items():
        latents = Latents.of(head.w1[ids.to(head.device)])
        for name, u in (("int8_one_plane", latents.one_plane), ("int8_two_planes", latents.two_planes.dequantized())):
            yield _error_row("latent", name, kind, len(ids), _squares(u - latents.exact), _squares(latents.exact))
        (exact, one_plane), errors, size = latents.folded(), dict.fromkeys(FORMATS, 0.0), 0.0
        for rows in head.w2.split(_CHUNK_ROWS):
            truth = exact_bias(rows, exact)
            size += _squares(truth)
            for name, bias in linear_biases(rows, exact, one_plane):
                errors[name] += _squares(bias - truth)
            errors["int8_two_planes"] += _squares(two_plane_bias(rows, latents) - exact_bias(rows, latents.exact))
        for name, error in errors.items():
            yield _error_row("bias", name, kind, len(ids), error, size)


def _error_row(matrix: str, name: str, tokens: str, count: int, error: float, size: float) -> Row:
    if not size > 0:
        raise Unsupported(
            f"the {count} {tokens} tokens drawn have a {matrix} of norm {size:g}, so its relative error means nothing; draw others."
        )
    return {"matrix": matrix, "format": name, "tokens": tokens, "count": count, "relative_error": (error / size) ** 0.5}


def _squares(values: Tensor) -> float:
    return values.square().sum().item()


def _magnitudes(weights: Tensor) -> Iterator[tuple[float, float]]:
    """k / GRID and the share of elements with |w| at most that part of their row's largest, for every k. A zero row has magnitude 0."""
    counts = torch.zeros(GRID + 1, dtype=torch.int64)
    for rows in weights.split(_CHUNK_ROWS):
        size = rows.double().abs()
        largest = size.amax(dim=1, keepdim=True)
        # GRID |w| is exact, so the quotient is a whole number exactly where the magnitude is a point of the grid
        place = (GRID * size / torch.where(largest > 0, largest, 1.0)).ceil().long()
        counts += place.flatten().bincount(minlength=GRID + 1).cpu()
    shares = counts.cumsum(0).double() / weights.numel()
    return zip((k / GRID for k in range(GRID + 1)), shares.tolist(), strict=True)


def _decisions(head: MarkovHead, rounds: Iterable[Rounds]) -> _Decisions:
    walks, flips, gaps = 0, dict.fromkeys(FORMATS, torch.zeros(1, dtype=torch.int64)), torch.zeros(1, GAP_BINS + 1, dtype=torch.int64)
    for some in rounds:
        previous = some.previous.to(head.device)
        leads = _leads(head, some.base_logits.flatten(0, 1).to(head.device), head.w1[previous.flatten()])
        exact = leads.pop(_EXACT)
        walks += len(previous)
        flips = {name: flips[name] + (lead.token != exact.token).view(previous.shape).sum(dim=0).cpu() for name, lead in leads.items()}
        bins = (exact.gap / GAP_WIDTH).clamp(max=GAP_BINS).long().view(previous.shape)
        gaps = gaps + torch.stack([column.bincount(minlength=GAP_BINS + 1) for column in bins.T]).cpu()
    return _Decisions(walks, flips, gaps)


def _leads(head: MarkovHead, base: Tensor, u: Tensor) -> dict[str, _Lead]:
    """By format, `_EXACT` among them: who leads base [p, vocab] plus the bias of u [p, rank]."""
    latents, leads = Latents.of(u), dict.fromkeys((_EXACT, *FORMATS), _Lead.none(len(u), u.device))
    for start in range(0, head.vocab, _CHUNK_ROWS):
        rows, part = head.w2[start : start + _CHUNK_ROWS], base[:, start : start + _CHUNK_ROWS]
        for name, bias in chain([(_EXACT, exact_bias(rows, latents.exact))], quantized_biases(rows, latents)):
            leads[name] = leads[name].after(corrected(part, bias.float(), Rounding.TWICE), start)
    return leads
