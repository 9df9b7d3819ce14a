"""The end of a step, one verdict at a time: what is emitted, moved, counted and given back, and what is as it was before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from specdec.commit import Committer
from specdec.config import SamplingParams
from specdec.history import History
from specdec.kv.blocks import BlockAllocator, BlockTable
from specdec.kv.pool import Pool
from specdec.kv.prefix import PrefixCache
from specdec.metrics.stats import Stats
from specdec.sampling import SamplingError
from specdec.types import ROOT, Draft, Sequence, Span, TokenLogprob, Tree, Verdict

PROMPT = list(range(100, 140))  # two blocks and a half
END = 9
# 0 and 1 below the pending token, 2 and 3 below 1, 4 below 3.
TREE = Draft(Tree((1, 2, 3, 4, 5), (ROOT, ROOT, 1, 1, 3)), ("a", "b", "a", "b", "a"))
PATH = (1, 3, 4)


class Stop:
    """Ends at a token, and notes what it was shown."""

    def __init__(self, token: int) -> None:
        self.token, self.seen = token, list[int]()

    def feed(self, token: int) -> bool:
        self.seen.append(token)
        return token == self.token


@pytest.fixture
def world() -> SimpleNamespace:
    """A committer with a pool in which every slot of a sequence holds its own number, and a sequence with its prompt read."""
    allocator = BlockAllocator(16)
    made = SimpleNamespace(
        allocator=allocator,
        pool=Pool(1, 16, 1, 16, torch.float32, torch.device("cpu")),
        cache=PrefixCache(allocator),
        stats=Stats(),
    )
    made.committer = Committer(made.pool, made.cache, made.stats)
    made.row = sequence(made)
    return made


def sequence(world: SimpleNamespace, max_len: int = 100, **params) -> Sequence:
    row = Sequence(
        id=0,
        tokens=list(PROMPT),
        n_prompt=len(PROMPT),
        params=SamplingParams(**params),
        seed=0,
        max_len=max_len,
        end_tokens=frozenset({END}),
        table=BlockTable(world.allocator),
        history=History.of(PROMPT, len(PROMPT)),
        stats=Stats(cached_tokens=16),
        status="running",
    )
    row.table.reserve(64)
    for slot in range(64):
        for part in (*world.pool.key_parts, *world.pool.value_parts):
            part[:, row.table.blocks[slot // 16], slot % 16] = slot
    return row


def slots(world: SimpleNamespace, row: Sequence, first: int, n: int) -> list[int]:
    """What keys and values of some slots hold, which must be the same."""
    found = []
    for slot in range(first, first + n):
        block, place = row.table.blocks[slot // 16], slot % 16
        (number,) = {
            int(x)
            for part in (*world.pool.key_parts, *world.pool.value_parts)
            for x in part[:, block, place].flatten().tolist()
        }
        found.append(number)
    return found


def test_a_prompt_that_goes_on_is_counted_and_kept(world: SimpleNamespace) -> None:
    row = world.row
    assert world.committer.commit(Span(row, 0, 32), None) is None
    assert (row.tokens, row.n_cached) == (PROMPT, 32)
    assert world.cache.n_blocks == 2
    for stats in (world.stats, row.stats):
        assert (stats.prompt_rows, stats.prefill_passes, stats.target_passes, stats.prompt_tokens) == (32, 1, 0, 0)


def test_a_prompt_counts_once_when_it_has_been_read(world: SimpleNamespace) -> None:
    """Its last row is the pending token's and no prompt row; passes that emit are no prefill passes."""
    row = world.row
    world.committer.commit(Span(row, 0, 32), None)
    world.committer.commit(Span(row, 32, 40), Verdict((), 7))
    world.committer.commit(Span(row, 40, 41), Verdict((), 8))
    assert row.tokens[40:] == [7, 8]
    for stats in (world.stats, row.stats):
        assert (stats.prompt_rows, stats.prefill_passes, stats.target_passes) == (39, 1, 2)
        assert (stats.prompt_tokens, stats.cached_tokens) == (40, 16)


def test_an_accepted_path_closes_up_and_the_rest_is_given_back(world: SimpleNamespace) -> None:
    row = world.row
    delta = world.committer.commit(Span(row, 39, 40, TREE), Verdict(PATH, 6))
    assert delta.tokens == (2, 4, 5, 6)
    assert delta.sources == ("b", "b", "a", None)
    assert (delta.finish_reason, delta.stats) == (None, None)
    assert row.tokens == [*PROMPT, 2, 4, 5, 6]
    assert row.history.emitted(())[0].tolist() == [2, 4, 5, 6]
    assert row.n_cached == 43, "the last token is pending"
    assert slots(world, row, 39, 4) == [39, 41, 43, 44]
    assert len(row.table.blocks) == 3
    for stats in (world.stats, row.stats):
        assert (stats.drafted, stats.accepted, stats.emitted) == (5, 3, 4)


def test_blocks_that_a_burst_fills_can_be_found(world: SimpleNamespace) -> None:
    row = world.row
    row.tokens += range(6)
    world.committer.commit(Span(row, 45, 46, TREE), Verdict((1, 3), 6))
    assert row.n_cached == 48
    assert world.cache.n_blocks == 3


@pytest.mark.parametrize("end", ["token", "stopper", "length"])
def test_what_comes_after_an_end_has_never_been(world: SimpleNamespace, end: str) -> None:
    """An end within a burst cuts tokens, sources, log-probabilities, cache and counts; nobody is shown what came after it."""
    row = sequence(world, 42 if end == "length" else 100)
    tokens = (1, 2, 3, END if end == "token" else 4, 5)
    draft = Draft(Tree(tokens, TREE.tree.parents), TREE.sources)
    row.stopper = stopper = Stop(4 if end == "stopper" else 77)
    logprobs = tuple(TokenLogprob(token, -1.0) for token in (2, tokens[3], 5, 6))
    delta = world.committer.commit(Span(row, 39, 40, draft), Verdict(PATH, 6, logprobs))
    assert delta.finish_reason == ("length" if end == "length" else "stop")
    assert delta.tokens == (2, tokens[3])
    assert delta.sources == ("b", "b")
    assert delta.logprobs == logprobs[:2]
    assert delta.stats is row.stats
    assert row.tokens == [*PROMPT, 2, tokens[3]]
    assert row.n_cached == 41
    assert stopper.seen == ([2] if end == "token" else [2, 4])
    assert (row.stats.accepted, row.stats.emitted) == (2, 2)


def test_scores_of_the_prompt_come_with_the_first_tokens_and_only_then(world: SimpleNamespace) -> None:
    row = sequence(world, prompt_logprobs=0)
    row.prompt_logprobs = [TokenLogprob(token, -1.0) for token in PROMPT[1:]]
    first = world.committer.commit(Span(row, 39, 40, TREE), Verdict(PATH, 6))
    second = world.committer.commit(Span(row, 43, 44), Verdict((), 7))
    assert first.prompt_logprobs == tuple(row.prompt_logprobs)
    assert second.prompt_logprobs is None
    assert world.committer.commit(Span(sequence(world), 39, 40), Verdict((), 7)).prompt_logprobs is None


def test_an_error_ends_the_sequence_and_commits_nothing(world: SimpleNamespace) -> None:
    row = world.row
    delta = world.committer.commit(Span(row, 39, 40, TREE), SamplingError("damaged"))
    assert (delta.finish_reason, delta.error, delta.tokens) == ("error", "damaged", ())
    assert delta.stats is row.stats
    assert row.tokens == PROMPT
    assert row.stats.target_passes == 0


def test_without_a_prefix_cache_there_is_nobody_to_tell(world: SimpleNamespace) -> None:
    committer = Committer(world.pool, None, world.stats)
    assert committer.commit(Span(world.row, 0, 32), None) is None
    assert committer.commit(Span(world.row, 32, 40), Verdict((), 7)).tokens == (7,)
    assert world.cache.n_blocks == 0
