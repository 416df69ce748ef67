"""Plain dicts to the dataclasses of `schema`, strictly: an unknown key or a wrong type is an error that names the full key."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from experiments.schema import EXPERIMENTS, Config

_T = TypeVar("_T")


class ConfigError(ValueError):
    """A config that asks for something that does not exist. The message names the key and, where there is one, the nearest valid one."""


def config(data: Mapping[str, Any]) -> Config:
    """The run that `data` describes; `experiment.name` chooses the experiment's dataclass."""
    return convert(Config, data)


def convert(cls: type[_T], data: Any, key: str = "") -> _T:
    """An instance of dataclass `cls` from the mapping `data`; `key` is where it stands in the whole config.

    Raises:
        ConfigError: unknown or missing key, wrong type, or a value that the dataclass itself refuses.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{key or 'config'}: expected a group of keys, got {data!r}")
    hints = typing.get_type_hints(cls)
    known = {field.name: field for field in fields(typing.cast(Any, cls))}
    for name in data:
        if name not in known:
            raise ConfigError(
                f"{_join(key, name)}: unknown key{nearest(str(name), known)}; {key or 'config'} has: {', '.join(known) or 'none'}"
            )
    for name, field in known.items():
        if name not in data and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{_join(key, name)}: missing")
    values = {name: _value(hints[name], value, _join(key, name)) for name, value in data.items()}
    try:
        return cls(**values)
    except ValueError as error:
        names_its_key = str(error).split(":")[0].split(" ")[0] in known
        raise ConfigError(_join(key, str(error)) if names_its_key else f"{key}: {error}") from error


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing where no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _join(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)


def _value(hint: Any, value: Any, key: str) -> Any:
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _optional(hint, value, key) if types.NoneType in typing.get_args(hint) else _experiment(value, key)
    if is_dataclass(hint):
        return convert(typing.cast(type, hint), value, key)
    if origin is tuple:
        return _tuple(typing.get_args(hint)[0], value, key)
    if origin is dict:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise ConfigError(f"{key}: expected a group of keys, got {value!r}")
        return dict(value)
    return _scalar(hint, value, key)


def _optional(hint: Any, value: Any, key: str) -> Any:
    """`T | None`, as backends' options have it, and the two kinds of pair."""
    if value is None:
        return None
    wanted = _closest([each for each in typing.get_args(hint) if each is not types.NoneType], value)
    try:
        return _value(wanted, value, key)
    except ConfigError as error:
        raise ConfigError(f"{error}; null is accepted too") from error


def _closest(hints: Sequence[Any], value: Any) -> Any:
    """Of several dataclasses the one that has most of the keys given, and the smaller one if both have them all."""
    given = set(value) if isinstance(value, Mapping) else set[str]()

    def nearness(hint: Any) -> tuple[int, int]:
        known = {field.name for field in fields(hint)}
        return len(given & known), -len(known)

    return hints[0] if len(hints) == 1 else max(hints, key=nearness)


def _experiment(value: Any, key: str) -> Any:
    """The one other union: the experiments, told apart by their name."""
    if not isinstance(value, Mapping) or "name" not in value:
        raise ConfigError(f"{key}.name: missing; it is one of: {', '.join(EXPERIMENTS)}")
    name = value["name"]
    if name not in EXPERIMENTS:
        raise ConfigError(
            f"{key}.name: no experiment is called {name!r}{nearest(str(name), EXPERIMENTS)}; there are: {', '.join(EXPERIMENTS)}"
        )
    return convert(EXPERIMENTS[name], value, key)


def _tuple(element: Any, value: Any, key: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{key}: expected a list, got {value!r}")
    return tuple(_value(element, item, f"{key}[{place}]") for place, item in enumerate(value))


def _scalar(hint: type, value: Any, key: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{key}: expected {hint.__name__}, got {value!r}")
    return value
