"""Prompt lookup (Saxena 2023; LLMA, arXiv 2304.04487): what followed the last few tokens the last time they were seen.

The cheapest drafter there is: one dictionary per sequence, a few entries per new token, one look-up per length. It is
made for outputs that copy from their own prompt: edits, quotes, extractions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Many

from specdec.config import SpeculationConfig
from specdec.draft.base import Drafter
from specdec.tree import chain
from specdec.types import Draft, Sequence


class NgramDrafter(Drafter):
    """Drafts the continuation of the most recent earlier occurrence of the longest tail that has one.

    Where the match lies so near the end that its continuation runs into the tail itself, the text between the two is
    taken to repeat: a loop of p tokens is drafted round and round, not only its p tokens.
    """

    name = "ngram"

    def __init__(self, config: SpeculationConfig) -> None:
        self._lengths = range(config.ngram_max, config.ngram_min - 1, -1)
        self._indexes: dict[int, _Index] = {}

    def propose(self, sequences: Many[Sequence], budgets: Many[int]) -> list[Draft]:
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: Sequence, budget: int) -> Draft:
        if budget <= 0:
            return Draft()
        tokens = sequence.tokens
        index = self._indexes.setdefault(sequence.id, _Index())
        index.follow(tokens, self._lengths)
        start = index.find(tokens, self._lengths)
        if start is None:
            return Draft()
        drafted = tokens[start : start + budget]
        period = len(tokens) - start
        for i in range(len(drafted), budget):
            drafted.append(drafted[i - period])
        for i, token in enumerate(drafted):
            if token in sequence.end_tokens:  # nothing after it can be emitted
                del drafted[i + 1 :]
                break
        return Draft(chain(drafted), (self.name,) * len(drafted))

    def release(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence.id, None)

    @property
    def n_bytes(self) -> int:
        return sum(index.n_bytes for index in self._indexes.values())


class _Index:
    """n-gram -> where its latest occurrence was continued, for one sequence."""

    def __init__(self) -> None:
        self._seen: list[int] = []
        self._starts: dict[tuple[int, ...], int] = {}

    def follow(self, tokens: list[int], lengths: Many[int]) -> None:
        """Take in what is new in ``tokens``; start over where they are not a continuation of what was seen."""
        seen = self._seen
        if seen != tokens[: len(seen)]:  # the id was given to another sequence
            seen.clear()
            self._starts.clear()
        # An n-gram is entered once a token follows it, so that the tail never finds itself.
        for start in range(max(1, len(seen)), len(tokens)):
            for n in lengths:
                if n <= start:
                    self._starts[tuple(tokens[start - n : start])] = start
        seen.extend(tokens[len(seen) :])

    def find(self, tokens: list[int], lengths: Many[int]) -> int | None:
        """Where the continuation of the latest earlier occurrence of the longest known tail starts."""
        for n in lengths:
            if n < len(tokens) and (start := self._starts.get(tuple(tokens[-n:]))) is not None:
                return start
        return None

    @property
    def n_bytes(self) -> int:
        key = sys.getsizeof((0, 0, 0)) + sys.getsizeof(0)
        return sys.getsizeof(self._starts) + sys.getsizeof(self._seen) + len(self._starts) * key
