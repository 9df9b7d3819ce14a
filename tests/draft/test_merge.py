"""A merged draft is the union of its drafters' trees, cut to the budget, in their order."""

from __future__ import annotations

from collections.abc import Sequence as Many

import pytest
import torch
from drafting import paths, propose, run_pass, sequence
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft.base import Drafter
from specdec.draft.merge import Merge
from specdec.types import ROOT, Draft, Forward, Sequence, Step, Tree, Verdict


class Fixed(Drafter):
    """Proposes the start of one tree and notes what it is told."""

    def __init__(self, name: str, draft: Draft, taps: tuple[int, ...] = ()) -> None:
        self.name, self.taps, self._draft = name, taps, draft
        self.budgets: list[int] = []
        self.observed: list[Step] = []
        self.released: list[Sequence] = []

    def propose(self, sequences: Many[Sequence], budgets: Many[int]) -> list[Draft]:
        self.budgets += budgets
        return [self._first(budget) for budget in budgets]

    def _first(self, n: int) -> Draft:
        draft = self._draft
        tree = Tree(draft.tree.tokens[:n], draft.tree.parents[:n])
        return Draft(tree, draft.sources[:n], None if draft.q is None else draft.q[:n], draft.estimates[:n])

    def observe(self, step: Step, forward: Forward, verdicts: Many[Verdict | None]) -> None:
        self.observed.append(step)

    def release(self, sequence: Sequence) -> None:
        self.released.append(sequence)

    @property
    def n_bytes(self) -> int:
        return 7


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Random trees over four tokens, siblings distinct."""
    nodes: dict[tuple[int, int], None] = {}
    for _ in range(draw(st.integers(0, 10))):
        parent = draw(st.integers(ROOT, len(nodes) - 1))
        nodes[parent, draw(st.integers(0, 3))] = None
    return Tree(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes))


def fixed(name: str, tree: Tree, estimates: tuple[float, ...] = ()) -> Fixed:
    return Fixed(name, Draft(tree, (name,) * len(tree), estimates=estimates))


@given(st.lists(trees(), min_size=1, max_size=4))
def test_with_room_for_all_it_is_the_union(drafts: list[Tree]) -> None:
    """Every path once, and each node under the name of the first drafter that had it."""
    merge = Merge([fixed(f"d{i}", tree) for i, tree in enumerate(drafts)])
    draft = propose(merge, sequence([1]), 40)
    expected: dict[tuple[int, ...], str] = {}
    for i, tree in enumerate(drafts):
        for path in paths(tree):
            expected.setdefault(path, f"d{i}")
    merged = paths(draft.tree)
    assert len(merged) == len(set(merged))
    assert dict(zip(merged, draft.sources, strict=True)) == expected


@given(st.lists(trees(), min_size=1, max_size=4), st.integers(0, 12))
def test_the_budget_is_filled_in_the_order_of_the_drafters(drafts: list[Tree], budget: int) -> None:
    """Never more nodes than the budget, and fewer only where the drafters, each held to the budget, had no more."""
    merge = Merge([fixed(f"d{i}", tree) for i, tree in enumerate(drafts)])
    draft = propose(merge, sequence([1]), budget)
    union = list(dict.fromkeys(path for tree in drafts for path in paths(tree)[:budget]))
    assert paths(draft.tree)[: len(drafts[0])] == paths(drafts[0])[:budget]
    assert set(paths(draft.tree)) <= set(union)
    assert len(draft) == min(budget, len(union))


def test_shared_nodes_do_not_use_up_the_budget_of_a_later_drafter() -> None:
    first, second = fixed("first", Tree((1, 2), (-1, 0))), fixed("second", Tree((1, 2, 3), (-1, 0, 1)))
    draft = propose(Merge([first, second]), sequence([9]), 3)
    assert paths(draft.tree) == [(1,), (1, 2), (1, 2, 3)]
    assert draft.sources == ("first", "first", "second")


def test_a_full_draft_asks_no_further_drafter() -> None:
    first, second = fixed("first", Tree((1, 2), (-1, 0))), fixed("second", Tree((5,), (-1,)))
    drafts = Merge([first, second]).propose([sequence([9]), sequence([9])], [2, 3])
    assert second.budgets == [0, 3]
    assert [len(draft) for draft in drafts] == [2, 3]


def test_estimates_are_the_largest_given_and_absent_where_a_drafter_gives_none() -> None:
    first = fixed("first", Tree((1, 2), (-1, 0)), (0.5, 0.2))
    second = fixed("second", Tree((1, 3), (-1, -1)), (0.6, 0.1))
    silent, empty = fixed("silent", Tree((4,), (-1,))), fixed("empty", Tree())
    assert propose(Merge([first, second, empty]), sequence([9]), 8).estimates == (0.6, 0.2, 0.1)
    assert propose(Merge([first, silent, second]), sequence([9]), 8).estimates == ()


def test_a_sampled_draft_is_refused_by_name() -> None:
    tree = Tree((1,), (-1,))
    sampled = Fixed("dice", Draft(tree, ("dice",), torch.full((1, 4), 0.25)))
    with pytest.raises(ValueError, match="dice samples its tokens"):
        Merge([fixed("first", Tree((2,), (-1,))), sampled]).propose([sequence([9])], [4])


def test_everything_else_is_passed_on() -> None:
    drafters = [Fixed("a", Draft(), taps=(3, 1)), Fixed("b", Draft(), taps=(3, 5))]
    merge, row = Merge(drafters), sequence([1])
    assert merge.taps == (1, 3, 5)
    assert merge.n_bytes == 14
    run_pass(merge, row, Draft(), [2])
    merge.release(row)
    for drafter in drafters:
        assert len(drafter.observed) == 1
        assert drafter.released == [row]
