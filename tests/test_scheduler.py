"""Who runs in a pass, with how many rows, and who has to make room."""

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.config import BLOCK_SIZE, SamplingParams
from specdec.kv.blocks import BlockAllocator, BlockTable
from specdec.metrics.stats import Stats
from specdec.sampling import History
from specdec.scheduler import Scheduler
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
    scheduler = Scheduler(allocator, max_sequences=4, prefill_rows=20, max_nodes=3)
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
    scheduler = Scheduler(allocator, max_sequences=1, prefill_rows=64, max_nodes=8)
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
    scheduler = Scheduler(allocator, max_sequences=2, prefill_rows=64, max_nodes=0)
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
        scheduler = Scheduler(allocator, max_sequences=2, prefill_rows=100, max_nodes=max_nodes)
        for i in range(2):
            scheduler.add(sequence(allocator, i, 30, n_output=10))
        for _ in range(10):
            grants, preempted = scheduler.next()
            assert not preempted
            assert len(grants) == 2
            for grant in grants:
                run(grant)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    n_blocks=st.integers(6, 20),
    rows=st.integers(1, 40),
    nodes=st.integers(0, 9),
)
def test_everything_ends_whatever_the_pool(prompts: list[int], n_blocks: int, rows: int, nodes: int) -> None:
    """No mix of prompts and pool sizes starves a sequence, leaks a block or runs a row without its slots."""
    allocator = BlockAllocator(n_blocks)
    scheduler = Scheduler(allocator, max_sequences=4, prefill_rows=rows, max_nodes=nodes)
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
    scheduler = Scheduler(allocator, max_sequences=4, prefill_rows=200, max_nodes=0)
    for s in (sequence(allocator, 0, 60), sequence(allocator, 1, 70), sequence(allocator, 2, 5)):
        scheduler.add(s)
    grants, _ = scheduler.next()
    assert [g.sequence.id for g in grants] == [0]
