"""The prefix cache against a model that compares tokens, and what must never be found in it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from specdec.config import BLOCK_SIZE, SamplingParams
from specdec.history import History
from specdec.kv.blocks import BlockAllocator, BlockTable, OutOfBlocks
from specdec.kv.prefix import PrefixCache
from specdec.metrics.stats import Stats
from specdec.types import Sequence, TokenLogprob

N_BLOCKS = 10


def sequence(allocator: BlockAllocator, tokens: list[int], salt: str = "", **params) -> Sequence:
    return Sequence(
        id=0,
        tokens=list(tokens),
        n_prompt=len(tokens),
        params=SamplingParams(**params),
        seed=0,
        max_len=1000,
        end_tokens=frozenset(),
        table=BlockTable(allocator),
        history=History.of(tokens, len(tokens)),
        stats=Stats(),
        salt=salt,
    )


def read(cache: PrefixCache, s: Sequence, n: int | None = None) -> None:
    """Pretend that the first n tokens of a sequence ran, all but the pending one by default."""
    s.n_cached = len(s.tokens) - 1 if n is None else n
    s.table.reserve(s.n_cached)
    cache.enter(s)


class Machine(RuleBasedStateMachine):
    """Whatever is read, dropped and evicted: what is found holds exactly these tokens after exactly those before, and
    everything that the pool still has is found."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(N_BLOCKS, self.freed)
        self.cache = PrefixCache(self.allocator)
        self.live: list[Sequence] = []
        self.contents: dict[int, tuple[str, tuple[int, ...]]] = {}  # block -> salt, all tokens up to its end

    def freed(self, blocks) -> None:
        for block in blocks:
            self.contents.pop(block, None)

    # Two tokens and two salts: prefixes meet often.
    @rule(words=st.lists(st.integers(0, 1), min_size=1, max_size=4), extra=st.integers(1, 20), salt=st.sampled_from(["", "a"]))
    def arrive(self, words: list[int], extra: int, salt: str) -> None:
        tokens = [word for word in words for _ in range(BLOCK_SIZE)][: len(words) * BLOCK_SIZE - BLOCK_SIZE + extra]
        s = sequence(self.allocator, tokens, salt)
        found = self.cache.find(s)
        assert len(found) * BLOCK_SIZE < len(tokens), "one token must run"
        for i, block in enumerate(found):
            assert self.contents[block] == (salt, tuple(tokens[: (i + 1) * BLOCK_SIZE]))
        if len(found) < (len(tokens) - 1) // BLOCK_SIZE:
            missing = salt, tuple(tokens[: (len(found) + 1) * BLOCK_SIZE])
            assert missing not in self.contents.values(), "a block that is there was not found"
        s.table.adopt(found)
        s.n_entered = len(found)
        try:
            read(self.cache, s)
        except OutOfBlocks:
            s.table.truncate(0)
            return
        for i in range(s.n_cached // BLOCK_SIZE):
            key = salt, tuple(tokens[: (i + 1) * BLOCK_SIZE])
            if self.allocator.kept(s.table.blocks[i]):
                self.contents[s.table.blocks[i]] = key
        self.live.append(s)

    @rule(index=st.integers(0, 9))
    def end(self, index: int) -> None:
        if self.live:
            self.live.pop(index % len(self.live)).table.truncate(0)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.contents.clear()

    @invariant()
    def agrees(self) -> None:
        self.allocator.check([s.table for s in self.live])
        self.cache.check()
        assert self.cache.n_blocks == len(self.contents)


Machine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestMachine = Machine.TestCase


def test_one_token_is_left_to_run() -> None:
    """A prompt of whole blocks that is known entirely still runs its last block: its last row says what follows."""
    allocator = BlockAllocator(8)
    cache = PrefixCache(allocator)
    tokens = list(range(2 * BLOCK_SIZE))
    read(cache, sequence(allocator, [*tokens, 7]))
    assert cache.n_blocks == 2
    assert len(cache.find(sequence(allocator, tokens))) == 1
    assert len(cache.find(sequence(allocator, [*tokens, 9]))) == 2


def test_salts_are_apart() -> None:
    """Another tenant's blocks are not found, nor those of a salt that ends where the tokens begin."""
    allocator = BlockAllocator(8)
    cache = PrefixCache(allocator)
    tokens = list(range(40))
    read(cache, sequence(allocator, tokens, "a"))
    assert len(cache.find(sequence(allocator, tokens, "a"))) == 2
    for salt in ("", "b", "aa", "a\0"):
        assert cache.find(sequence(allocator, tokens, salt)) == []


def test_only_committed_full_blocks_enter() -> None:
    """Rows past the cached tokens, which may be those of refused drafts, are never found; nor is half a block."""
    allocator = BlockAllocator(8)
    cache = PrefixCache(allocator)
    tokens = list(range(100))
    s = sequence(allocator, tokens)
    s.table.reserve(100)
    s.n_cached = 2 * BLOCK_SIZE - 1
    cache.enter(s)
    assert len(cache.find(sequence(allocator, tokens))) == 1
    s.n_cached += 1
    cache.enter(s)
    assert cache.find(sequence(allocator, tokens)) == s.table.blocks[:2]


def test_the_deepest_block_of_a_prefix_goes_first() -> None:
    """Of an unused prefix the beginning stays findable longest: a chain is of use only from its start."""
    allocator = BlockAllocator(4)
    cache = PrefixCache(allocator)
    tokens = list(range(3 * BLOCK_SIZE + 1))
    s = sequence(allocator, tokens)
    read(cache, s)
    s.table.truncate(0)
    other = BlockTable(allocator)
    for n, left in ((1, 3), (2, 2), (3, 1), (4, 0)):
        other.reserve(n * BLOCK_SIZE)
        assert len(cache.find(sequence(allocator, tokens))) == left


def test_a_prompt_to_be_scored_is_not_reused() -> None:
    """Log-probabilities of a prompt come from its rows, so these must run; once they have, a preempted one may be reused."""
    allocator = BlockAllocator(8)
    cache = PrefixCache(allocator)
    tokens = list(range(40))
    read(cache, sequence(allocator, tokens))
    s = sequence(allocator, tokens, prompt_logprobs=0)
    assert cache.find(s) == []
    assert cache.next_key(s) is None
    s.prompt_logprobs = [TokenLogprob(0, 0.0)] * 39
    assert len(cache.find(s)) == 2


def test_kept_blocks_are_not_writable() -> None:
    """What others may look up is never written again, though only one sequence holds it."""
    allocator = BlockAllocator(8)
    cache = PrefixCache(allocator)
    s = sequence(allocator, list(range(20)))
    read(cache, s)
    s.table.check_writable(BLOCK_SIZE, 20)
    with pytest.raises(AssertionError, match="kept for others"):
        s.table.check_writable(BLOCK_SIZE - 1, 20)
