"""The chance of each node of a draft to be accepted: the drafter's own estimate, corrected by how often such ones came true.

What was proposed is scored against what was emitted, whether it was verified or not, so a drafter that has fallen silent
need not be paid for with rows to show that it is right again.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from specdec.types import ROOT, Draft

Kind = tuple[str, int, int]
"""Nodes whose chances are alike: their drafter and the class of its estimate; or the depth, where it makes none."""

CLASSES = 8
"""Classes of estimates, of equal width."""

DEPTHS = 12
"""Depths told apart where the drafter makes no estimates; deeper nodes count as the last of them."""

MEMORY = 400, 30
"""Nodes of a kind that are remembered over all sequences, and of one sequence: older ones fade."""

WEIGHT = 6.0
"""Nodes that a prior counts for: the drafter's estimate against all sequences, and these against one sequence."""

PRIOR = 0.5
"""Chance of a node without an estimate before anything is known, given its parent."""


class Record:
    """How often nodes of each kind were accepted where their parents were; older observations fade."""

    def __init__(self, memory: int) -> None:
        self._keep = 1 - 1 / memory
        self._cells: dict[Kind, list[float]] = {}  # kind -> accepted, reached

    def chance(self, kind: Kind, prior: float, weight: float) -> float:
        """The share that was accepted, with ``weight`` imagined nodes of which ``prior`` were."""
        cell = self._cells.get(kind)
        return prior if cell is None else (cell[0] + weight * prior) / (cell[1] + weight)

    def add(self, kind: Kind, accepted: bool) -> None:
        cell = self._cells.setdefault(kind, [0.0, 0.0])
        cell[0] = cell[0] * self._keep + accepted
        cell[1] = cell[1] * self._keep + 1


class Chances:
    """What is known of nodes, over all sequences and of each. Its length is the number of sequences that it knows."""

    def __init__(self) -> None:
        self._all = Record(MEMORY[0])
        self._known: dict[int, Record] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, sequence_id: int, draft: Draft, depth: Many[int]) -> tuple[list[Kind], list[float]]:
        """The kind of each node, and its chance: its parent's, times that of being the next token then.

        Args:
            depth: of each node.
        """
        kinds: list[Kind] = []
        chances: list[float] = []
        if not len(draft):
            return kinds, chances
        mine = self._known.get(sequence_id)
        if mine is None:
            mine = self._known[sequence_id] = Record(MEMORY[1])
        estimates = draft.estimates
        for node, (parent, source) in enumerate(zip(draft.tree.parents, draft.sources, strict=True)):
            if estimates:
                above = estimates[parent] if parent != ROOT else 1.0
                prior = min(1.0, estimates[node] / above) if above > 0 else 0.0
                kind = source, 0, min(int(prior * CLASSES), CLASSES - 1)
            else:
                prior = self._all.chance((source, 0, CLASSES), PRIOR, WEIGHT)  # of this drafter at any depth
                kind = source, min(depth[node], DEPTHS), CLASSES
            chance = mine.chance(kind, self._all.chance(kind, prior, WEIGHT), WEIGHT)
            kinds.append(kind)
            chances.append(chance if parent == ROOT else chance * chances[parent])
        return kinds, chances

    def score(self, sequence_id: int, draft: Draft, depth: Many[int], kinds: Many[Kind], emitted: Many[int]) -> set[int]:
        """Learn from what was emitted.

        Args:
            kinds: as ``of`` gave them.

        Returns:
            The nodes that agree with it, and the root.
        """
        right = {ROOT}
        for node, (token, parent) in enumerate(zip(draft.tree.tokens, draft.tree.parents, strict=True)):
            if parent in right and depth[node] <= len(emitted):
                accepted = token == emitted[depth[node] - 1]
                kind = kinds[node]
                self._known[sequence_id].add(kind, accepted)
                self._all.add(kind, accepted)
                if not draft.estimates:
                    self._all.add((kind[0], 0, CLASSES), accepted)
                if accepted:
                    right.add(node)
        return right

    def release(self, sequence_id: int) -> None:
        """Forget a sequence that ended."""
        self._known.pop(sequence_id, None)

    def clear(self) -> None:
        self._all, self._known = Record(MEMORY[0]), {}
