"""What drafters keep of past requests, apart for each salt.

It changes no token, but how fast an answer comes can tell what others were given. So requests of different salts share
nothing of it, as they share no cached prefix. All stores together are bounded: the least recently used goes first, whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Generic, TypeVar

S = TypeVar("S", bound=Sized)


class Stores(Generic[S]):
    """A store for each salt.

    Args:
        make: gives an empty store.
        most: how large all may be together, by their lengths, which grow with the memory that they take. One alone may be
            larger.
    """

    def __init__(self, make: Callable[[], S], most: int) -> None:
        self._make = make
        self._most = most
        self._stores: dict[str, S] = {}
        """The least recently used first."""
        self._sizes: dict[str, int] = {}
        self._total = 0

    def __len__(self) -> int:
        return len(self._stores)

    @property
    def values(self) -> list[S]:
        return list(self._stores.values())

    def find(self, salt: str) -> S | None:
        """The store of a salt, if anything was ever kept for it."""
        store = self._stores.pop(salt, None)
        if store is not None:
            self._stores[salt] = store
        return store

    def of(self, salt: str) -> S:
        """The store of a salt, to keep something in it; ``grown`` must follow."""
        store = self.find(salt)
        if store is None:
            store = self._stores[salt] = self._make()
        return store

    def grown(self, salt: str) -> None:
        """The store of this salt has changed: forget others where all hold too much together."""
        size = len(self._stores[salt])
        self._total += size - self._sizes.get(salt, 0)
        self._sizes[salt] = size
        while self._total > self._most and len(self._stores) > 1:
            oldest = next(iter(self._stores))
            if oldest == salt:  # it has not been used since, though it has grown
                self.find(salt)
                continue
            del self._stores[oldest]
            self._total -= self._sizes.pop(oldest, 0)
