"""The block allocator against a model made of plain lists: who holds what, what is kept, and what goes first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from specdec.config import BLOCK_SIZE
from specdec.kv.blocks import BlockAllocator, BlockTable, OutOfBlocks, blocks_for

N_BLOCKS = 12


class Machine(RuleBasedStateMachine):
    """Any order of growing, truncating, sharing, keeping and dropping keeps every count right, never hands a block to two
    writers, and hands out a kept one only when no empty one is left, the longest unused first."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.allocator = BlockAllocator(N_BLOCKS, self.freed.extend)
        self.tables: list[BlockTable] = [BlockTable(self.allocator)]
        self.model: list[list[int]] = [[]]
        self.kept: set[int] = set()
        self.idle: list[int] = []  # longest unused first
        self.evicted: list[int] = []
        self.allocator.on_evict = self.evicted.append

    def _pick(self, index: int) -> int:
        return index % len(self.tables)

    @rule(index=st.integers(0, 9), n_slots=st.integers(0, 80))
    def reserve(self, index: int, n_slots: int) -> None:
        index = self._pick(index)
        table, before = self.tables[index], list(self.tables[index].blocks)
        held = {b for blocks in self.model for b in blocks}
        self.evicted.clear()
        try:
            table.reserve(n_slots)
        except OutOfBlocks:
            assert blocks_for(n_slots) - len(before) > N_BLOCKS - len(held)
            assert table.blocks == before, "a refused reservation takes nothing"
        else:
            new = table.blocks[len(before) :]
            assert table.blocks[: len(before)] == before
            assert not set(new) & held, "a block that is held was handed out again"
            assert len(table.blocks) == max(len(before), blocks_for(n_slots))
            gone = max(0, len(new) - (N_BLOCKS - len(held) - len(self.idle)))
            assert self.evicted == self.idle[:gone], "kept blocks go last, and the longest unused of them first"
            del self.idle[:gone]
            self.kept -= set(self.evicted)
            self.model[index] = list(table.blocks)

    @rule(index=st.integers(0, 9), n_slots=st.integers(0, 80))
    def truncate(self, index: int, n_slots: int) -> None:
        index = self._pick(index)
        self.freed.clear()
        dropped = self.model[index][blocks_for(n_slots) :]
        self.tables[index].truncate(n_slots)
        self.model[index] = self.model[index][: blocks_for(n_slots)]
        still = {b for blocks in self.model for b in blocks}
        unheld = [b for b in dropped if b not in still]
        assert sorted(self.freed) == sorted(set(unheld) - self.kept), "freed exactly what nobody holds or keeps any more"
        self.idle += [b for b in reversed(unheld) if b in self.kept]

    @rule(index=st.integers(0, 9), at=st.integers(0, 6))
    def keep(self, index: int, at: int) -> None:
        blocks = self.model[self._pick(index)]
        if at < len(blocks):
            self.allocator.keep(blocks[at])
            self.kept.add(blocks[at])

    @rule(at=st.integers(0, N_BLOCKS - 1))
    def discard(self, at: int) -> None:
        if at in self.kept:
            self.freed.clear()
            self.allocator.discard(at)
            self.kept.discard(at)
            assert self.freed == ([at] if at in self.idle else [])
            self.idle = [b for b in self.idle if b != at]

    @rule(index=st.integers(0, 9), n=st.integers(1, 3))
    def adopt(self, index: int, n: int) -> None:
        index = self._pick(index)
        found = self.idle[:n]
        self.tables[index].adopt(found)
        self.model[index] = self.model[index] + found
        del self.idle[:n]

    @rule(index=st.integers(0, 9), n_blocks=st.integers(0, 6))
    def share(self, index: int, n_blocks: int) -> None:
        index = self._pick(index)
        if n_blocks > len(self.model[index]) or len(self.tables) >= 6:
            return
        self.tables.append(self.tables[index].share(n_blocks * BLOCK_SIZE))
        self.model.append(self.model[index][:n_blocks])

    @invariant()
    def agrees(self) -> None:
        assert [t.blocks for t in self.tables] == self.model
        self.allocator.check(self.tables)
        assert self.allocator.n_used == len({b for blocks in self.model for b in blocks})
        assert self.allocator.n_idle == len(self.idle)
        assert [b for b in range(N_BLOCKS) if self.allocator.kept(b)] == sorted(self.kept)


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestMachine = Machine.TestCase


def test_a_reservation_is_whole_or_nothing() -> None:
    """A pass must never start with some of its slots: the refused table is as it was."""
    allocator = BlockAllocator(2)
    table = BlockTable(allocator)
    table.reserve(BLOCK_SIZE)
    with pytest.raises(OutOfBlocks, match="2 blocks of 16 tokens wanted, 1 of 2 are free"):
        table.reserve(3 * BLOCK_SIZE)
    assert len(table.blocks) == 1
    assert allocator.n_free == 1


def test_freeing_twice_is_an_error() -> None:
    """A double free would give one block to two sequences."""
    allocator = BlockAllocator(2)
    blocks = allocator.take(1)
    allocator.drop(blocks)
    with pytest.raises(ValueError, match="freed twice"):
        allocator.drop(blocks)
    with pytest.raises(ValueError, match="free and cannot be shared"):
        allocator.share(blocks)


def test_shared_blocks_are_not_writable() -> None:
    """Writing into a block that another sequence reads would change that sequence's answer."""
    allocator = BlockAllocator(4)
    table = BlockTable(allocator)
    table.reserve(3 * BLOCK_SIZE)
    other = table.share(2 * BLOCK_SIZE)
    other.reserve(3 * BLOCK_SIZE)
    other.check_writable(2 * BLOCK_SIZE, 3 * BLOCK_SIZE)
    with pytest.raises(AssertionError, match="2 holders"):
        other.check_writable(2 * BLOCK_SIZE - 1, 3 * BLOCK_SIZE)
    with pytest.raises(AssertionError, match="covers 48"):
        table.check_writable(40, 49)
    with pytest.raises(ValueError, match="whole blocks"):
        table.share(BLOCK_SIZE + 1)


def test_check_sees_a_leak() -> None:
    """The check that guards the engine's tests must itself notice a block that no table holds."""
    allocator = BlockAllocator(3)
    allocator.take(1)
    with pytest.raises(AssertionError, match="no table accounts for"):
        allocator.check([])
