"""What the router needs of replicas, wherever they run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from typing import Any, Protocol

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request on its way to a replica, and perhaps to another one after that: it holds all of it."""

    method: str
    path: str
    query: str
    headers: Headers
    body: bytes
    keys: list[bytes]
    """Of its leading text, see ``prefix``; none where it has no prompt."""


class BrokenOff(Exception):
    """A replica is gone before the end of its answer.

    Args:
        replica: its name, or None where that is not known.
    """

    def __init__(self, replica: str | None) -> None:
        super().__init__(f"replica {replica} is gone")
        self.replica = replica


class NoReplica(Exception):
    """There is none that could be asked."""


class Answer(Protocol):
    """A replica's response, of which the head has come. Close it in any case: that ends the request in the replica."""

    replica: str | None
    status: int
    headers: Headers

    def chunks(self) -> AsyncIterator[bytes]:
        """The body, as it comes. Raises BrokenOff."""
        ...

    async def close(self) -> None: ...


class Replicas(Protocol):
    """Who answers."""

    async def ask(self, asked: Asked, avoid: Collection[str]) -> Answer:
        """Give a request to one of the replicas that are not to be avoided.

        Raises:
            BrokenOff: it is gone, and no part of an answer has come.
            NoReplica: there is none.
        """
        ...

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Can requests be served, and what is known of each replica?"""
        ...

    async def metrics(self) -> bytes:
        """The figures of all replicas in Prometheus' format."""
        ...
