"""The checks that every config makes of its values, and the error that says which value is wrong and what would be right."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar, cast

_Config = TypeVar("_Config")


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type or out of range; the message names it and says what is allowed."""


def from_dict(cls: type[_Config], values: Mapping[str, Any]) -> _Config:
    """Build a config dataclass from a mapping; an unknown key is an error that lists the known ones."""
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(values) - known):
        raise ConfigError(f"unknown {cls.__name__} setting {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return cls(**values)


def require(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{name} must be {rule}, got {value!r}")


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def require_integer(name: str, value: object, low: int, high: float, rule: str) -> None:
    require(is_integer(value) and low <= cast(int, value) <= high, name, value, rule)


def require_probability(name: str, value: object) -> None:
    require(is_number(value) and 0 < cast(float, value) <= 1, name, value, "a number in (0, 1]")


def items(name: str, value: object, rule: str) -> tuple[Any, ...]:
    """The items of a list of any kind, and none for None."""
    if value is None:
        return ()
    require(isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping), name, value, rule)
    return tuple(cast(Iterable[Any], value))
