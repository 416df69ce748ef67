"""Backends by name. Dropping a file into `kernels/backends/` adds one."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from kernels.walk import Backend

_BACKENDS: dict[str, type[Backend]] = {}
_B = TypeVar("_B", bound=type)


def register(backend: _B) -> _B:
    """Class decorator: make a backend known under its `name`."""
    name = backend.name  # type: ignore[attr-defined]  # a Backend by contract; a bound of type[Backend] would hide the concrete class
    if _BACKENDS.setdefault(name, backend).__module__ != backend.__module__:
        raise ValueError(f"two backends are called {name!r}: {_BACKENDS[name].__module__} and {backend.__module__}")
    return backend


@cache
def _import_all() -> None:
    import kernels.backends as room

    for module in pkgutil.iter_modules(room.__path__):
        importlib.import_module(f"{room.__name__}.{module.name}")


def backends() -> dict[str, type[Backend]]:
    """Every backend of `kernels/backends/`, by name, sorted."""
    _import_all()
    return dict(sorted(_BACKENDS.items()))


def get(name: str) -> type[Backend]:
    """The backend class called `name`; a KeyError that names the nearest one otherwise."""
    known = backends()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise KeyError(f"no backend is called {name!r}{hint} Known: {', '.join(known)}.")
    return known[name]


def create(name: str, options: Mapping[str, Any] | None = None) -> Backend:
    """A backend with its options; unknown option names are errors that name the key and the valid ones."""
    backend = get(name)
    valid = [field.name for field in fields(backend.Options)]
    for key in options or {}:
        if key not in valid:
            raise ValueError(f"backend {name!r} has no option {key!r}; it has: {', '.join(valid) or 'none'}.")
    return backend(backend.Options(**(options or {})))
