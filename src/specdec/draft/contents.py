"""Which text the keys and values of a drafter's own pool belong to.

A drafter that keeps keys and values under the target's block numbers is told of no block that changes hands. So each block is
known by what was last written into it: how many rows of committed text, and a digest of that text from its beginning. Rows
are taken for a sequence's own where its table leads to a block that holds the sequence's own text at that place. This stays
right whatever becomes of tables: when they are cut and grow again, when a preempted sequence comes back to other blocks or to
the same ones, when two sequences share those of a common beginning.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from specdec.config import BLOCK_SIZE
from specdec.types import Sequence


class Contents:
    """What each block of a pool holds."""

    def __init__(self, n_blocks: int) -> None:
        self._held: list[tuple[int, int]] = [(0, 0)] * n_blocks
        """Rows of committed text in a block, and the digest of the text down to the last of them."""
        self._digests: dict[int, list[int]] = {}
        """Of each sequence's text down to the end of each whole block."""

    def rows(self, sequence: Sequence) -> int:
        """How many of the sequence's first rows are there, up to all of its tokens."""
        whole = self._whole(sequence)
        for i, block in enumerate(sequence.table.blocks):
            n, digest = self._held[block]
            stop = i * BLOCK_SIZE + n
            if not n or stop > len(sequence.tokens) or digest != self._digest(sequence, stop, whole):
                return i * BLOCK_SIZE
            if n < BLOCK_SIZE:
                return stop
        return len(sequence.table.blocks) * BLOCK_SIZE

    def write(self, sequence: Sequence, blocks: Many[int], start: int, stop: int, end: int) -> None:
        """Rows of committed tokens [start, stop) are in these blocks now, behind those before them; what lay in slots from
        ``stop`` to ``end`` is gone."""
        whole = self._whole(sequence)
        for i in range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
            n = min(max(stop - i * BLOCK_SIZE, 0), BLOCK_SIZE)
            self._held[blocks[i]] = (n, self._digest(sequence, i * BLOCK_SIZE + n, whole) if n else 0)

    def release(self, sequence: Sequence) -> None:
        """The sequence is at its end. What is known of blocks stays, since its text may come again."""
        self._digests.pop(sequence.id, None)

    def _whole(self, sequence: Sequence) -> list[int]:
        """The digests of a sequence's whole blocks of committed tokens."""
        digests = self._digests.setdefault(sequence.id, [])
        for stop in range((len(digests) + 1) * BLOCK_SIZE, len(sequence.tokens) + 1, BLOCK_SIZE):
            digests.append(self._digest(sequence, stop, digests))
        return digests

    def _digest(self, sequence: Sequence, stop: int, whole: list[int]) -> int:
        """Of the first ``stop`` >= 1 tokens. Equal ones of different texts could only make a draft bad, and will not occur."""
        i = (stop - 1) // BLOCK_SIZE
        if stop == (i + 1) * BLOCK_SIZE and i < len(whole):
            return whole[i]
        return hash((whole[i - 1] if i else 0, *sequence.tokens[i * BLOCK_SIZE : stop]))
