"""Who runs in a pass, with how many rows, and who has to make room."""

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.config import BLOCK_SIZE, SamplingParams
from specdec.history import History
from specdec.kv.blocks import BlockAllocator, BlockTable
from specdec.metrics.stats import Stats
from specdec.scheduler import Scheduler, share
from specdec.types import Sequence


def sequence(allocator: BlockAllocator, id: int, n_prompt: int, n_output: int = 1000) -> Sequence:
    tokens = list(range(n_prompt))
    return Sequence(
        id=id,
        tokens=tokens,
        n_prompt=n_prompt,
        params=SamplingParams(),
        seed=0,
        max_len=n_prompt + n_output,
        end_tokens=frozenset(),
        table=BlockTable(allocator),
        history=History.of(tokens, n_prompt),
        stats=Stats(),
    )


def make(allocator: BlockAllocator, max_sequences: int, rows: int, max_nodes: int, cache=None) -> Scheduler:
    return Scheduler(
        allocator, max_sequences=max_sequences, prompt_rows=lambda decoding: rows, max_nodes=max_nodes, cache=cache
    )


def run(grant) -> None:
    """Pretend that the pass ran and one token came out."""
    s = grant.sequence
    s.n_cached = grant.stop
    if grant.stop == len(s.tokens):
        s.tokens.append(0)
    s.table.truncate(s.n_cached)


def test_prompts_share_the_row_budget_and_decoding_goes_first() -> None:
    """A long prompt is read in pieces and cannot hold up a sequence that is already decoding."""
    allocator = BlockAllocator(64)
    scheduler = make(allocator, 4, 20, 3)
    first, long = sequence(allocator, 0, 5), sequence(allocator, 1, 50)
    scheduler.add(first)
    scheduler.add(long)
    seen = []
    for _ in range(3):
        grants, _ = scheduler.next()
        seen.append([(g.sequence.id, g.start, g.stop, g.nodes) for g in grants])
        for grant in grants:
            run(grant)
    assert seen == [
        [(0, 0, 5, 3), (1, 0, 15, 0)],
        [(0, 5, 6, 3), (1, 15, 35, 0)],
        [(0, 6, 7, 3), (1, 35, 50, 3)],
    ]


def test_drafts_never_outgrow_the_room_left() -> None:
    """With r tokens to go at most r - 1 drafted ones can be used, so no slot past the limit is ever asked for."""
    allocator = BlockAllocator(8)
    scheduler = make(allocator, 1, 64, 8)
    scheduler.add(sequence(allocator, 0, 4, n_output=3))
    nodes = []
    for _ in range(3):
        (grant,), _ = scheduler.next()
        nodes.append(grant.nodes)
        run(grant)
    assert nodes == [2, 1, 0]


def test_the_youngest_makes_room_and_keeps_its_tokens() -> None:
    """Preemption frees the blocks of the youngest, which will be read again from its own tokens."""
    allocator = BlockAllocator(5)
    scheduler = make(allocator, 2, 64, 0)
    old, young = sequence(allocator, 0, 30), sequence(allocator, 1, 15)
    scheduler.add(old)
    scheduler.add(young)
    for _ in range(60):
        grants, preempted = scheduler.next()
        for grant in grants:
            run(grant)
        allocator.check([old.table, young.table])
        if preempted:
            break
    assert preempted == [young]
    assert young.status == "waiting"
    assert young.n_cached == 0
    assert young.table.blocks == []
    assert len(young.tokens) > 15, "its tokens are kept"
    assert [g.sequence for g in grants] == [old]


def test_drafts_preempt_nobody() -> None:
    """A pool that holds both sequences without drafts holds them with drafts: these take only what is left."""
    for max_nodes in (0, 32):
        allocator = BlockAllocator(6)
        scheduler = make(allocator, 2, 100, max_nodes)
        for i in range(2):
            scheduler.add(sequence(allocator, i, 30, n_output=10))
        for _ in range(10):
            grants, preempted = scheduler.next()
            assert not preempted
            assert len(grants) == 2
            for grant in grants:
                run(grant)


@settings(max_examples=60)
@given(
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    n_blocks=st.integers(6, 20),
    rows=st.integers(1, 40),
    nodes=st.integers(0, 9),
)
def test_everything_ends_whatever_the_pool(prompts: list[int], n_blocks: int, rows: int, nodes: int) -> None:
    """No mix of prompts and pool sizes starves a sequence, leaks a block or runs a row without its slots."""
    allocator = BlockAllocator(n_blocks)
    scheduler = make(allocator, 4, rows, nodes)
    sequences = [sequence(allocator, i, n, n_output=n_blocks * BLOCK_SIZE - n) for i, n in enumerate(prompts)]
    for s in sequences:
        s.max_len = min(s.max_len, s.n_prompt + 25)
        scheduler.add(s)
    for _ in range(4000):
        grants, preempted = scheduler.next()
        assert grants or not scheduler.sequences, "somebody waits and nobody runs"
        assert not {id(g.sequence) for g in grants} & {id(s) for s in preempted}
        for grant in grants:
            grant.sequence.table.check_writable(grant.start, grant.stop + grant.nodes)
            run(grant)
            if grant.sequence.room == 0:
                scheduler.remove(grant.sequence)
        allocator.check([s.table for s in sequences])
        if not scheduler.sequences:
            break
    assert all(s.status == "finished" for s in sequences)
    assert allocator.n_used == 0


def test_first_come_first_served() -> None:
    """A short request behind a long one that does not fit yet waits its turn: nobody is overtaken for ever."""
    allocator = BlockAllocator(6)
    scheduler = make(allocator, 4, 200, 0)
    for s in (sequence(allocator, 0, 60), sequence(allocator, 1, 70), sequence(allocator, 2, 5)):
        scheduler.add(s)
    grants, _ = scheduler.next()
    assert [g.sequence.id for g in grants] == [0]


@given(left=st.lists(st.integers(1, 300), max_size=8), rows=st.integers(1, 200))
def test_rows_are_shared_out_entirely(left: list[int], rows: int) -> None:
    """No row is lost while a prompt could use it, none is given twice, and the oldest gets half or all that it needs."""
    granted = share(left, rows)
    assert sum(granted) == min(rows, sum(left))
    assert all(0 <= n <= most for n, most in zip(granted, left, strict=True))
    if left:
        assert granted[0] >= min(left[0], rows / 2)


@settings(max_examples=60)
@given(
    before=st.lists(st.integers(2, 200), max_size=4),
    own=st.integers(2, 200),
    later=st.lists(st.integers(2, 30), min_size=1, max_size=5),
    rows=st.integers(1, 60),
)
def test_the_wait_for_a_prompt_is_bounded(before: list[int], own: int, later: list[int], rows: int) -> None:
    """Short prompts that keep coming do not starve a long one: it is read within the passes that the docs promise."""
    allocator = BlockAllocator(10_000)
    scheduler = make(allocator, 100, rows, 0)
    sequences = [sequence(allocator, i, n) for i, n in enumerate([*before, own])]
    for s in sequences:
        scheduler.add(s)
    bound = 2 * (sum(before) + own) / rows + len(before) + 1
    passes = 0
    while not sequences[-1].n_output:
        passes += 1
        assert passes <= bound
        if passes < 100:
            scheduler.add(sequence(allocator, 100 + passes, later[passes % len(later)]))  # overtakes where it is shorter
        for grant in scheduler.next()[0]:
            run(grant)
            if grant.sequence is not sequences[-1] and grant.sequence.n_output:
                scheduler.remove(grant.sequence)


def test_a_short_prompt_passes_long_ones() -> None:
    """Behind ten long prompts, a short one is read with the half that is not the oldest's: at once, not after them."""
    allocator = BlockAllocator(10_000)
    scheduler = make(allocator, 100, 20, 0)
    for i in range(10):
        scheduler.add(sequence(allocator, i, 500))
    scheduler.next()
    short = sequence(allocator, 10, 9)
    scheduler.add(short)
    grants, _ = scheduler.next()
    assert {g.sequence.id: g.stop - g.start for g in grants} == {0: 10, 10: 9, 1: 1}


def test_rows_of_prompts_depend_on_who_decodes() -> None:
    """The room for prompts is asked for with the number of sequences that decode in the pass, and is never none."""
    allocator = BlockAllocator(100)
    asked = []

    def rows(decoding: int) -> int:
        asked.append(decoding)
        return 4 - 2 * decoding

    scheduler = Scheduler(allocator, max_sequences=9, prompt_rows=rows, max_nodes=0, cache=None)
    for i in range(3):
        scheduler.add(sequence(allocator, i, 4))
    read = []
    for _ in range(7):
        grants, _ = scheduler.next()
        read.append(sum(g.stop - g.start for g in grants if g.sequence.n_output == 0))
        for grant in grants:
            run(grant)
    assert asked == [0, 0, 2, 2, 2], "a last row alone is one that decodes"
    assert read == [4, 4, 1, 1, 1, 1, 0]
