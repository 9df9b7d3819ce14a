"""Trees whose tokens are drawn from the drafter's own law, for rules that decide by chance which of them stay.

Which nodes there are is fixed before any token is known: a shape by the budget alone, of which a branch ends early only behind
an end token. Every drawn token comes with the whole law that it was drawn from, in the target's vocabulary. The numbers that
it is drawn by are the sequence's own and no others: neither the target's noise nor those that the draft is judged by.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence as Many

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.chance import Stream
from specdec.config import SpeculationConfig
from specdec.draft.candidates import Floats, Ids, candidates
from specdec.draft.expand import Growth
from specdec.draft.shape import Shape, chain, static
from specdec.kernels.base import Kernels
from specdec.types import ROOT, Draft, Sequence, Siblings, Tree

ACCEPTED = 0.6, 0.4
"""How often the first child drawn is taken to be accepted, and each later one relative to the one before: what shapes are laid
out by."""


class Drawings:
    """Starts the drawn trees of a drafter.

    Args:
        draws: how siblings are drawn; None: they are not, and candidates are ranked.
        config: the ``trained_`` settings.
        vocab_size: V, the target's.
        vocabulary: [Vd] the target's id of each of the drafter's tokens; None where they are the same.
    """

    def __init__(self, draws: Siblings | None, config: SpeculationConfig, vocab_size: int, vocabulary: Ids | None) -> None:
        self._draws = draws
        self._depth, self._width, self._nodes = config.trained_depth, config.trained_width, config.trained_nodes
        self._vocab_size, self._vocabulary = vocab_size, vocabulary

    def start(self, sequence: Sequence, budget: int) -> Drawing | None:
        """The tree of at most ``budget`` nodes of a sequence; None where candidates are ranked, as at temperature 0."""
        if self._draws is None or sequence.params.greedy:
            return None
        shape = layout(self._draws, min(budget, self._nodes), self._depth, self._width)
        return Drawing(shape, self._draws, sequence, self._vocab_size, self._vocabulary)


@functools.lru_cache(maxsize=64)
def layout(draws: Siblings, nodes: int, depth: int, width: int) -> Shape:
    """The shape of a drawn tree: a chain, or the nodes that are the most likely to be accepted."""
    if draws == "one":
        return chain(min(nodes, depth))
    first, later = ACCEPTED
    return static([[first * later**rank for rank in range(width)]] * depth, nodes)


class Drawing:
    """One sequence's tree while it is drawn, a depth at a time.

    Args:
        shape: its nodes, ranks being the order in which siblings are drawn.
        siblings: ``repeated`` draws each from the whole law, where a token that comes again is its first node drawn again and
            what the shape has below the later one is left out; otherwise each is drawn from what the earlier ones leave.
        sequence: whose pending token it follows.
    """

    def __init__(
        self, shape: Shape, siblings: Siblings, sequence: Sequence, vocab_size: int, vocabulary: Ids | None = None
    ) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._repeated = siblings == "repeated"
        self._stream = Stream(sequence.seed, len(sequence.tokens), "drafting")
        self._temperature, self._end_tokens = sequence.params.temperature, sequence.end_tokens
        self._vocab_size, self._vocabulary = vocab_size, vocabulary
        self._planned: dict[int, list[int]] = {node: [] for node in range(ROOT, len(shape))}
        for node in sorted(range(len(shape)), key=shape.ranks.__getitem__):
            self._planned[shape.parents[node]].append(node)
        self._places = {ROOT: ROOT}
        """Node -> its node in the shape."""
        self._rows: list[Floats] = []
        self._draws: list[int] = []
        self._grown = 0

    def draw(self, node: int, logits: Tensor) -> None:
        """Draw the children that the shape has at a node, from logits [Vd] float32; none from damaged ones."""
        best = float(logits.max())
        if not math.isfinite(best):
            return
        law = self._spread(torch.softmax((logits.double() - best) / self._temperature, 0).numpy())
        children: dict[int, int] = {}  # token -> node
        for place in self._planned[self._places[node]]:
            mass = law.sum()
            if not mass > 0:
                return
            row = law / mass
            token = self._stream.draw(row)
            if token not in children:
                children[token] = len(self.tokens)
                self._places[len(self.tokens)] = place
                self.tokens.append(token)
                self.parents.append(node)
            self._rows.append(row)
            self._draws.append(children[token])
            if not self._repeated:
                law[token] = 0

    def next(self) -> list[int]:
        """The nodes added since the last call that have children to be drawn; none after an end token."""
        new = [
            node
            for node in range(self._grown, len(self.tokens))
            if self._planned[self._places[node]] and self.tokens[node] not in self._end_tokens
        ]
        self._grown = len(self.tokens)
        return new

    def draft(self, source: str) -> Draft:
        """What was drawn, with a row of q for every draw."""
        n = len(self.tokens)
        return Draft(
            Tree(tuple(self.tokens), tuple(self.parents)),
            (source,) * n,
            torch.from_numpy(np.stack(self._rows)) if n else None,
            draws=tuple(self._draws) if len(self._draws) > n else (),
        )

    def _spread(self, law: NDArray[np.float64]) -> Floats:
        """A law [Vd] over the target's vocabulary [V], a copy."""
        whole = np.zeros(self._vocab_size)
        whole[slice(len(law)) if self._vocabulary is None else self._vocabulary] = law
        return whole


def add_children(
    leaves: Many[tuple[Growth | Drawing, int, Sequence, int]],
    logits: Tensor,
    k: int,
    kernels: Kernels,
    vocabulary: Ids | None,
) -> list[float]:
    """Give every leaf its children: the k best candidates, or those that its drawing has there.

    Args:
        leaves: (tree, node, sequence, absolute position of the node's children).
        logits: [leaves, Vd] float32 on the CPU.
        k: at most 32 and Vd.
        vocabulary: as for ``candidates``.

    Returns:
        The chance of the best candidate of each leaf that has candidates; NaN where its logits are damaged.
    """
    ranked: list[int] = []
    for i, (tree, node, _, _) in enumerate(leaves):
        if isinstance(tree, Drawing):
            tree.draw(node, logits[i])
        else:
            ranked.append(i)
    if not ranked:
        return []
    tokens, chances = candidates(
        logits if len(ranked) == len(leaves) else logits[ranked],
        [leaves[i][2].params.temperature for i in ranked],
        [leaves[i][2].seed for i in ranked],
        [leaves[i][3] for i in ranked],
        k,
        kernels,
        vocabulary,
    )
    for i, ids, likely in zip(ranked, tokens.tolist(), chances.tolist(), strict=True):
        tree, node, _, _ = leaves[i]
        assert isinstance(tree, Growth)
        tree.add(node, ids, likely)
    best: list[float] = chances[:, 0].tolist()
    return best
