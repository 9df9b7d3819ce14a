"""The tree of a drafter that looks one token ahead at a time: grown level by level, then cut to its best nodes.

As EAGLE-2 (Li et al., arXiv 2406.16858): the *value* of a node is the product of the chances on its path, the estimate that
all of it is accepted. At each depth the most valuable nodes propose children; in the end the most valuable of all remain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from specdec.types import NO_DRAFT, ROOT, Draft, Tree


class Growth:
    """The tree of one sequence while it grows.

    Args:
        width: most nodes of a depth that propose children.
        limit: most nodes in the end.
        least: nodes of less value are left out.
        end_tokens: nothing is proposed after these, since nothing after them can be emitted.
    """

    def __init__(self, width: int, limit: int, least: float, end_tokens: Collection[int]) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.values: list[float] = []
        """The chance that all of a node's path is accepted."""
        self._width, self._limit, self._least, self._end_tokens = width, limit, least, end_tokens
        self._grown = 0
        """Nodes that had their turn to propose children."""

    def add(self, parent: int, tokens: Iterable[int], chances: Iterable[float]) -> None:
        """Children of a node, each with the chance that it is accepted if its parent is; a chance may be NaN, for none."""
        above = 1.0 if parent == ROOT else self.values[parent]
        for token, chance in zip(tokens, chances, strict=True):
            value = above * min(chance, 1.0)  # a child never ranks above its parent
            if value >= self._least:
                self.tokens.append(token)
                self.parents.append(parent)
                self.values.append(value)

    def next(self) -> list[int]:
        """The nodes that propose children now, best first: of those added since the last call, the most valuable.

        Nodes that enough better ones would crowd out in the end, and their children with them, are left out.
        """
        grown, tokens, end_tokens = self._grown, self.tokens, self._end_tokens
        self._grown = len(tokens)
        return [node for node in self._ranked() if node >= grown and tokens[node] not in end_tokens][: self._width]

    def draft(self, source: str) -> Draft:
        """The best nodes, most valuable first, so that of a draft cut short the best are kept."""
        ranked = self._ranked()
        tokens, parents, values = self.tokens, self.parents, self.values
        if not ranked:
            return NO_DRAFT
        place = {ROOT: ROOT} | {node: i for i, node in enumerate(ranked)}
        tree = Tree(tuple([tokens[node] for node in ranked]), tuple([place[parents[node]] for node in ranked]))
        return Draft(tree, (source,) * len(ranked), estimates=tuple([values[node] for node in ranked]))

    def _ranked(self) -> list[int]:
        """The best nodes, at most ``limit``; of equals the earlier, so a parent always comes before its children."""
        values = self.values
        return sorted(range(len(values)), key=values.__getitem__, reverse=True)[: self._limit]
