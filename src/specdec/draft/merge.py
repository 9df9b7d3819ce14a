"""Several deterministic drafters as one: their trees laid over each other, under one budget."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

from specdec.draft.base import Drafter
from specdec.types import NO_DRAFT, ROOT, Draft, Forward, Sequence, Step, Tree, Verdict

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
    made: dict[int, Draft] = {}  # by the number of the sequence: in a wide batch most have none
    for drafter in drafters:
        # A later drafter gets the whole budget too, since the nodes it shares with earlier ones cost nothing.
        left, found = [*budgets], [0.0] * len(budgets)
        for i, draft in made.items():
            left[i], found[i] = 0 if len(draft) >= budgets[i] else budgets[i], sum(draft.estimates)
        for i, draft in enumerate(ask(drafter, sequences, left, found)):
            if draft is not NO_DRAFT and len(draft):
                made[i] = _laid(made.get(i, NO_DRAFT), draft, budgets[i], drafter.name)
    drafts = [NO_DRAFT] * len(sequences)
    for i, draft in made.items():
        drafts[i] = draft
    return drafts


def _laid(under: Draft, draft: Draft, budget: int, name: str) -> Draft:
    """What was drafted so far, and the nodes that the drafter ``name`` adds: in its own order, so that of a draft cut short the
    first are kept. No path comes twice, and there are at most ``budget`` nodes.

    Raises:
        ValueError: the nodes were sampled.
    """
    if draft.q is not None:
        raise ValueError(
            f"drafter {name} samples its tokens and cannot be merged: "
            "the law of a merged tree's siblings is not the one they were drawn from; run it alone"
        )
    if not len(under) and len(draft) <= budget:
        return draft
    tokens, parents, sources = [*under.tree.tokens], [*under.tree.parents], [*under.sources]
    estimates = [*under.estimates] if draft.estimates and (under.estimates or not tokens) else None
    nodes = {key: node for node, key in enumerate(zip(parents, tokens, strict=True))}
    here = {ROOT: ROOT}  # node of the draft -> node of the whole
    for node, (parent, token) in enumerate(zip(draft.tree.parents, draft.tree.tokens, strict=True)):
        if parent not in here:
            continue  # its parent found no room
        key = here[parent], token
        place = nodes.get(key)
        if place is None:
            if len(tokens) >= budget:
                continue
            place = nodes[key] = len(tokens)
            tokens.append(token)
            parents.append(here[parent])
            sources.append(draft.sources[node])
            if estimates is not None:
                estimates.append(draft.estimates[node])
        elif estimates is not None:
            estimates[place] = max(estimates[place], draft.estimates[node])
        here[node] = place
    return Draft(Tree(tuple(tokens), tuple(parents)), tuple(sources), estimates=tuple(estimates or ()))
