"""What a verification rule is, what it is given, and how its verdict is put together from where it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from torch import Tensor

from specdec.types import ROOT, Draft, Siblings, Tree, Verdict

Law: TypeAlias = Callable[[int, tuple[int, ...]], Tensor]
"""(node, tokens of the path down to it) -> [V] float64, the target's probabilities of the token after that path; the node is
``ROOT`` for the pending token. A rule asks for the rows it needs and no others, for each of them once."""

Guarantee = Literal["tokens", "law", "lossy"]
"""What a rule keeps: the very tokens of plain decoding, the law that they are drawn from, or neither."""


class Chance(Protocol):
    """Random numbers for one burst, independent of each other and of everything that was drafted."""

    def uniform(self) -> float:
        """A number in [0, 1)."""
        ...

    def draw(self, p: Tensor) -> int:
        """A token with the probabilities [V] float64 that it is given; never one of probability 0."""
        ...


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to decide which drafted tokens stay, and which token follows them.

    ``judge(draft, law, chance)`` emits the accepted path and one more token. Where no token can follow a node of that path
    (``law`` raises SamplingError), the path ends with that node's own token, and plain decoding will meet the error if it gets
    there; after the pending token the error is raised.
    """

    name: str
    judge: Callable[[Draft, Law, Chance], Verdict]
    keeps: Guarantee
    siblings: Siblings | None
    """How sampled nodes must have been drawn; None: nothing is asked of them. ``one`` judges chains only, deterministic ones
    too. Every rule takes deterministic nodes, and each of its kind takes a chain."""
    paper: str
    summary: str


def ending(tree: Tree, node: int, p: Tensor | None, chance: Chance) -> Verdict:
    """The verdict whose path leads to ``node``, and then a token of the law ``p`` [V]; None: nothing can follow the node."""
    path: list[int] = []
    while node != ROOT:
        path.insert(0, node)
        node = tree.parents[node]
    if p is None:
        return Verdict(tuple(path[:-1]), tree.tokens[path[-1]])
    return Verdict(tuple(path), chance.draw(p))
