"""The native search for what followed the end of a text; draft/continuations.py says what is found."""

from __future__ import annotations

import ctypes
from array import array
from typing import TypeAlias

from specdec.kernels.library import DOUBLE, INT, LONG, POINTER, Library

Ints: TypeAlias = "array[int]"


class NativeTails:
    """Calls ``follow_tail`` of csrc/tails.c. One object serves one thread: its calls share the memory that they write to."""

    def __init__(self, library: Library) -> None:
        n, p, d = LONG, POINTER, DOUBLE
        self._run = library.function(
            "follow_tail", p, n, p, n, n, n, n, n, n, n, d, d, d, d, p, n, p, p, p, p, returns=LONG
        )  # fmt: skip
        self._score = ctypes.c_double()
        self._ends = frozenset[int](), (INT * 0)()
        """The end tokens of the last call, and as the library takes them."""
        self._room(64)

    def _room(self, nodes: int) -> None:
        self._most = nodes
        self._tokens, self._parents, self._estimates = (INT * nodes)(), (INT * nodes)(), (DOUBLE * nodes)()

    def follow(
        self,
        text: Ints,
        tail: Ints,
        *,
        start: int,
        shortest: int,
        depth: int,
        budget: int,
        places: int,
        rows: int,
        factor: float,
        min_probability: float,
        prior: float,
        enough: float,
        end_tokens: frozenset[int],
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...], float]:
        """Tokens, parents and estimates of the best tree, and its score.

        Args:
            text: [n] of type "i", with at least ``len(tail)`` gaps of -1 in front of it and ``depth`` behind.
            tail: [at least ``shortest`` tokens].
            budget: most nodes, at least 1.

        Raises:
            MemoryError: there is none for the search.
        """
        if budget > self._most:
            self._room(budget)
        if end_tokens is not self._ends[0]:
            self._ends = end_tokens, (INT * len(end_tokens))(*end_tokens)
        n = self._run(
            *text.buffer_info(), *tail.buffer_info(), start, shortest, depth, budget, places, rows,
            factor, min_probability, prior, enough, self._ends[1], len(end_tokens),
            self._tokens, self._parents, self._estimates, ctypes.byref(self._score),
        )  # fmt: skip
        if n < 0:
            raise MemoryError("no memory for a search of what followed the end of a text")
        return tuple(self._tokens[:n]), tuple(self._parents[:n]), tuple(self._estimates[:n]), self._score.value
