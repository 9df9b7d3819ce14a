"""Tree shapes: which candidates of which nodes are drafted, decided beforehand from how often each rank was right.

*Accuracy* is a table by depth and rank: ``accuracy[t][r]`` is how often the candidate of rank r (0 is the best) after a right
path of t tokens was the next token. Depths and ranks past the table are never right. Nodes of a tree exclude each other or
need each other, so what a pass is expected to emit is 1 + the sum of the nodes' *values*, the products of the accuracies on
their paths. Pure functions over numbers.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from specdec.types import ROOT

Accuracy = Many[Many[float]]
"""By depth, then by rank; each depth's sum is at most 1."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree without tokens: node i is the candidate of rank ``ranks[i]`` after node ``parents[i]`` (``ROOT``: at its top).

    Raises:
        ValueError: a parent that is no earlier node, or a rank that is taken.
    """

    parents: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        taken: set[tuple[int, int]] = set()
        for node, (parent, rank) in enumerate(zip(self.parents, self.ranks, strict=True)):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: a parent must be {ROOT} or an earlier node")
            if rank < 0 or (parent, rank) in taken:
                raise ValueError(f"node {node} has rank {rank}, which is negative or an earlier sibling's")
            taken.add((parent, rank))

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        """Per node, 1 at the top of the tree."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent == ROOT else found[parent] + 1)
        return tuple(found)


def chain(depth: int) -> Shape:
    """The best candidate of each depth after that of the depth before."""
    return Shape(tuple(range(ROOT, depth - 1)), (0,) * depth)


def values(shape: Shape, accuracy: Accuracy) -> list[float]:
    """Per node, the chance that it is on the emitted path."""
    found: list[float] = []
    for parent, rank, depth in zip(shape.parents, shape.ranks, shape.depths, strict=True):
        inside = depth <= len(accuracy) and rank < len(accuracy[depth - 1])
        found.append((1.0 if parent == ROOT else found[parent]) * (accuracy[depth - 1][rank] if inside else 0.0))
    return found


def expected_tokens(shape: Shape, accuracy: Accuracy) -> float:
    """Tokens that a pass over the tree emits on average, the target's own among them."""
    return 1.0 + sum(values(shape, accuracy))


def static(accuracy: Accuracy, nodes: int) -> Shape:
    """The tree that takes the node of the largest value next, ``nodes`` times, as Medusa does (Cai et al., arXiv 2401.10774).

    Its first n nodes are the tree for n. Nodes that are never right are left out.
    """
    parents: list[int] = []
    ranks: list[int] = []
    heap: list[tuple[float, int, int, int]] = []  # -value, parent, rank, depth
    node, value, depth = ROOT, 1.0, 0
    while len(parents) < nodes:
        if depth < len(accuracy):
            for rank, right in enumerate(accuracy[depth]):
                if right > 0:
                    heapq.heappush(heap, (-value * right, node, rank, depth + 1))
        if not heap:
            break
        negative, parent, rank, depth = heapq.heappop(heap)
        node, value = len(parents), -negative
        parents.append(parent)
        ranks.append(rank)
    return Shape(tuple(parents), tuple(ranks))


def optimum(accuracy: Accuracy, nodes: int) -> Shape:
    """The tree of at most ``nodes`` nodes that is expected to emit the most: the dynamic programme of Sequoia (Chen et al.,
    arXiv 2402.12374), nodes of large value first."""
    return _Programme(accuracy).shape(nodes)


def fitted(accuracy: Accuracy, nodes: int, seconds: Callable[[int, int], float]) -> Shape:
    """The tree, of at most ``nodes`` nodes, with which tokens come fastest.

    Args:
        seconds: (depth, n) -> seconds of a pass that verifies n nodes, and of drafting them down to that depth; (0, 0) is
            plain decoding.
    """
    best, rate = Shape(), 1.0 / seconds(0, 0)
    for depth in range(1, len(accuracy) + 1):
        programme = _Programme(accuracy[:depth])
        for n in range(1, nodes + 1):
            found = (1.0 + programme.most(n, 0, 0)[0]) / seconds(depth, n)
            if found > rate:
                best, rate = programme.shape(n), found
    return best


class _Programme:
    """The best way to share nodes out among the candidates of a node, by their number, depth and first rank."""

    def __init__(self, accuracy: Accuracy) -> None:
        self._accuracy = accuracy
        self.most = functools.cache(self._most)

    def _most(self, n: int, depth: int, rank: int) -> tuple[float, int]:
        """The most that n nodes bring below a node of that depth, as children from that rank on with all below them; and how
        many of them the child of that rank takes, itself included."""
        if n == 0 or depth == len(self._accuracy) or rank == len(self._accuracy[depth]):
            return 0.0, 0
        best, share = self.most(n, depth, rank + 1)[0], 0
        for own in range(1, n + 1):
            below = self.most(own - 1, depth + 1, 0)[0]
            found = self._accuracy[depth][rank] * (1.0 + below) + self.most(n - own, depth, rank + 1)[0]
            if found > best:
                best, share = found, own
        return best, share

    def shape(self, nodes: int) -> Shape:
        placed: list[tuple[float, tuple[int, ...]]] = []  # -value, ranks on the path

        def place(n: int, path: tuple[int, ...], value: float) -> None:
            for rank in range(len(self._accuracy[len(path)]) if len(path) < len(self._accuracy) else 0):
                share = self.most(n, len(path), rank)[1]
                if share:
                    right = value * self._accuracy[len(path)][rank]
                    placed.append((-right, (*path, rank)))
                    place(share - 1, (*path, rank), right)
                n -= share

        place(nodes, (), 1.0)
        placed.sort(key=lambda item: (item[0], len(item[1]), item[1]))  # of equal values the parent first
        at = {path: i for i, (_, path) in enumerate(placed)}
        return Shape(tuple(at.get(path[:-1], ROOT) for path in at), tuple(path[-1] for path in at))
