"""Token Recycling (Luo et al., arXiv 2408.08696): what the target last thought might follow a token.

Every row that the target verifies, accepted or not, holds its opinion about what comes next. A matrix keeps, per token,
the best few successors of the last such row; drafts are read off it as a tree. The paper's tree is a fixed template of
some 80 nodes for a GPU. Rows cost time here, so nodes are chosen one by one, most probable first, and only while they
look worth a row: most tokens have no predictable successor, some nearly always the same one, and the counts kept beside
the matrix tell which.

Matrix and counts are shared by all requests of an engine: they change no token, but how fast an answer comes can tell
what others asked for. ``clear`` forgets everything.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
from torch import Tensor

from specdec.config import SpeculationConfig
from specdec.draft.base import Drafter
from specdec.types import ROOT, Draft, Forward, Sequence, Step, Tree, Verdict

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
        k = self._k
        self.successors = np.full((self._vocab_size, k), -1, np.int32)
        """[V, k] ids of the most likely successors in the last verified row of each token, best first; -1 is empty."""
        self._hits = np.zeros((self._vocab_size, k), np.float32)
        self._tries = np.zeros(self._vocab_size, np.float32)
        prior = [_RANK_PRIOR[min(rank, len(_RANK_PRIOR) - 1)] for rank in range(k)]
        self._rank_hits = [[_RANK_WEIGHT * p for p in prior] for _ in range(_DEPTHS)]
        self._rank_tries = [_RANK_WEIGHT] * _DEPTHS

    def propose(self, sequences: Many[Sequence], budgets: Many[int]) -> list[Draft]:
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: Sequence, budget: int) -> Draft:
        limit = min(budget, self._nodes)
        tokens: list[int] = []
        parents: list[int] = []
        estimates: list[float] = []
        heap: list[tuple[float, int, int, int, int]] = []  # -P, order, parent, token, depth
        order = 0
        node, token, probability, depth = ROOT, sequence.tokens[-1], 1.0, 0
        while len(tokens) < limit:
            if token not in sequence.end_tokens:  # nothing after an end token can be emitted
                for successor, chance in self._expect(token, depth):
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
        return Draft(Tree(tuple(tokens), tuple(parents)), (self.name,) * len(tokens), estimates=tuple(estimates))

    def _expect(self, token: int, depth: int) -> list[tuple[int, float]]:
        """The remembered successors of a token and the chance of each to be the next one."""
        successors = self.successors[token].tolist()
        if successors[0] < 0:
            return []
        d = min(depth, _DEPTHS - 1)
        scale = _TOKEN_WEIGHT / self._rank_tries[d]
        tries = float(self._tries[token]) + _TOKEN_WEIGHT
        hits = self._hits[token].tolist()
        return [
            (successor, (h + scale * rank) / tries)
            for successor, h, rank in zip(successors, hits, self._rank_hits[d], strict=True)
            if successor >= 0
        ]

    def observe(self, step: Step, forward: Forward, verdicts: Many[Verdict | None]) -> None:
        """Score the matrix on what was emitted, then enter every verified row; of several rows of a token the last wins."""
        tokens: list[int] = []
        verified: list[int] = []
        for span, rows, verdict in zip(step, forward.rows, verdicts, strict=True):
            if verdict is None:  # nothing was verified here
                continue
            token = span.sequence.tokens[span.stop - 1]  # the one that was pending
            tree = span.draft.tree
            tokens += [token, *tree.tokens]
            verified += range(rows.start, rows.stop)
            for depth, emitted in enumerate([*(tree.tokens[node] for node in verdict.path), verdict.token]):
                self._score(token, emitted, depth)
                token = emitted
        if tokens:
            logits = forward.logits if len(verified) == len(forward.logits) else forward.logits[verified]
            _, ids = self._top(logits, self._k)
            self.successors[tokens] = ids.cpu().numpy()  # of repeated indices the last is kept

    def _score(self, token: int, emitted: int, depth: int) -> None:
        successors = self.successors[token].tolist()
        if successors[0] < 0:
            return
        if self._tries[token] >= _MEMORY:
            self._tries[token] /= 2
            self._hits[token] /= 2
        d = min(depth, _DEPTHS - 1)
        self._tries[token] += 1
        self._rank_tries[d] += 1
        if emitted in successors:
            rank = successors.index(emitted)
            self._hits[token, rank] += 1
            self._rank_hits[d][rank] += 1

    @property
    def n_bytes(self) -> int:
        return self.successors.nbytes + self._hits.nbytes + self._tries.nbytes
