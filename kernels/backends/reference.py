"""The oracle as a backend: what `backend=reference` runs on any machine. Slow and right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kernels.admission import admit_limits, admit_walk
from kernels.device import DeviceSpec
from kernels.reference import ReferenceHead, walk
from kernels.registry import register
from kernels.walk import Draft, Head, Limits, NanRule, NoiseRule, Resources, Rounding, Unsupported, WalkInputs


@register
class Reference:
    """The oracle under one rounding rule; rows with temperature > 0 are drawn by rule GUMBEL."""

    name: ClassVar[str] = "reference"
    archs: ClassVar[tuple[str, ...]] = ("cpu",)
    nan_rule: ClassVar[NanRule] = NanRule.LOSES

    @dataclass(frozen=True)
    class Options:
        """rounding: twice, once, never or int8."""

        rounding: str = "twice"

    def __init__(self, options: Options) -> None:
        exact = [rule.value for rule in Rounding if rule is not Rounding.APPROXIMATE]
        if options.rounding not in exact:
            raise ValueError(f"backend reference has no rounding {options.rounding!r}; it has: {', '.join(exact)}.")
        self._rounding = Rounding(options.rounding)

    @property
    def rounding(self) -> Rounding:
        return self._rounding

    def prepare(self, head: Head, limits: Limits, device: DeviceSpec) -> ReferencePrepared:
        admit_limits(self.name, limits, sampling=True)
        if not isinstance(head, ReferenceHead):
            raise Unsupported(f"the {head.kind!r} head has no exact step, so backend reference cannot run it; add step_logits to its file.")
        return ReferencePrepared(head, limits, self._rounding)


class ReferencePrepared:
    """The oracle bound to one head, and the count of its launches. Without `Limits.sampling` every row is greedy."""

    noise: ClassVar[NoiseRule] = NoiseRule.GUMBEL
    resources: ClassVar[Resources] = Resources()

    def __init__(self, head: ReferenceHead, limits: Limits, rounding: Rounding) -> None:
        self._head, self._limits, self._rounding = head, limits, rounding
        self._round = 0

    def round(self) -> int:
        """The round of the next launch, see `kernels.walk.SampledWalk`."""
        return self._round

    def launch(self, inputs: WalkInputs, out: Draft) -> None:
        admit_walk(Reference.name, inputs, out, self._limits, self._head, dtypes=(torch.bfloat16, torch.float16, torch.float32))
        if not self._limits.sampling:
            inputs = replace(inputs, temperature=torch.zeros_like(inputs.temperature))
        result = walk(self._head, inputs, self._rounding, keep_logits=out.logits is not None, noise=self.noise, round=self._round)
        self._round += 1
        out.tokens.copy_(result.tokens)
        if out.logits is not None and result.logits is not None:
            out.logits.copy_(result.logits)
