"""Backends by name: what every one declares, and what a typo is answered."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import ClassVar

import pytest

from kernels import registry
from kernels.registry import backends, create, get, register
from kernels.walk import NanRule, Rounding

EXPECTED = [
    "candidate_walk",
    "pdl_chain",
    "reference",
    "resident_sm90",
    "sglang_folded",
    "sglang_greedy",
    "sglang_markov_greedy_step",
    "streaming_sm90",
    "vllm_addmm",
    "vllm_inverse_cdf",
    "vllm_int8_walk",
    "vllm_loop_greedy",
    "vllm_loop_gumbel",
    "vllm_two_launch",
]
ARCHS = {"cpu", "cuda", "sm_90a", "sm_100a"}


def test_every_backend_is_known_by_its_sorted_name() -> None:
    known = backends()
    assert set(EXPECTED) <= set(known)
    assert list(known) == sorted(known)
    for name, backend in known.items():
        assert backend.name == name
        assert get(name) is backend
        assert backend.__module__ == f"kernels.backends.{name}", "a backend's file bears its name"


@pytest.mark.parametrize("name", EXPECTED)
def test_every_backend_declares_what_the_contract_asks(name: str) -> None:
    backend = get(name)
    room = inspect.getmodule(backend)
    assert room is not None
    assert backend.__doc__, "what it serves, or where that stands"
    assert len((room.__doc__ or "").strip()) > 40, "a sentence on what it is"
    assert backend.archs
    assert set(backend.archs) <= ARCHS
    assert isinstance(backend.nan_rule, NanRule)
    assert isinstance(create(name).rounding, Rounding)
    assert dataclasses.is_dataclass(backend.Options)
    for field in dataclasses.fields(backend.Options):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(backend.Options(), field.name, None)
    if dataclasses.fields(backend.Options):
        described = inspect.getdoc(backend.Options) or ""
        assert re.search("[a-z]{3} [a-z]+", described), "not the signature that a dataclass gives itself"


def test_what_each_int8_and_bf16_walk_must_equal() -> None:
    assert create("resident_sm90").rounding is Rounding.INT8
    assert create("streaming_sm90", {"weights": "int8"}).rounding is Rounding.INT8
    assert create("streaming_sm90", {"weights": "bf16"}).rounding is Rounding.TWICE


@pytest.mark.parametrize(("typo", "near"), [("resident_sm9O", "resident_sm90"), ("sglang_gredy", "sglang_greedy")])
def test_an_unknown_name_is_answered_with_the_nearest(typo: str, near: str) -> None:
    with pytest.raises(KeyError, match=f"no backend is called {typo!r}; did you mean {near!r}\\? Known: .*reference, resident_sm90"):
        get(typo)
    with pytest.raises(KeyError, match=typo):
        create(typo)
    with pytest.raises(KeyError) as refused:
        get("zzz")
    assert "did you mean" not in str(refused.value)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_unknown_option_is_answered_with_the_valid_ones(name: str) -> None:
    valid = ", ".join(field.name for field in dataclasses.fields(get(name).Options)) or "none"
    with pytest.raises(ValueError, match=f"backend {name!r} has no option 'rf_tile'; it has: {valid}."):
        create(name, {"rf_tile": 4})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("streaming_sm90", {"weights": "fp8"}, "weights int8 or bf16; got 'fp8'"),
        ("pdl_chain", {"weights": "fp8"}, "weights int8 or bf16; got 'fp8'"),
        ("pdl_chain", {"warps": 3}, "warps from 4 to 32; got 3"),
        ("pdl_chain", {"stages": 0}, "stages from 1 to 64; got 0"),
        ("pdl_chain", {"kept_percent": 101}, "kept_percent from 0 to 100; got 101"),
        ("streaming_sm90", {"depth": 5}, "depth from 1 to 4; got 5"),
        ("streaming_sm90", {"depth": 0}, "depth from 1 to 4; got 0"),
        ("streaming_sm90", {"warps": 0}, "warps from 1 to 32; got 0"),
        ("streaming_sm90", {"kept_percent": 101}, "kept_percent from 0 to 100; got 101"),
        ("streaming_sm90", {"exchange": "mail"}, "exchange must be one of pair, mailboxes; got 'mail'"),
        ("resident_sm90", {"exchange": "mail"}, "exchange must be one of pair, mailboxes; got 'mail'"),
    ],
)
def test_option_values_out_of_range(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create(name, options)


def test_options_reach_the_backend() -> None:
    backend = create("resident_sm90", {"rf_tiles": 5, "exchange": "mailboxes", "clocks": True})
    assert vars(backend)["options"] == get("resident_sm90").Options(rf_tiles=5, exchange="mailboxes", clocks=True)
    assert vars(create("resident_sm90", None))["options"] == get("resident_sm90").Options()


def test_two_backends_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BACKENDS", dict(backends()))

    class Usurper:
        name: ClassVar[str] = "resident_sm90"

    with pytest.raises(ValueError, match=rf"two backends are called 'resident_sm90': kernels.backends.resident_sm90 and {__name__}"):
        register(Usurper)
    assert get("resident_sm90").__module__ == "kernels.backends.resident_sm90"
