"""Is another level of a trained drafter's tree worth its time?

A level takes a pass of the head, which nobody gets back, and saves what its nodes are expected to save. Both are running means
over trees, weighed against what tokens and rows of the target's next pass are worth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

from specdec.draft.drawing import Drawing
from specdec.draft.expand import Growth

FADE = 32
"""Levels of trees over which their seconds, and the chances of their best nodes, are averaged."""

FORGET = 8
"""Asks without a further level over which the seconds of one come down to those of the first."""


class Levels:
    """What levels take and save."""

    def __init__(self) -> None:
        self._token, self._row = math.inf, 0.0
        self._seconds = 0.0
        """Of a level beyond the first, running mean."""
        self._likely = 1.0
        """Chance of a node's best child, running mean."""

    def weigh(self, token: float, row: float) -> None:
        """Seconds that an accepted token saves, and that a verified row costs."""
        self._token, self._row = token, row

    def first(self, took: float) -> None:
        """The first level of a tree took so many seconds: what is known of further ones before there was any."""
        self._seconds = self._seconds or took

    def ended(self, took: float) -> None:
        """A tree ended with its first level, which took so many seconds.

        A level takes no longer than the first, which fetches the weights. Were what is known of levels too much, none would be
        drafted that could show it.
        """
        if took < self._seconds:
            self._seconds += (took - self._seconds) / FORGET

    def further(self, took: float) -> None:
        """A level beyond the first took so many seconds."""
        self._seconds += (min(took, 4 * self._seconds) - self._seconds) / FADE

    def likely(self, chance: float) -> None:
        """The best child of a node has this chance, which need not be a number."""
        if chance == chance:
            self._likely += (min(chance, 1.0) - self._likely) / FADE

    def parents(self, growths: Many[Growth | Drawing]) -> list[list[int]]:
        """Of each tree the nodes of the last level that propose children; no list at all where another level does not pay.

        Those are the nodes whose children can be expected to be worth their rows, and a level pays that is expected to save
        more than the time it takes. A drawn tree has those that its shape says, whatever they cost.
        """
        found: list[list[int]] = []
        saved = 0.0
        for growth in growths:
            nodes = growth.next()
            if isinstance(growth, Drawing):
                saved += math.inf if nodes else 0.0
            else:
                # Seconds that a child of each is expected to save, drafting it not deducted.
                gains = [growth.values[node] * self._likely * self._token - self._row for node in nodes]
                nodes = [node for node, gain in zip(nodes, gains, strict=True) if gain > 0]
                saved += sum([gain for gain in gains if gain > 0])
            found.append(nodes)
        return found if saved > self._seconds else []
