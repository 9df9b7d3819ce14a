"""The prefix cache: full blocks of committed tokens, found again by what they hold and all that stands before them.

A block's key is a hash of its sixteen tokens and of the key of the block before it; the first one's begins with the salt.
So one look-up answers for the whole prefix, and sequences of different salts never meet. A key has 256 bits: that two
prefixes share one is not going to happen, by accident or by design. A cache belongs to one pool of one model, so what rows
are held in is the same for all of its blocks and enters no key.

Only full blocks of committed tokens enter, whose keys and values will not be written again; never rows of a draft. What a
block holds stays when its sequence ends, until its room is needed: the longest unused goes first, and of one sequence the
deepest first, so that what is left of a prefix can be found.
"""

from __future__ import annotations

import hashlib
from array import array

from specdec.config import BLOCK_SIZE
from specdec.kv.blocks import BlockAllocator
from specdec.types import Sequence


class PrefixCache:
    """Finds blocks of an allocator by what they hold."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        allocator.on_evict = self._forget

    @property
    def n_blocks(self) -> int:
        """Blocks that can be found."""
        return len(self._blocks)

    def find(self, sequence: Sequence) -> list[int]:
        """The blocks that hold the longest known prefix of a sequence.

        They cover less than all of its tokens, since the last one must run to tell what follows it. A sequence whose
        prompt is still to be scored finds nothing: its rows must run.
        """
        found: list[int] = []
        if not self._blocks:
            return found
        for i in range(_reusable(sequence)):
            block = self._blocks.get(_key(sequence, i))
            if block is None:
                break
            found.append(block)
        return found

    def next_key(self, sequence: Sequence) -> bytes | None:
        """The key of the block that a sequence will read next; None where it could not be reused anyway."""
        index = sequence.n_cached // BLOCK_SIZE
        return _key(sequence, index) if index < _reusable(sequence) else None

    def enter(self, sequence: Sequence) -> None:
        """Make the full blocks of a sequence's cached tokens known, where no other block holds the same already."""
        for i in range(sequence.n_entered, sequence.n_cached // BLOCK_SIZE):
            key, block = _key(sequence, i), sequence.table.blocks[i]
            if key not in self._blocks:
                self._blocks[key] = block
                self._keys[block] = key
                self._allocator.keep(block)
        sequence.n_entered = sequence.n_cached // BLOCK_SIZE

    def clear(self) -> None:
        """Forget everything; blocks that sequences hold stay theirs."""
        for block in self._keys:
            self._allocator.discard(block)
        self._blocks.clear()
        self._keys.clear()

    def check(self) -> None:
        """Raise AssertionError unless keys and blocks name each other and exactly the known blocks are kept."""
        if {key: block for block, key in self._keys.items()} != self._blocks:
            raise AssertionError("keys and blocks of the prefix cache do not name each other")
        if wrong := [b for b in range(self._allocator.n_blocks) if self._allocator.kept(b) != (b in self._keys)]:
            raise AssertionError(f"blocks {wrong[:8]} are kept but not known, or known but not kept")

    def _forget(self, block: int) -> None:
        del self._blocks[self._keys.pop(block)]


def _reusable(sequence: Sequence) -> int:
    """Leading blocks that a sequence could do without computing."""
    if sequence.params.prompt_logprobs is not None and len(sequence.prompt_logprobs) < sequence.n_prompt - 1:
        return 0
    return (len(sequence.tokens) - 1) // BLOCK_SIZE


def _key(sequence: Sequence, index: int) -> bytes:
    """The key of a sequence's index-th block, which is full of committed tokens."""
    keys = sequence.block_keys
    while len(keys) <= index:
        before = keys[-1] if keys else hashlib.sha256(sequence.salt.encode("utf-8", "surrogatepass")).digest()
        tokens = sequence.tokens[len(keys) * BLOCK_SIZE : (len(keys) + 1) * BLOCK_SIZE]
        keys.append(hashlib.sha256(before + array("q", tokens).tobytes()).digest())
    return keys[index]
