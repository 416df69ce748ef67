"""A head that has been through eight bits has lost what its format loses, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from experiments.quantized_bias import FORMATS, head_through
from kernels.heads.markov import MarkovHead

HEAD = MarkovHead.synthetic(512, 256)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize(
    ("form", "least", "most"),
    [
        ("int8", 0.0065, 0.0075),
        ("e4m3", 0.025, 0.027),
        ("e5m2", 0.050, 0.054),
        ("int8_one_plane", 0.0065, 0.0075),
        ("int8_two_planes", 0.0065, 0.0075),
    ],
)
def test_w2_loses_what_its_format_loses(form: str, least: float, most: float) -> None:
    assert form in FORMATS
    assert least < error(head_through(HEAD, form).w2, HEAD.w2) < most


def test_only_one_plane_loses_of_the_latents() -> None:
    for form in FORMATS:
        w1 = head_through(HEAD, form).w1
        assert 0.0065 < error(w1, HEAD.w1) < 0.0075 if form == "int8_one_plane" else torch.equal(w1, HEAD.w1)
