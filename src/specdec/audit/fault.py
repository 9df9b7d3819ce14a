"""What a broken engine is to the audit, and what a check says of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from specdec.audit.report import Check
from specdec.audit.requests import Request


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to break an engine."""

    name: str
    part: str
    """``cache``, ``rows``, ``sampler``, ``verifier`` or ``chance``."""
    story: str
    """What such an engine does."""
    broken: Callable[[], AbstractContextManager[Any]]
    states: tuple[str, ...] = ("cold", "staggered")
    """States of the audit in which it is to be caught, the likeliest first."""
    shows_in: Callable[[Request], bool] = lambda request: True
    """Requests by which it is likeliest to be caught."""

    def caught(self, look: Callable[[], str]) -> str:
        """How the broken engine is noticed; empty where it is not.

        Args:
            look: runs it, and says what is wrong with what it gives; empty for nothing.
        """
        try:
            with self.broken():
                return look()
        except Exception as error:  # a broken engine may trip over anything, and that is noticed too
            return f"the engine broke off with {type(error).__name__}"

    def check(self, caught: str, seconds: float, details: Mapping[str, Any]) -> Check:
        """Passed if the audit noticed, failed if the engine would pass it."""
        told = {"part": self.part, "story": self.story, **details}
        if caught:
            return Check("teeth", self.name, "passed", f"caught: {caught}", seconds, {**told, "caught_by": caught})
        summary = f"SURVIVED: an engine that {self.story} would pass this audit"
        return Check("teeth", self.name, "failed", summary, seconds, told)


def replaced(owner: Any, name: str, broken: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Makes contexts in which an attribute is another."""
    return lambda: patch.object(owner, name, broken)
