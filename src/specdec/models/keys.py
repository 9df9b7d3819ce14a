"""Typed access to the keys of a model's description, with errors that name the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.models.errors import ModelError


class Keys:
    """Typed access to the keys of a file; every error names the file and the key."""

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.values = values
        self.path = path
        self.prefix = prefix

    def get(self, key: str) -> Any:
        """The value, or None where the key is absent or null."""
        return self.values.get(self.prefix + key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key) if self.get(key) is not None else default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, value, "a whole number above 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key) if self.get(key) is not None else default
        if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
            raise self.error(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key) if self.get(key) is not None else default
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        value = self.get(key)
        if not isinstance(value, list) or len(value) != count or not all(isinstance(x, int | float) and x > 0 for x in value):
            raise self.error(key, value, f"a list of {count} numbers above 0")
        return tuple(float(x) for x in value)

    def error(self, key: str, value: Any, rule: str) -> ModelError:
        if value is None:
            return ModelError(f"{self.path} lacks {self.prefix}{key}, which must be {rule}")
        return ModelError(f"{self.path}: {self.prefix}{key} must be {rule}, got {value!r}")

    def unsupported(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}")


def token_ids(keys: Keys, key: str) -> frozenset[int]:
    """An id, a list of ids, or nothing."""
    value = keys.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise keys.error(key, value, "a token id or a list of token ids")
    return frozenset(ids)
