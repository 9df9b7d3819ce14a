"""Token Recycling (Luo et al., arXiv 2408.08696): what the target last thought might follow a token.

Every row that the target verifies, accepted or not, holds its opinion about what comes next. A matrix keeps, per token,
the best few successors of the last such row; drafts are read off it as a tree. The paper's tree is a fixed template of
some 80 nodes for a GPU. Rows cost time here, so nodes are chosen one by one, most probable first, and only while they
look worth a row: most tokens have no predictable successor, some nearly always the same one, and the counts kept beside
the matrix tell which.

Matrix and counts are shared by all requests of the same salt: they change no token, but how fast an answer comes can tell
what others asked for. ``clear`` forgets everything.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Many

from torch import Tensor

from specdec.config import SpeculationConfig
from specdec.draft.base import Drafter
from specdec.draft.stores import Stores
from specdec.types import NO_DRAFT, ROOT, Draft, Forward, Sequence, Step, Tree, Verdict

Top = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""logits [W, V], k -> values and ids [W, k], best first."""

_DEPTHS = 4
"""Depths told apart in the counts; deeper nodes count as the last of them."""

_RANK_PRIOR = (0.3, 0.08, 0.05)
"""Chance that the first, second, third ... remembered successor is the next token, before anything was observed; the
last value stands for all further ranks."""

_RANK_WEIGHT = 16.0
"""Observations that the prior of a rank counts for."""

_TOKEN_WEIGHT = 2.0
"""Observations that the chance of a rank counts for in the estimate of one token's successor."""

_MEMORY = 32.0
"""Observations after which the counts of a token are halved, so that they follow the text."""

_ROWS = 64
"""Rows of a matrix at first; they double when they are full."""

_VOCABULARIES = 4
_MATRICES = 64
"""Rows of all matrices together before the least recently used one is forgotten: so many times the vocabulary, or so many
new matrices where that is more."""


class RecyclingDrafter(Drafter):
    """Drafts the most probable nodes, at most ``recycling_nodes``, of the tree that the successor matrix spans.

    P(child of rank r) = P(parent) * (hits[x, r] + w * rate[depth, r]) / (tries[x] + w) for the parent's token x: how often
    the successor of that rank was right after x, drawn towards how often it was right after any token at that depth.
    Learning needs no drafting: every emitted token is looked up in the matrix as it was before the pass.
    """

    name = "recycling"
    thrifty = True

    def __init__(self, config: SpeculationConfig, vocab_size: int, top: Top) -> None:
        self._nodes = config.recycling_nodes
        self._min_probability = config.recycling_min_probability
        self._top = top
        self._k = min(config.recycling_successors, vocab_size)
        self._vocab_size = vocab_size
        self.clear()

    def clear(self) -> None:
        self._matrices = Stores(lambda: Matrix(self._k), max(_VOCABULARIES * self._vocab_size, _MATRICES * _ROWS))

    def propose(self, sequences: Many[Sequence], budgets: Many[int]) -> list[Draft]:
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: Sequence, budget: int) -> Draft:
        matrix = self._matrices.find(sequence.salt)
        if matrix is None:
            return NO_DRAFT
        limit = min(budget, self._nodes)
        tokens: list[int] = []
        parents: list[int] = []
        estimates: list[float] = []
        heap: list[tuple[float, int, int, int, int]] = []  # -P, order, parent, token, depth
        order = 0
        node, token, probability, depth = ROOT, sequence.tokens[-1], 1.0, 0
        while len(tokens) < limit:
            if token not in sequence.end_tokens:  # nothing after an end token can be emitted
                for successor, chance in matrix.expect(token, depth):
                    p = probability * chance
                    if p >= self._min_probability:
                        heapq.heappush(heap, (-p, order, node, successor, depth))
                        order += 1
            if not heap:
                break
            p, _, parent, token, depth = heapq.heappop(heap)
            node, probability, depth = len(tokens), -p, depth + 1
            tokens.append(token)
            parents.append(parent)
            estimates.append(probability)
        if not tokens:
            return NO_DRAFT
        return Draft(Tree(tuple(tokens), tuple(parents)), (self.name,) * len(tokens), estimates=tuple(estimates))

    def observe(self, step: Step, forward: Forward, verdicts: Many[Verdict | None]) -> None:
        """Score each matrix on what was emitted, then enter every verified row; of several rows of a token the last wins."""
        tokens: list[int] = []
        verified: list[int] = []
        ends: list[tuple[str, int]] = []  # salt, and where the rows of its sequence end among the verified ones
        for span, rows, verdict in zip(step, forward.rows, verdicts, strict=True):
            if verdict is None:  # nothing was verified here
                continue
            matrix = self._matrices.of(span.sequence.salt)
            token = span.sequence.tokens[span.stop - 1]  # the one that was pending
            tree = span.draft.tree
            tokens += [token, *tree.tokens]
            verified += range(rows.start, rows.stop)
            ends.append((span.sequence.salt, len(tokens)))
            for depth, emitted in enumerate([*(tree.tokens[node] for node in verdict.path), verdict.token]):
                matrix.score(token, emitted, depth)
                token = emitted
        if not tokens:
            return
        logits = forward.logits if len(verified) == len(forward.logits) else forward.logits[verified]
        _, ids = self._top(logits, self._k)
        best = ids.tolist()
        start = 0
        for salt, stop in ends:
            self._matrices.of(salt).enter(tokens[start:stop], best[start:stop])
            self._matrices.grown(salt)
            start = stop

    def successors(self, token: int, salt: str = "") -> list[int]:
        """What is remembered to follow a token, best first; -1 is empty."""
        matrix = self._matrices.find(salt)
        return [-1] * self._k if matrix is None else matrix.successors(token)

    @property
    def n_bytes(self) -> int:
        return sum(matrix.n_bytes for matrix in self._matrices.values)


class Matrix:
    """The successors of those tokens that were seen, k of each, and how often they were right.

    Its length is the number of rows that it has room for. The numbers lie in plain arrays, row behind row: a few of them are
    looked at after each pass, and the first call into NumPy since the last pass takes longer than all that is done here.
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self._slots: dict[int, int] = {}  # token -> its row in the three arrays
        self._successors = array("i", [-1]) * (_ROWS * k)
        """ids of the most likely successors in the last verified row of each token, best first; -1 is empty."""
        self._hits = array("f", [0.0]) * (_ROWS * k)
        self._tries = array("f", [0.0]) * _ROWS
        prior = [_RANK_PRIOR[min(rank, len(_RANK_PRIOR) - 1)] for rank in range(k)]
        self._rank_hits = [[_RANK_WEIGHT * p for p in prior] for _ in range(_DEPTHS)]
        self._rank_tries = [_RANK_WEIGHT] * _DEPTHS

    def __len__(self) -> int:
        return len(self._tries)

    def successors(self, token: int) -> list[int]:
        slot = self._slots.get(token)
        return [-1] * self._k if slot is None else self._successors[slot * self._k : (slot + 1) * self._k].tolist()

    def expect(self, token: int, depth: int) -> list[tuple[int, float]]:
        """The remembered successors of a token and the chance of each to be the next one."""
        slot = self._slots.get(token)
        if slot is None:
            return []
        d, first, stop = min(depth, _DEPTHS - 1), slot * self._k, (slot + 1) * self._k
        scale = _TOKEN_WEIGHT / self._rank_tries[d]
        tries = self._tries[slot] + _TOKEN_WEIGHT
        return [
            (successor, (h + scale * rank) / tries)
            for successor, h, rank in zip(self._successors[first:stop], self._hits[first:stop], self._rank_hits[d], strict=True)
        ]

    def score(self, token: int, emitted: int, depth: int) -> None:
        """Count whether a token's successors held the one that was emitted after it."""
        slot = self._slots.get(token)
        if slot is None:
            return
        first, stop = slot * self._k, (slot + 1) * self._k
        if self._tries[slot] >= _MEMORY:
            self._tries[slot] /= 2
            for i in range(first, stop):
                self._hits[i] /= 2
        d = min(depth, _DEPTHS - 1)
        self._tries[slot] += 1
        self._rank_tries[d] += 1
        successors = self._successors[first:stop]
        if emitted in successors:
            rank = successors.index(emitted)
            self._hits[first + rank] += 1
            self._rank_hits[d][rank] += 1

    def enter(self, tokens: Many[int], best: Many[list[int]]) -> None:
        """Remember best [n][k] as the successors of tokens [n]; of a repeated token the last."""
        k, slots = self._k, self._slots
        for token, successors in zip(tokens, best, strict=True):
            slot = slots.setdefault(token, len(slots))
            if slot == len(self._tries):
                self._successors += array("i", [-1]) * len(self._successors)
                self._hits += array("f", [0.0]) * len(self._hits)
                self._tries += array("f", [0.0]) * len(self._tries)
            self._successors[slot * k : (slot + 1) * k] = array("i", successors)

    @property
    def n_bytes(self) -> int:
        return sum(len(numbers) * numbers.itemsize for numbers in (self._successors, self._hits, self._tries))
