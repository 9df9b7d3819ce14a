"""Fakes for tests of the engine and of drafters: a model whose law is a table, and drafters of known quality.

They are part of the package so that people who write a drafter can test it as we test ours.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from specdec.attention.base import Attention
from specdec.draft.base import Drafter
from specdec.draft.drawing import Drawing
from specdec.draft.shape import Shape as TreeShape
from specdec.models.base import Batch, Model, Shape
from specdec.tree import chain
from specdec.types import ROOT, Draft, Sequence, Siblings, Tree


class TableModel(Model):
    """A model whose next token depends on the last one only: logits are a row of a table of log-probabilities.

    Args:
        logp: [V, V] log P(column after row).
        context: longest sequence.
    """

    def __init__(self, logp: Tensor, context: int) -> None:
        self._logp = logp.float()
        self.shape = Shape(n_layers=1, n_kv_heads=1, head_dim=8, vocab_size=logp.shape[0], context=context)
        self.kv_dtype = torch.float32
        self.device = torch.device("cpu")
        self.precision = "fp32"

    def forward(self, batch: Batch, attention: Attention, taps: Collection[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        return self._logp[batch.tokens[batch.wanted]], {}


class TableDrafter(Drafter):
    """Drafts from a table as ``TableModel`` decodes from one: the likeliest tokens, or drawn ones.

    Args:
        logp: [V, V] log P(column after row).
        draws: how siblings are drawn above temperature 0; None: the likeliest come first, at any temperature.
        depth, width: of its trees: a chain where siblings are drawn as ``one``, every node with ``width`` children otherwise.
    """

    name = "table"

    def __init__(self, logp: Tensor, draws: Siblings | None, depth: int, width: int = 1) -> None:
        self._logp = logp.float()
        self.draws = draws
        self._depth, self._width = depth, width

    def propose(self, sequences: Many[Sequence], budgets: Many[int]) -> list[Draft]:
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _draft(self, sequence: Sequence, budget: int) -> Draft:
        shape = full(self._depth, self._width, budget)
        if self.draws is None or sequence.params.greedy:
            tokens: list[int] = []
            for parent, rank in zip(shape.parents, shape.ranks, strict=True):
                above = sequence.tokens[-1] if parent == ROOT else tokens[parent]
                tokens.append(int(self._logp[above].argsort(descending=True, stable=True)[rank]))
            return Draft(Tree(tuple(tokens), shape.parents), (self.name,) * len(tokens))
        drawing = Drawing(shape, self.draws, sequence, len(self._logp))
        leaves = [ROOT]
        while leaves:
            for node in leaves:
                drawing.draw(node, self._logp[sequence.tokens[-1] if node == ROOT else drawing.tokens[node]])
            leaves = drawing.next()
        return drawing.draft(self.name)


def full(depth: int, width: int, nodes: int) -> TreeShape:
    """Every node with ``width`` children down to a depth, as far as ``nodes`` reach, nodes of small depth first."""
    parents: list[int] = []
    ranks: list[int] = []
    level = [ROOT]
    for _ in range(depth):
        below = []
        for parent in level:
            for rank in range(width):
                if len(parents) == nodes:
                    break
                below.append(len(parents))
                parents.append(parent)
                ranks.append(rank)
        level = below
    return TreeShape(tuple(parents), tuple(ranks))


Truth = Callable[[Sequence], Many[int]]
"""What plain decoding will append to a sequence after its committed tokens."""


class Oracle(Drafter):
    """Always right: drafts what plain decoding will emit, as a chain."""

    name = "oracle"

    def __init__(self, truth: Truth) -> None:
        self._truth = truth

    def propose(self, sequences: Many[Sequence], budgets: Many[int]) -> list[Draft]:
        return [self._draft(s, list(self._truth(s))[:budget]) for s, budget in zip(sequences, budgets, strict=True)]

    def _draft(self, sequence: Sequence, truth: list[int]) -> Draft:
        return Draft(chain(truth), (self.name,) * len(truth))


class Adversary(Oracle):
    """Always wrong: every drafted token differs from what plain decoding will emit there."""

    name = "adversary"

    def __init__(self, truth: Truth, vocab_size: int) -> None:
        super().__init__(truth)
        self._vocab_size = vocab_size

    def _draft(self, sequence: Sequence, truth: list[int]) -> Draft:
        return super()._draft(sequence, [(token + 1) % self._vocab_size for token in truth])


class Thicket(Oracle):
    """Random trees that hold a prefix of the truth of random length, its nodes scattered among wrong branches.

    What it drafts is a function of the seed, the sequence and its length, so a run can be repeated.
    """

    name = "thicket"

    def __init__(self, truth: Truth, vocab_size: int, seed: int) -> None:
        super().__init__(truth)
        self._vocab_size, self._seed = vocab_size, seed

    def propose(self, sequences: Many[Sequence], budgets: Many[int]) -> list[Draft]:
        return [self._grow(s, list(self._truth(s)), budget) for s, budget in zip(sequences, budgets, strict=True)]

    def _grow(self, sequence: Sequence, truth: list[int], budget: int) -> Draft:
        rng = random.Random(f"{self._seed}/{sequence.id}/{len(sequence.tokens)}")
        n_right = rng.randint(0, min(len(truth), budget))
        tokens: list[int] = []
        parents: list[int] = []
        taken: set[tuple[int, int]] = set()
        right, tip = 0, ROOT  # how much of the truth stands in the tree, and its last node
        while len(tokens) < budget and (right < n_right or rng.random() < 0.7):
            if right < n_right and rng.random() < 0.5:
                parent, token = tip, truth[right]
            else:
                parent, token = (
                    rng.randint(ROOT, len(tokens) - 1),
                    rng.choice(sequence.tokens) if rng.random() < 0.5 else rng.randrange(self._vocab_size),
                )
            if (parent, token) in taken:
                continue
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            if parent == tip and right < len(truth) and token == truth[right]:
                tip, right = len(tokens) - 1, right + 1
        return Draft(Tree(tuple(tokens), tuple(parents)), (self.name,) * len(tokens))
