"""Which sequences run in the next pass, and with how many rows: integers only, no tensors.

First come, first served. Sequences that decode go first, then the rows of unfinished prompts fill the row budget. Every
slot that a pass may write is reserved before it, drafts included; when blocks run short the youngest sequence is
preempted: its blocks are freed and it will be recomputed from its tokens, which changes none of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from specdec.config import BLOCK_SIZE
from specdec.kv.blocks import BlockAllocator, blocks_for
from specdec.types import Sequence


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to run committed tokens ``[start, stop)`` and, if that reaches the pending token, up to ``nodes`` drafted ones."""

    sequence: Sequence
    start: int
    stop: int
    nodes: int


class Scheduler:
    """Holds waiting and running sequences, oldest first."""

    def __init__(self, allocator: BlockAllocator, *, max_sequences: int, prefill_rows: int, max_nodes: int) -> None:
        self._allocator = allocator
        self._max_sequences = max_sequences
        self._prefill_rows = prefill_rows
        self._max_nodes = max_nodes
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free its blocks."""
        if sequence.status == "running":
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = "finished"
        sequence.table.truncate(0)

    def next(self) -> tuple[list[Grant], list[Sequence]]:
        """Grants for the next pass, oldest sequence first, and the sequences that were preempted to make room."""
        self._admit()
        preempted: list[Sequence] = []
        chosen: list[tuple[Sequence, int]] = []  # and where its committed rows stop
        rows = self._prefill_rows
        decoding = [s for s in self.running if len(s.tokens) - s.n_cached == 1]
        reading = [s for s in self.running if len(s.tokens) - s.n_cached > 1]
        for sequence in decoding + reading:
            if sequence.status != "running":
                continue  # preempted for an older one just now
            start, length = sequence.n_cached, len(sequence.tokens)
            stop = length if length - start == 1 else min(length, start + rows)
            if stop == start:
                continue  # the row budget is spent
            if self._reserve(sequence, stop, preempted):
                rows -= stop - start if length - start > 1 else 0
                chosen.append((sequence, stop))
        # Drafts get what is left, when every committed row has its slot: speculation preempts nobody.
        return [self._grant(sequence, stop) for sequence, stop in chosen if sequence.status == "running"], preempted

    def _grant(self, sequence: Sequence, stop: int) -> Grant:
        nodes = 0
        if stop == len(sequence.tokens):
            # An emitted token needs room, so a path longer than room - 1 could not be used.
            free = sequence.table.n_slots + self._allocator.n_free * BLOCK_SIZE - stop
            nodes = min(self._wanted(sequence), sequence.room - 1, free)
            sequence.table.reserve(stop + nodes)
        return Grant(sequence, sequence.n_cached, stop, nodes)

    def _wanted(self, sequence: Sequence) -> int:
        """Most nodes that engine and request allow in a pass."""
        wanted = sequence.speculation
        if wanted.drafters == ():
            return 0
        return self._max_nodes if wanted.max_tokens is None else min(self._max_nodes, wanted.max_tokens)

    def _admit(self) -> None:
        # Blocks for the whole prompt must be free, beside those that running prompts still have to fill and one that each
        # running sequence may soon grow by: else the newcomer would be preempted at once.
        promised = sum(s.table.missing(len(s.tokens)) for s in self.running)
        while self.waiting and len(self.running) < self._max_sequences:
            need = blocks_for(len(self.waiting[0].tokens))
            if need + promised + len(self.running) > self._allocator.n_free:
                return
            promised += need
            sequence = self.waiting.popleft()
            sequence.status = "running"
            self.running.append(sequence)

    def _reserve(self, sequence: Sequence, n_slots: int, preempted: list[Sequence]) -> bool:
        """Reserve slots, preempting younger sequences if need be; False if this one itself had to go."""
        while sequence.table.missing(n_slots) > self._allocator.n_free:
            youngest = self.running[-1]
            self._preempt(youngest)
            preempted.append(youngest)
            if youngest is sequence:
                return False
        sequence.table.reserve(n_slots)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.status = "waiting"
        sequence.n_cached = 0
        sequence.table.truncate(0)
        self.waiting.appendleft(sequence)
