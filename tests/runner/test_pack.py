"""From a step to tensors: slots, positions and the list of slots that each row sees."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.config import SamplingParams
from specdec.history import History
from specdec.kv.blocks import BlockAllocator, BlockTable
from specdec.metrics.stats import Stats
from specdec.models.base import Batch
from specdec.runner.pack import lay_out
from specdec.types import ROOT, Draft, Sequence, Span, Step, TokenLogprob, Tree


def sequence(allocator: BlockAllocator, tokens: list[int]) -> Sequence:
    table = BlockTable(allocator)
    table.reserve(len(tokens) + 16)
    n = len(tokens)
    return Sequence(0, tokens, n, SamplingParams(), 0, 100, frozenset(), table, History.of(tokens, n), Stats())


def pack(step: Step) -> tuple[Batch, tuple[slice, ...], tuple[slice, ...]]:
    lines, verified, scoring = lay_out(step)
    return Batch.of(lines.pack(), torch.device("cpu")), verified, scoring


@st.composite
def trees(draw) -> Tree:
    n = draw(st.integers(0, 12))
    parents = tuple(draw(st.integers(ROOT, i - 1)) for i in range(n))
    return Tree(tuple(range(100, 100 + n)), parents)  # distinct tokens, so siblings differ


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 39), trees()), min_size=1, max_size=4))
def test_every_row_sees_exactly_its_own_past(shapes) -> None:
    """Reading the slots that a row lists gives the tokens of its own sequence and path, in order, and nothing else."""
    allocator = BlockAllocator(64)
    spans, contexts = [], []
    for n_tokens, start, tree in shapes:
        start = min(start, n_tokens - 1)
        s = sequence(allocator, list(range(n_tokens)))
        spans.append(Span(s, start, n_tokens, Draft(tree, ("x",) * len(tree))))
        contexts += [s.tokens[: i + 1] for i in range(start, n_tokens)]
        for node in range(len(tree)):
            path, at = [], node
            while at != ROOT:
                path.append(tree.tokens[at])
                at = tree.parents[at]
            contexts.append(s.tokens + path[::-1])
    batch, rows, _ = pack(Step(tuple(spans)))
    r = batch.rows

    # Pretend that all keys are token ids: first what earlier passes left, then what this one writes.
    store = {}
    for index, span in enumerate(spans):
        for position in range(span.start):
            store[index, position] = span.sequence.tokens[position]
    for i in range(len(r)):
        store[int(r.sequence[i]), int(r.slot[i])] = int(batch.tokens[i])
    for i, context in enumerate(contexts):
        owner = int(r.sequence[i])
        slots = [*range(int(r.prefix[i])), *r.path[i, : int(r.n_path[i])].tolist()]
        assert [store[owner, slot] for slot in slots] == context
        assert slots[-1] == int(r.slot[i]), "a row sees itself last"
        assert int(batch.positions[i]) == len(context) - 1
        assert int(batch.lengths[i]) == max(spans[owner].sequence.n_prompt, len(context))
    wanted = [batch.tokens[w].tolist() for w in (batch.wanted[s] for s in rows)]
    assert wanted == [[span.sequence.tokens[-1], *span.draft.tree.tokens] for span in spans]


def test_rows_that_score_a_prompt_are_wanted_once() -> None:
    """The row before each prompt token is wanted when it first runs, not when the prompt is read again."""
    s = sequence(BlockAllocator(8), list(range(20)))
    s.params = SamplingParams(prompt_logprobs=0)
    for start, stop, scored in ((0, 8, range(1, 9)), (8, 20, range(9, 20))):
        batch, rows, scoring = pack(Step((Span(s, start, stop),)))
        assert (batch.wanted[scoring[0]] + start + 1).tolist() == list(scored)
        assert (batch.wanted[rows[0]] + start).tolist() == ([19] if stop == 20 else [])
        s.prompt_logprobs += [TokenLogprob(0, 0.0)] * len(scored)
    batch, rows, scoring = pack(Step((Span(s, 0, 20),)))
    assert len(batch.wanted) == 1


def test_an_unfinished_prompt_wants_no_logits() -> None:
    """Rows of a prompt that goes on later cost no output head."""
    s = sequence(BlockAllocator(8), list(range(20)))
    batch, rows, _ = pack(Step((Span(s, 0, 8),)))
    assert batch.wanted.numel() == 0
    assert rows == (slice(0, 0),)
    assert batch.rows.path.shape == (8, 0)
