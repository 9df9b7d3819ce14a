"""Which replica is to answer: the one that has read most of the prompt already, unless it is too busy.

A prompt's leading text is cut into pieces, and each piece has a key: a hash of itself and of the key before it, as blocks of
the prefix cache have. Who was sent a prompt is taken to hold its pieces. Text is enough: equal text becomes equal tokens, and
nothing here needs a tokenizer. Only the speed depends on the choice.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

PIECE_BYTES = 64
"""About a block of sixteen tokens."""

MOST_PIECES = 1024
"""What follows of a longer prompt does not count."""

REMEMBERED = 65_536
"""Keys kept of each replica, about as many blocks as a large pool holds."""

SLACK = 4
"""A replica may have so many requests more than the least busy one and still be chosen for its prefix."""


def keys(body: Mapping[str, Any], tenant: str) -> list[bytes]:
    """The keys of a request's leading text; none where it has no prompt.

    Args:
        body: a body of either route. Only what a prompt's tokens depend on counts, and the salt.
        tenant: what parts clients whose prefixes are not shared.
    """
    text = _leading_text(body)
    if not text:
        return []
    identity = json.dumps([tenant, body.get("cache_salt"), body.get("chat_template_kwargs"), "messages" in body])
    key = hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    found = []
    for start in range(0, min(len(text), PIECE_BYTES * MOST_PIECES), PIECE_BYTES):
        key = hashlib.blake2b(key + text[start : start + PIECE_BYTES], digest_size=16).digest()
        found.append(key)
    return found


def _leading_text(body: Mapping[str, Any]) -> bytes:
    """The messages one after the other, so that a longer conversation begins with a shorter one; or the first prompt."""
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(messages, list):
        parts = [json.dumps(message, sort_keys=True) for message in messages]
        return "\n".join(parts).encode()
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    if isinstance(prompt, list):
        return " ".join(map(str, prompt)).encode()
    return b""


class Held:
    """What replicas are taken to hold, by their names; the longest unused goes first."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._keys: dict[str, OrderedDict[bytes, None]] = {}

    def match(self, replica: str, wanted: Sequence[bytes]) -> int:
        """How many leading keys a replica holds."""
        held: Mapping[bytes, None] = self._keys.get(replica, {})
        return next((i for i, key in enumerate(wanted) if key not in held), len(wanted))

    def note(self, replica: str, given: Sequence[bytes]) -> None:
        """A replica was sent this prompt."""
        held = self._keys.setdefault(replica, OrderedDict())
        for key in reversed(given):  # of one prompt the end goes first
            held[key] = None
            held.move_to_end(key)
        while len(held) > self._most:
            held.popitem(last=False)

    def size(self, replica: str) -> int:
        """How many keys a replica holds."""
        return len(self._keys.get(replica, ()))

    def forget(self, replica: str) -> None:
        """A replica began anew, or is gone."""
        self._keys.pop(replica, None)

    def choose(self, loads: Mapping[str, int], wanted: Sequence[bytes], slack: int = SLACK) -> str:
        """The replica for a request.

        Of those that have at most ``slack`` requests more than the least busy one, the one that holds most of the prompt; of
        equal ones the least busy, then the one that holds least in all, so that every cache fills, then the first by name.

        Args:
            loads: requests that each replica is answering; not empty.
            wanted: the keys of the prompt.
        """
        limit = min(loads.values()) + slack
        return min(
            (name for name, load in loads.items() if load <= limit),
            key=lambda name: (-self.match(name, wanted), loads[name], self.size(name), name),
        )
