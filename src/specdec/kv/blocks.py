"""Who owns which block of the pool: integers only, the storage itself is in ``pool.py``.

A block is *held* by as many tables as its reference count says, or *idle*: nobody holds it but what it contains is kept for
whoever may want it, or *empty*. Empty blocks are handed out first, then idle ones, longest unused first. A table covers
slots ``0 .. len(blocks) * 16``; rollback is dropping the blocks past a length, whatever they hold, so its cost does not
depend on the context.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from specdec.config import BLOCK_SIZE


class OutOfBlocks(RuntimeError):
    """The pool cannot give what was asked for; nothing was taken."""


def blocks_for(n_slots: int) -> int:
    """Blocks that cover ``n_slots`` slots."""
    return -(-n_slots // BLOCK_SIZE)


class BlockAllocator:
    """Hands out the blocks of one pool and counts who holds them."""

    def __init__(self, n_blocks: int, on_free: Callable[[Sequence[int]], None] | None = None) -> None:
        self.n_blocks = n_blocks
        self.on_free = on_free
        """Called with blocks whose contents nobody will read again; tests poison them."""
        self.on_evict: Callable[[int], None] | None = None
        """Called with a kept block that is about to be handed out for something else."""
        self._refs = [0] * n_blocks
        self._kept = [False] * n_blocks
        # Last freed, first reused: the working set of a small load stays small.
        self._empty = list(range(n_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Kept blocks that nobody holds, longest unused first."""

    @property
    def n_free(self) -> int:
        """Blocks that can be taken: empty and idle ones."""
        return len(self._empty) + len(self._idle)

    @property
    def n_idle(self) -> int:
        return len(self._idle)

    @property
    def n_used(self) -> int:
        """Blocks that tables hold."""
        return self.n_blocks - self.n_free

    def references(self, block: int) -> int:
        return self._refs[block]

    def kept(self, block: int) -> bool:
        """Are the contents kept when nobody holds the block?"""
        return self._kept[block]

    def take(self, n: int) -> list[int]:
        """All of ``n`` blocks or none.

        Raises:
            OutOfBlocks: fewer than ``n`` are free.
        """
        if n > self.n_free:
            raise OutOfBlocks(f"{n} blocks of {BLOCK_SIZE} tokens wanted, {self.n_free} of {self.n_blocks} are free")
        if n == 0:
            return []
        while n > len(self._empty):
            block = next(iter(self._idle))
            if self.on_evict is not None:
                self.on_evict(block)
            self.discard(block)
        taken = self._empty[-n:][::-1]
        del self._empty[-n:]
        for block in taken:
            self._refs[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of these blocks, which are held or idle."""
        for block in blocks:
            if self._refs[block] == 0 and block not in self._idle:
                raise ValueError(f"block {block} is free and cannot be shared")
        for block in blocks:
            self._idle.pop(block, None)
            self._refs[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """One holder fewer for each of these blocks; those without a holder become idle or empty.

        Of blocks that are dropped together the last ones count as longest unused: they are of use only after the others.
        """
        freed = []
        for block in reversed(blocks):
            if self._refs[block] == 0:
                raise ValueError(f"block {block} is freed twice")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._kept[block]:
                    self._idle[block] = None
                else:
                    freed.append(block)
        self._release(freed)

    def keep(self, block: int) -> None:
        """From now on the contents of a held block stay when it is dropped, for as long as there is room."""
        if self._refs[block] == 0:
            raise ValueError(f"block {block} is held by nobody, so it has no contents to keep")
        self._kept[block] = True

    def discard(self, block: int) -> None:
        """Keep the contents of a block no longer than it is held."""
        self._kept[block] = False
        if block in self._idle:
            del self._idle[block]
            self._release([block])

    def _release(self, freed: list[int]) -> None:
        self._empty.extend(freed)
        if freed and self.on_free is not None:
            self.on_free(freed)

    def check(self, tables: Sequence[BlockTable]) -> None:
        """Raise AssertionError unless the counts are exactly what these tables hold (every table must be given)."""
        held = [0] * self.n_blocks
        for table in tables:
            for block in table.blocks:
                held[block] += 1
        if held != self._refs:
            wrong = [b for b in range(self.n_blocks) if held[b] != self._refs[b]]
            raise AssertionError(f"blocks {wrong[:8]} have reference counts that no table accounts for")
        if sorted(self._empty) != [b for b in range(self.n_blocks) if held[b] == 0 and not self._kept[b]]:
            raise AssertionError("the empty blocks are not those that nobody holds and whose contents are not kept")
        if sorted(self._idle) != [b for b in range(self.n_blocks) if held[b] == 0 and self._kept[b]]:
            raise AssertionError("the idle blocks are not those that nobody holds and whose contents are kept")


class BlockTable:
    """The blocks of one sequence, in order of its slots."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self.blocks: list[int] = []

    @property
    def n_slots(self) -> int:
        return len(self.blocks) * BLOCK_SIZE

    def missing(self, n_slots: int) -> int:
        """Blocks that ``reserve(n_slots)`` would take."""
        return max(0, blocks_for(n_slots) - len(self.blocks))

    def reserve(self, n_slots: int) -> None:
        """Grow to at least ``n_slots`` slots, wholly or not at all.

        Raises:
            OutOfBlocks: the pool has too few free blocks; the table is unchanged.
        """
        if n := self.missing(n_slots):
            self.blocks += self._allocator.take(n)

    def truncate(self, n_slots: int) -> None:
        """Give back the blocks past the first ``n_slots`` slots."""
        keep = blocks_for(n_slots)
        if keep < len(self.blocks):
            dropped = self.blocks[keep:]
            del self.blocks[keep:]
            self._allocator.drop(dropped)

    def adopt(self, blocks: Sequence[int]) -> None:
        """Go on with blocks that exist: held by others, or idle."""
        self._allocator.share(blocks)
        self.blocks += blocks

    def share(self, n_slots: int) -> BlockTable:
        """A new table that begins with this one's first ``n_slots`` slots.

        Only whole blocks can be shared: a block with two holders is never written again.

        Raises:
            ValueError: ``n_slots`` is not a multiple of the block size, or exceeds this table.
        """
        if n_slots % BLOCK_SIZE or n_slots > self.n_slots:
            raise ValueError(f"only whole blocks of this table's {self.n_slots} slots can be shared, not {n_slots} slots")
        other = BlockTable(self._allocator)
        other.adopt(self.blocks[: n_slots // BLOCK_SIZE])
        return other

    def check_writable(self, start: int, stop: int) -> None:
        """Raise AssertionError unless slots ``[start, stop)`` are covered, by blocks that nobody else holds or will look up."""
        if stop > self.n_slots:
            raise AssertionError(f"slots up to {stop} are to be written, the table covers {self.n_slots}")
        for block in self.blocks[start // BLOCK_SIZE : blocks_for(stop)]:
            if self._allocator.references(block) != 1:
                raise AssertionError(f"block {block} is to be written but has {self._allocator.references(block)} holders")
            if self._allocator.kept(block):
                raise AssertionError(f"block {block} is to be written but its contents are kept for others")
