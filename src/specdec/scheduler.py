"""Which sequences run in the next pass, and with how many rows: integers only, no tensors.

First come, first served. Every sequence that decodes has its row in every pass; unfinished prompts share the rows that are
left (``share``). A prompt goes on from the longest prefix of it that the prefix cache knows, looked up whenever it gets
rows, so that of several sequences with the same beginning one reads it. Every slot that a pass may write is reserved
before it, drafts included; when blocks run short the youngest sequence is preempted: it lets go of its blocks and will be
recomputed from its tokens, which changes none of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from specdec.config import BLOCK_SIZE
from specdec.kv.blocks import BlockAllocator
from specdec.kv.prefix import PrefixCache
from specdec.types import Sequence


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to run committed tokens ``[start, stop)`` and, if that reaches the pending token, up to ``nodes`` drafted ones."""

    sequence: Sequence
    start: int
    stop: int
    nodes: int


def share(left: Many[int], rows: int) -> list[int]:
    """How many of ``rows`` each prompt gets that has so many ``left`` to read; the oldest stands first.

    The oldest gets half of them, or all that it needs. The others get the rest, those that will soon be through first. So
    a prompt of n rows is read within 2 (n + the rows of those before it) / rows passes, and one more for each of those,
    whatever comes after it; and long prompts before it do not hold up a short one: it waits for those that have fewer
    rows left, at half speed.
    """
    if not left:
        return []
    granted = [0] * len(left)
    granted[0] = min(left[0], (rows + 1) // 2)
    rows -= granted[0]
    for i in sorted(range(1, len(left)), key=left.__getitem__):
        granted[i] = min(left[i], rows)
        rows -= granted[i]
    granted[0] += min(left[0] - granted[0], rows)
    return granted


class Scheduler:
    """Holds waiting and running sequences, oldest first.

    Args:
        prompt_rows: how many prompt rows a pass may have beside so many decoding sequences; at least one.
        max_nodes: most drafted nodes of a sequence in a pass.
        cache: where prompts find what has been computed before; None: nowhere.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_sequences: int,
        prompt_rows: Callable[[int], int],
        max_nodes: int,
        cache: PrefixCache | None,
    ) -> None:
        self._allocator = allocator
        self._max_sequences = max_sequences
        self._prompt_rows = prompt_rows
        self._max_nodes = max_nodes
        self._cache = cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and let go of its blocks."""
        if sequence.status == "running":
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = "finished"
        sequence.table.truncate(0)

    def next(self) -> tuple[list[Grant], list[Sequence]]:
        """Grants for the next pass, decoding sequences first, and the sequences that were preempted to make room."""
        self._admit()
        decoding = [s for s in self.running if len(s.tokens) - s.n_cached == 1]
        reading = [s for s in self.running if len(s.tokens) - s.n_cached > 1]
        stops = [len(s.tokens) for s in decoding]
        if reading:
            if self._cache:
                reading = self._without_twins(reading, self._cache)
            left = [len(s.tokens) - s.n_cached for s in reading]
            rows = share(left, max(1, self._prompt_rows(len(decoding))))
            stops += [s.n_cached + n for s, n in zip(reading, rows, strict=True)]
        preempted: list[Sequence] = []
        chosen: list[tuple[Sequence, int]] = []  # and where its committed rows stop
        for sequence, stop in zip(decoding + reading, stops, strict=True):
            if sequence.status != "running" or stop == sequence.n_cached:
                continue  # preempted for an older one just now, or no rows were left for it
            if self._reserve(sequence, stop, preempted):
                chosen.append((sequence, stop))
        # Drafts get what is left, when every committed row has its slot: speculation preempts nobody.
        return [self._grant(sequence, stop) for sequence, stop in chosen if sequence.status == "running"], preempted

    def _grant(self, sequence: Sequence, stop: int) -> Grant:
        nodes = 0
        if stop == len(sequence.tokens):
            # An emitted token needs room, so a path longer than room - 1 could not be used.
            nodes = min(self._wanted(sequence), sequence.room - 1)
            if nodes:
                free = sequence.table.n_slots + self._allocator.n_free * BLOCK_SIZE - stop
                nodes = min(nodes, free)
                sequence.table.reserve(stop + nodes)
        return Grant(sequence, sequence.n_cached, stop, nodes)

    def _wanted(self, sequence: Sequence) -> int:
        """Most nodes that engine and request allow in a pass."""
        wanted = sequence.speculation
        if wanted.drafters == ():
            return 0
        return self._max_nodes if wanted.max_tokens is None else min(self._max_nodes, wanted.max_tokens)

    def _admit(self) -> None:
        if not self.waiting:
            return
        # Blocks for the whole prompt must be free, beside those that running prompts still have to fill and one that each
        # running sequence may soon grow by: else the newcomer would be preempted at once.
        promised = sum(s.table.missing(len(s.tokens)) for s in self.running)
        while self.waiting and len(self.running) < self._max_sequences:
            sequence = self.waiting[0]
            found = self._cache.find(sequence) if self._cache else []
            held = sum(self._allocator.references(block) > 0 for block in found)
            need = sequence.table.missing(len(sequence.tokens)) - held
            if need + promised + len(self.running) > self._allocator.n_free:
                return
            self.waiting.popleft()
            self._reuse(sequence, found)
            promised += sequence.table.missing(len(sequence.tokens))
            sequence.status = "running"
            self.running.append(sequence)

    def _reuse(self, sequence: Sequence, found: list[int]) -> None:
        """Go on behind the blocks that were found, if that is further than the sequence has come."""
        n_slots = len(found) * BLOCK_SIZE
        if n_slots <= sequence.n_cached:
            return
        whole = sequence.n_cached // BLOCK_SIZE
        sequence.table.truncate(whole * BLOCK_SIZE)
        sequence.table.adopt(found[whole:])
        if not sequence.n_output and not sequence.stats.preemptions:  # else it is read again
            sequence.stats.cached_tokens += n_slots - sequence.n_cached
        sequence.n_cached = n_slots
        sequence.n_entered = len(found)

    def _without_twins(self, reading: list[Sequence], cache: PrefixCache) -> list[Sequence]:
        """Those prompts whose next block no older one is about to read: the others will find it when it has been read."""
        seen: set[bytes] = set()
        alone = []
        for sequence in reading:
            self._reuse(sequence, cache.find(sequence))
            key = cache.next_key(sequence)
            if key is None or key not in seen:
                alone.append(sequence)
            if key is not None:
                seen.add(key)
        return alone

    def _reserve(self, sequence: Sequence, n_slots: int, preempted: list[Sequence]) -> bool:
        """Reserve slots, preempting younger sequences if need be; False if this one itself had to go."""
        while sequence.table.missing(n_slots) > self._allocator.n_free:
            youngest = self.preempt()
            preempted.append(youngest)
            if youngest is sequence:
                return False
        sequence.table.reserve(n_slots)
        return True

    def preempt(self) -> Sequence:
        """Take the blocks of the youngest running sequence, which is then the next to be admitted and read again."""
        youngest = self.running[-1]
        self._preempt(youngest)
        return youngest

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.status = "waiting"
        sequence.n_cached = sequence.n_entered = 0
        sequence.table.truncate(0)
        self.waiting.appendleft(sequence)
