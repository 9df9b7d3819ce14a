"""What a request's penalties and bans look at: its tokens so far, counted while they come."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class History:
    """What penalties and bans look at in one sequence: kept up to date in O(1) per committed token.

    Methods take ``path``, the tokens of a drafted path, and answer as if these had been committed as well.
    """

    __slots__ = ("_counts", "_distinct", "_emitted", "_known", "_slots", "_tokens", "n_prompt")

    def __init__(self, prompt: Iterable[int]) -> None:
        self._tokens = array("q", prompt)
        self.n_prompt = len(self._tokens)
        self._known = set(self._tokens)
        self._distinct = array("q", self._known)  # prompt and output, each token once
        self._slots: dict[int, int] = {}  # output token -> its place in the two arrays below
        self._emitted = array("q")
        self._counts = array("q")

    @classmethod
    def of(cls, tokens: Sequence[int], n_prompt: int) -> History:
        """The history of a sequence whose first ``n_prompt`` tokens are the prompt."""
        history = cls(tokens[:n_prompt])
        for token in tokens[n_prompt:]:
            history.append(token)
        return history

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def n_output(self) -> int:
        return len(self._tokens) - self.n_prompt

    def append(self, token: int) -> None:
        """Commit an emitted token."""
        self._tokens.append(token)
        if token not in self._known:
            self._known.add(token)
            self._distinct.append(token)
        slot = self._slots.setdefault(token, len(self._emitted))
        if slot == len(self._emitted):
            self._emitted.append(token)
            self._counts.append(0)
        self._counts[slot] += 1

    def distinct(self, path: Sequence[int]) -> Ids:
        """[n] the tokens of prompt, output and path, each once."""
        new = dict.fromkeys(token for token in path if token not in self._known)
        return np.concatenate([np.array(self._distinct, np.int64), np.fromiter(new, np.int64, len(new))])

    def emitted(self, path: Sequence[int]) -> tuple[Ids, Ids]:
        """[n] the tokens of output and path, each once, and how often each occurs."""
        n = len(self._counts)
        counts = np.zeros(n + len(path), np.int64)
        counts[:n] = self._counts
        new: dict[int, int] = {}
        for token in path:
            slot = self._slots.get(token)
            counts[new.setdefault(token, n + len(new)) if slot is None else slot] += 1
        ids = np.concatenate([np.array(self._emitted, np.int64), np.fromiter(new, np.int64, len(new))])
        return ids, counts[: len(ids)]

    def tail(self, path: Sequence[int], n: int) -> tuple[int, ...]:
        """The last n tokens of prompt, output and path; fewer where there are fewer."""
        committed = self._tokens[max(0, len(self._tokens) - max(0, n - len(path))) :]
        return (*committed, *path)[-n:] if n else ()
