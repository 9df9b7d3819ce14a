"""Several deterministic drafters as one: their trees laid over each other, under one budget."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

from specdec.draft.base import Drafter
from specdec.types import ROOT, Draft, Forward, Sequence, Step, Tree, Verdict

Ask = Callable[[Drafter, Many[Sequence], Many[int], Many[float]], list[Draft]]
"""(drafter, sequences, budgets, found) -> one draft per sequence; ``found`` is how many tokens of what was drafted before are
expected to be accepted, by those drafters' own estimates."""


class Merge(Drafter):
    """Asks its drafters in order of preference; each adds what is new until the budget is full.

    Equal paths share their nodes, and a node belongs to the first drafter that proposed it. Its estimate is the largest that
    any of them gave. If one that contributed makes no estimates, the merged draft has none.
    """

    name = "merge"

    def __init__(self, drafters: Many[Drafter]) -> None:
        self.drafters = tuple(drafters)
        self.taps = tuple(sorted({tap for drafter in drafters for tap in drafter.taps}))

    def propose(self, sequences: Many[Sequence], budgets: Many[int]) -> list[Draft]:
        return overlay(self.drafters, sequences, budgets, lambda drafter, asked, left, found: drafter.propose(asked, left))

    def observe(self, step: Step, forward: Forward, verdicts: Many[Verdict | None]) -> None:
        for drafter in self.drafters:
            drafter.observe(step, forward, verdicts)

    def release(self, sequence: Sequence) -> None:
        for drafter in self.drafters:
            drafter.release(sequence)

    def clear(self) -> None:
        for drafter in self.drafters:
            drafter.clear()

    @property
    def n_bytes(self) -> int:
        return sum(drafter.n_bytes for drafter in self.drafters)


def overlay(drafters: Many[Drafter], sequences: Many[Sequence], budgets: Many[int], ask: Ask) -> list[Draft]:
    """Ask drafters in order of preference and lay their trees over each other; ``ask`` may leave a sequence undrafted.

    Raises:
        ValueError: a drafter samples its tokens.
    """
    tries: dict[int, _Trie] = {}  # by the number of the sequence: in a wide batch most have none
    for drafter in drafters:
        # A later drafter gets the whole budget too, since the nodes it shares with earlier ones cost nothing.
        left, found = [*budgets], [0.0] * len(budgets)
        for i, trie in tries.items():
            left[i], found[i] = 0 if trie.full else budgets[i], trie.expected
        for i, draft in enumerate(ask(drafter, sequences, left, found)):
            if len(draft):
                tries.setdefault(i, _Trie(budgets[i])).add(draft, drafter.name)
    drafts = [Draft()] * len(sequences)
    for i, trie in tries.items():
        drafts[i] = trie.draft()
    return drafts


class _Trie:
    """A tree under construction that never holds a path twice nor more nodes than its budget."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._nodes: dict[tuple[int, int], int] = {}
        """(parent, token) -> node, in order of node."""
        self._sources: list[str] = []
        self._estimates: list[float] | None = []

    @property
    def full(self) -> bool:
        return len(self._nodes) >= self._budget

    @property
    def expected(self) -> float:
        return sum(self._estimates) if self._estimates else 0.0

    def add(self, draft: Draft, name: str) -> None:
        """Add the nodes that the drafter ``name`` proposed, in its own order, so that of a draft cut short the first are kept.

        Raises:
            ValueError: the nodes were sampled.
        """
        if draft.q is not None:
            raise ValueError(
                f"drafter {name} samples its tokens and cannot be merged: "
                "the law of a merged tree's siblings is not the one they were drawn from; run it alone"
            )
        if len(draft) and not draft.estimates:
            self._estimates = None
        here = {ROOT: ROOT}  # node of the draft -> node of the trie
        for node, (token, parent) in enumerate(zip(draft.tree.tokens, draft.tree.parents, strict=True)):
            if parent not in here:
                continue  # its parent found no room
            key = (here[parent], token)
            if key not in self._nodes:
                if self.full:
                    continue
                self._nodes[key] = len(self._nodes)
                self._sources.append(draft.sources[node])
                if self._estimates is not None:
                    self._estimates.append(draft.estimates[node])
            elif self._estimates is not None:
                known = self._nodes[key]
                self._estimates[known] = max(self._estimates[known], draft.estimates[node])
            here[node] = self._nodes[key]

    def draft(self) -> Draft:
        tree = Tree(tuple(token for _, token in self._nodes), tuple(parent for parent, _ in self._nodes))
        return Draft(tree, tuple(self._sources), estimates=tuple(self._estimates or ()))
