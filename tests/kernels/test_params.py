"""The ctypes mirror of `wts::Params`, field by field, as the compiler lays the struct out."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

import pytest

from kernels.build import BuildError
from kernels.params import Params

HoldInCpp = Callable[[str, Iterable[str]], None]
HEADER = '#include "common/params.cuh"'


def facts() -> list[str]:
    found = [f"sizeof(wts::Params) == {ctypes.sizeof(Params)}"]
    for name, *_ in Params._fields_:
        field = getattr(Params, name)
        found.append(f"OFFSET({name}, wts::Params) == {field.offset} && sizeof(wts::Params::{name}) == {field.size}")
    return found


def test_every_field_lies_where_cuda_reads_it(hold_in_cpp: HoldInCpp) -> None:
    hold_in_cpp(HEADER, facts())


def test_a_field_that_moved_is_seen(hold_in_cpp: HoldInCpp) -> None:
    offset = Params.vocab.offset
    moved = [fact.replace(f"(vocab, wts::Params) == {offset}", f"(vocab, wts::Params) == {offset + 4}") for fact in facts()]
    assert moved != facts()
    with pytest.raises(BuildError, match="static assertion failed"):
        hold_in_cpp(HEADER, moved)


def test_signed_numbers_stay_signed() -> None:
    params = Params(base_step_stride=-3, vocab=-1, steps=2**31 - 1)
    assert (params.base_step_stride, params.vocab, params.steps, params.round) == (-3, -1, 2**31 - 1, None)
