"""Token recycling: what enters the successor matrix, in which order, and which nodes are drafted from it."""

from __future__ import annotations

import random
import time

import pytest
import torch
from drafting import paths, propose, run_pass, sequence, walk

from specdec.config import SpeculationConfig
from specdec.draft import recycling
from specdec.draft.recycling import RecyclingDrafter
from specdec.types import Draft, Forward, Sequence, Span, Step, Tree, Verdict

V, K = 12, 3


def top(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = torch.sort(logits, descending=True, stable=True)
    return values[:, :k], ids[:, :k]


def rows(*best: tuple[int, ...]) -> torch.Tensor:
    """Logits [W, V] whose best tokens are the given ones, in order."""
    logits = torch.full((len(best), V), -9.0)
    for row, tokens in zip(logits, best, strict=True):
        for rank, token in enumerate(tokens):
            row[token] = -float(rank)
    return logits


def drafter(nodes: int = 4, min_probability: float = 0.25) -> RecyclingDrafter:
    config = SpeculationConfig(recycling_successors=K, recycling_nodes=nodes, recycling_min_probability=min_probability)
    return RecyclingDrafter(config, V, top)


def salted(tokens: list[int], salt: str) -> Sequence:
    row = sequence(tokens)
    row.salt = salt
    return row


def chain(*tokens: int) -> Draft:
    return Draft(Tree(tokens, tuple(range(-1, len(tokens) - 1))), ("test",) * len(tokens))


def test_every_verified_row_is_remembered_accepted_or_not() -> None:
    recycler, row = drafter(), sequence([5, 1])
    draft = Draft(Tree((2, 3, 4), (-1, 0, -1)), ("test",) * 3)
    assert run_pass(recycler, row, draft, [2, 9], rows((2, 4, 6), (9, 1, 0), (7, 8, 9), (10, 11, 0))) == 2
    remembered = {token: recycler.successors(token) for token in range(V)}
    assert remembered.pop(1) == [2, 4, 6]  # the pending token
    assert remembered.pop(2) == [9, 1, 0]  # accepted
    assert remembered.pop(3) == [7, 8, 9]  # below the accepted one
    assert remembered.pop(4) == [10, 11, 0]  # a refused sibling
    assert all(row == [-1] * K for row in remembered.values())


def test_of_several_rows_of_a_token_the_last_in_the_pass_wins() -> None:
    recycler = drafter()
    run_pass(recycler, sequence([3]), chain(3, 4, 3), [9], rows((1, 2, 4), (5, 6, 7), (0, 1, 2), (8, 9, 10)))
    assert recycler.successors(3) == [8, 9, 10]
    run_pass(recycler, sequence([3]), Draft(), [9], rows((2, 1, 0)))
    assert recycler.successors(3) == [2, 1, 0]


def test_rows_of_a_batch_go_to_their_own_tokens_and_unverified_ones_are_passed_over() -> None:
    """A prompt that goes on has no rows; a sequence that failed has rows that nobody verified."""
    recycler = drafter()
    first, prompt, failed, last = sequence([1, 2]), sequence([9] * 20), sequence([1, 7]), sequence([1, 4])
    step = Step((Span(first, 1, 2, chain(3)), Span(prompt, 0, 8), Span(failed, 1, 2), Span(last, 1, 2)))
    first.tokens.append(0)
    last.tokens.append(0)
    logits = rows((1, 2, 3), (2, 3, 4), (0, 1, 2), (3, 4, 5))
    logits[2] = float("nan")
    forward = Forward(logits, (slice(0, 2), slice(2, 2), slice(2, 3), slice(3, 4)))
    recycler.observe(step, forward, [Verdict((), 0), None, None, Verdict((), 0)])
    known = {token: recycler.successors(token) for token in range(V) if recycler.successors(token)[0] >= 0}
    assert known == {2: [1, 2, 3], 3: [2, 3, 4], 4: [3, 4, 5]}


class Model:
    """The estimates by the formula of the docstring, with dictionaries."""

    def __init__(self) -> None:
        self.successors: dict[int, list[int]] = {}
        self.hits: dict[tuple[int, int], float] = {}
        self.tries: dict[int, float] = {}
        self.rank_hits = {
            (d, r): recycling._RANK_WEIGHT * recycling._RANK_PRIOR[min(r, 2)]
            for d in range(recycling._DEPTHS)
            for r in range(K)
        }
        self.rank_tries = dict.fromkeys(range(recycling._DEPTHS), recycling._RANK_WEIGHT)

    def chance(self, token: int, rank: int, depth: int) -> float:
        d, w = min(depth, recycling._DEPTHS - 1), recycling._TOKEN_WEIGHT
        weight = w / self.rank_tries[d]  # multiplied in the order of the original, so that ties are the same ties
        return (self.hits.get((token, rank), 0.0) + weight * self.rank_hits[d, rank]) / (self.tries.get(token, 0.0) + w)

    def tree(self, pending: int, limit: int, min_probability: float, end: int) -> list[tuple[tuple[int, ...], float]]:
        found: list[tuple[tuple[int, ...], float]] = []
        frontier: list[tuple[tuple[int, ...], float]] = []
        path, probability = (), 1.0
        while len(found) < limit:
            token = path[-1] if path else pending
            if token != end:
                for rank, successor in enumerate(self.successors.get(token, [])):
                    p = probability * self.chance(token, rank, len(path))
                    if p >= min_probability:
                        frontier.append(((*path, successor), p))
            if not frontier:
                break
            path, probability = max(frontier, key=lambda item: item[1])
            frontier.remove((path, probability))
            found.append((path, probability))
        return found

    def learn(self, pending: int, tree: Tree, emitted: list[int], best: list[tuple[int, ...]]) -> None:
        token = pending
        for depth, after in enumerate(emitted):
            d = min(depth, recycling._DEPTHS - 1)
            if token in self.successors:
                if self.tries.get(token, 0) >= recycling._MEMORY:
                    self.tries[token] /= 2
                    for rank in range(K):
                        self.hits[token, rank] = self.hits.get((token, rank), 0.0) / 2
                self.tries[token] = self.tries.get(token, 0) + 1
                self.rank_tries[d] += 1
                if after in self.successors[token]:
                    rank = self.successors[token].index(after)
                    self.hits[token, rank] = self.hits.get((token, rank), 0) + 1
                    self.rank_hits[d, rank] += 1
            token = after
        for token, tokens in zip([pending, *tree.tokens], best, strict=True):
            self.successors[token] = list(tokens)


@pytest.mark.parametrize("seed", range(12))
def test_drafts_and_estimates_follow_the_formula(seed: int) -> None:
    """Against a plain implementation, over random passes on a few tokens, so that counts grow and are halved."""
    dice = random.Random(seed)
    nodes, min_probability, end = dice.randint(1, 6), dice.choice([0.02, 0.1, 0.25]), 3
    recycler, model = drafter(nodes, min_probability), Model()
    row = sequence([0], end_tokens=[end])
    drafted = 0
    for _ in range(100):
        draft = propose(recycler, row, 5)
        drafted += len(draft)
        expected = model.tree(row.tokens[-1], min(nodes, 5), min_probability, end)
        assert paths(draft.tree) == [path for path, _ in expected]
        assert draft.estimates == tuple(p for _, p in expected)
        wanted = dice.choices(range(4), weights=[8, 2, 2, 1], k=6)
        best = [tuple(dice.sample(range(4), K)) for _ in range(1 + len(draft))]
        pending, emitted = row.tokens[-1], wanted[: len(walk(draft.tree, wanted[:-1])) + 1]
        run_pass(recycler, row, draft, wanted, rows(*best))
        model.learn(pending, draft.tree, emitted, best)
    assert drafted > 20
    assert len(row.tokens) > 2 * recycling._MEMORY


def test_a_successor_that_proves_right_is_drafted_and_one_that_proves_wrong_is_not() -> None:
    """In a cycle 1 2 3 drafts reach the full number of nodes; when the text turns random, they stop."""
    recycler, row = drafter(), sequence([1])
    following = {1: 2, 2: 3, 3: 1}

    def continuation(token: int, n: int) -> list[int]:
        out: list[int] = []
        for _ in range(n):
            token = following[token]
            out.append(token)
        return out

    for _ in range(12):
        draft = propose(recycler, row, 8)
        logits = rows(*((following[token], 8, 9) for token in (row.tokens[-1], *draft.tree.tokens)))
        run_pass(recycler, row, draft, continuation(row.tokens[-1], 6), logits)
    assert list(propose(recycler, row, 8).tree.tokens) == continuation(row.tokens[-1], 4)
    for _ in range(60):
        row.tokens.append(1)
        run_pass(recycler, row, propose(recycler, row, 8), [7], rows(*[(2, 8, 9)] * (1 + len(propose(recycler, row, 8)))))
    row.tokens.append(1)
    assert len(propose(recycler, row, 8)) == 0


def test_nothing_is_drafted_before_anything_was_seen_nor_without_a_budget() -> None:
    recycler = drafter(min_probability=0.01)
    assert len(propose(recycler, sequence([1]), 8)) == 0
    run_pass(recycler, sequence([1]), Draft(), [2], rows((2, 3, 4)))
    assert len(propose(recycler, sequence([1]), 0)) == 0
    assert paths(propose(recycler, sequence([1]), 8).tree) == [(2,), (3,), (4,)]


def test_nothing_is_drafted_after_an_end_token() -> None:
    recycler = drafter(min_probability=0.01)
    run_pass(recycler, sequence([1]), chain(2), [2, 3], rows((2, 3, 4), (5, 6, 7)))
    with_end = propose(recycler, sequence([1], end_tokens=[2]), 8)
    assert paths(with_end.tree) == [(2,), (3,), (4,)]
    assert (2, 5) in paths(propose(recycler, sequence([1]), 8).tree)


def test_what_one_request_taught_helps_the_next_until_it_is_cleared() -> None:
    recycler = drafter(min_probability=0.01)
    first = sequence([1], number=1)
    run_pass(recycler, first, Draft(), [2], rows((2, 3, 4)))
    recycler.release(first)
    assert len(propose(recycler, sequence([1], number=2), 8)) == 3
    recycler.clear()
    assert len(propose(recycler, sequence([1], number=2), 8)) == 0


def test_memory_is_that_of_the_matrices_however_many_requests_came() -> None:
    recycler = drafter()
    for number in range(1000):
        row = sequence([number % V], number=number)
        run_pass(recycler, row, propose(recycler, row, 4), [0], rows(*[(1, 2, 3)] * 5)[: 1 + len(propose(recycler, row, 4))])
        recycler.release(row)
    assert recycler.n_bytes == recycling._ROWS * (K * 4 + K * 4 + 4)


def test_requests_of_another_salt_learn_nothing_from_it() -> None:
    """How fast an answer comes tells nobody what those of other salts were given; memory does not grow with their number."""
    recycler = drafter(min_probability=0.01)
    run_pass(recycler, salted([1], "a"), Draft(), [2], rows((2, 3, 4)))
    assert [len(propose(recycler, salted([1], salt), 8)) for salt in ("b", "", "a")] == [0, 0, 3]
    both = [salted([5], "a"), salted([5], "b")]
    logits = rows((6, 7, 8), (9, 10, 11))
    step = Step(tuple(Span(row, 0, 1) for row in both))
    recycler.observe(step, Forward(logits, (slice(0, 1), slice(1, 2))), [Verdict((), 6), Verdict((), 9)])
    assert [recycler.successors(5, salt) for salt in ("a", "b", "")] == [[6, 7, 8], [9, 10, 11], [-1] * K]
    for number in range(100):
        run_pass(recycler, salted([1], str(number)), Draft(), [2], rows((2, 3, 4)))
    assert recycler.n_bytes == 64 * recycling._ROWS * (K * 4 + K * 4 + 4)


def test_a_vocabulary_smaller_than_the_successors_is_allowed() -> None:
    recycler = RecyclingDrafter(SpeculationConfig(recycling_successors=8), 4, top)
    run_pass(recycler, sequence([1]), Draft(), [2], torch.tensor([[0.0, 1.0, 3.0, 2.0]]))
    assert recycler.successors(1) == [2, 3, 1, 0]


def test_a_step_is_quick() -> None:
    """Tens of microseconds beside the top-k itself; the limit leaves room for a loaded machine."""
    recycler, row = drafter(), sequence([1])
    logits = rows((1, 2, 3), (2, 3, 1), (3, 1, 2), (1, 2, 3), (1, 2, 3))
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        draft = propose(recycler, row, 8)
        run_pass(recycler, row, draft, [1, 1], logits[: 1 + len(draft)])
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 2e-3
