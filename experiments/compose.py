"""From `key=value` overrides to a Config, through Hydra. The only file besides `run` that imports it, and only inside functions."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from experiments import convert
from experiments.schema import EXPERIMENTS, Config

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@cache
def register() -> None:
    """Tell Hydra the schema, so that a typo or a wrong type fails while composing, with its key named."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name="config_schema", node=_open(Config))
    for name, experiment in EXPERIMENTS.items():
        store.store(group="experiment", name=f"{name}_schema", node=_open(experiment))


def compose(overrides: Sequence[str]) -> Config:
    """The run that `overrides` ask for.

    Raises:
        convert.ConfigError: one sentence that names the key.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    register()
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return from_hydra(hydra_compose("config", overrides=list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise convert.ConfigError(explain(error)) from error


def from_hydra(composed: Any) -> Config:
    """The plain dataclasses of a composed Hydra config."""
    from omegaconf import OmegaConf

    data = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    return convert.config(typing.cast(dict[str, Any], data))


def explain(error: BaseException) -> str:
    """One sentence for a Hydra or OmegaConf error: the full key, what is wrong with it, and the nearest valid key."""
    for cause in reversed(list(_causes(error))):
        if key := getattr(cause, "full_key", None):
            return f"{key}: {_sentence(getattr(cause, 'msg', None) or str(cause))}{_near_key(str(key), cause)}"
        if missing := getattr(cause, "missing_cfg_file", None):
            return _missing(missing, getattr(cause, "options", None) or ())
    return _sentence(str(error))


def _missing(path: str, options: Sequence[str]) -> str:
    group, _, name = path.rpartition("/")
    known = [option for option in options if not option.endswith("_schema")]
    return f"{group}: {name!r} is not one of {', '.join(known)}{convert.nearest(name, known)}"


def _near_key(key: str, cause: BaseException) -> str:
    owner, last = getattr(cause, "object_type", None), key.rsplit(".", 1)[-1]
    if owner is dict:
        return f"; to add it, write +{key}=VALUE"
    if owner is None or not is_dataclass(owner):
        return ""
    known = [item.name for item in fields(owner)]
    return "" if last in known else f"{convert.nearest(last, known)}; it has: {', '.join(known)}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _sentence(text: str) -> str:
    """Several lines as one, without OmegaConf's own bookkeeping."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(("full_key:", "object_type=", "reference_type=")))


@cache
def _open(cls: type) -> type:
    """A twin of frozen dataclass `cls` that Hydra may merge into: OmegaConf makes frozen ones read-only, and has no unions of dataclasses."""
    hints = typing.get_type_hints(cls)
    twin = make_dataclass(cls.__name__, [(item.name, _open_hint(hints[item.name]), _open_default(item)) for item in fields(cls)])
    twin.__module__ = cls.__module__
    return twin


def _open_hint(hint: Any) -> Any:
    if is_dataclass(hint):
        return _open(typing.cast(type, hint))
    if typing.get_origin(hint) is tuple:
        return list[_open_hint(typing.get_args(hint)[0])]
    return Any if typing.get_origin(hint) in (typing.Union, type(int | str)) else hint


def _open_default(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return field(default_factory=item.default_factory)
    if item.default is MISSING:
        return field(default="???")
    return field(default_factory=lambda: _open_value(item.default))


def _open_value(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _open(type(value))(**{item.name: _open_value(getattr(value, item.name)) for item in fields(value)})
    return list(value) if isinstance(value, tuple) else value
