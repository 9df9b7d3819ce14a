"""What followed the latest places where the end of a text stands, as a tree of likely continuations.

Stated here in NumPy; the native library does the same in a tenth of the time, and is used where it is built.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from specdec import kernels
from specdec.config import SpeculationConfig
from specdec.types import ROOT

Ints: TypeAlias = "array[int]"
"""Of type "i". NumPy is not used for a text: only to ask one of its arrays where it lies takes as long as a search."""

PLACES = 512
"""Most places, latest first, where the shortest tail stands that are compared with the longer ones; bounds a step's time."""

OCCURRENCES = 64
"""Most occurrences of a tail whose continuations are counted, latest first; more would cost time and tell little."""

_STRIDE = 8
"""Tokens by which a comparison goes back at a time."""

ENOUGH = 0.9
"""A longer match is taken without a look at shorter ones if its score is this share of the most that they could reach."""

GAP = -1
"""No token: fills the ends of a store and parts the outputs in it, so that no match and no continuation crosses."""


class Candidate(NamedTuple):
    """A drafted tree with the estimated probability of each node and their sum, the expected number accepted."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    estimates: tuple[float, ...]
    score: float


NOTHING = Candidate((), (), (), 0.0)


Search = Callable[[Ints, Ints, int, int, frozenset[int], int], Candidate]
"""(text, tail, shortest match, most nodes, end tokens, start) -> the best tree.

``text`` has at least ``len(tail)`` gaps in front of it and ``suffix_depth`` behind. Only what stands at ``start`` or behind it
is a continuation.
"""


def gaps(n: int) -> Ints:
    return array("i", [GAP]) * n


def make_search(config: SpeculationConfig) -> Search:
    """The native search where there is one."""
    native = kernels.native_tails()

    def search(text: Ints, tail: Ints, shortest: int, budget: int, end_tokens: frozenset[int], start: int) -> Candidate:
        if native is None or len(tail) < shortest:
            return likeliest(config, text, tail, shortest, budget, end_tokens, start)
        found = native.follow(
            text,
            tail,
            start=start,
            shortest=shortest,
            depth=config.suffix_depth,
            budget=budget,
            places=PLACES,
            rows=OCCURRENCES,
            factor=config.suffix_factor,
            min_probability=config.suffix_min_probability,
            prior=config.suffix_prior,
            enough=ENOUGH,
            end_tokens=end_tokens,
        )
        return Candidate(*found)

    return search


def likeliest(
    config: SpeculationConfig, text: Ints, tail: Ints, shortest: int, budget: int, end_tokens: frozenset[int], start: int
) -> Candidate:
    """The tree with the largest sum of probabilities over all match lengths; of equal ones that of the longest match."""
    best = NOTHING
    # Longest matches first: a shorter one cannot score above its own limit.
    for length, rows in continuations(text, tail, shortest, min(budget, config.suffix_depth), start):
        limit = min(budget, int(config.suffix_factor * length))
        if best.score >= ENOUGH * limit:
            break
        found = grow(rows, limit, config.suffix_min_probability, config.suffix_prior / length, end_tokens)
        if found.score > best.score:
            best = found
    return best


def continuations(
    text_of: Ints, tail_of: Ints, min_match: int, width: int, start: int = 0
) -> Iterator[tuple[int, list[list[int]]]]:
    """Match length, and what followed the latest occurrences of that many last tokens of ``tail_of``, latest first.

    Lengths run from the longest one that occurs down to ``min_match``; of several with the same occurrences only the
    longest is given. ``text_of`` has at least ``len(tail_of)`` gaps in front and ``width`` behind. A row ends at a gap.
    Continuations that begin before ``start`` are left out.
    """
    if len(tail_of) < min_match:
        return
    text, tail = np.frombuffer(text_of, np.int32), np.frombuffer(tail_of, np.int32)
    at = np.flatnonzero(text == tail[-1])
    for back in range(1, min_match):
        at = at[text[at - back] == tail[-1 - back]]
    if start:
        at = at[at >= start - 1]
    at = at[text[at + 1] != GAP][-PLACES:]  # what nothing follows tells nothing: so the tail does not find itself
    if not len(at):
        return
    # How far back each place agrees with the tail, compared a few tokens at a time since most differ soon.
    matched = np.full(len(at), min_match)
    same = np.arange(len(at))  # places that agree with all of the tail so far
    for start in range(min_match, len(tail), _STRIDE):
        backs = np.arange(start, min(start + _STRIDE, len(tail)))
        differs = np.ones((len(same), len(backs) + 1), bool)  # the last column ends a comparison that never differs
        differs[:, :-1] = text[at[same, None] - backs] != tail[-1 - backs]
        agreed = differs.argmax(1)
        matched[same] += agreed
        same = same[agreed == len(backs)]
        if not len(same):
            break
    ahead = np.arange(1, width + 1)
    for length in sorted(set(matched.tolist()), reverse=True):
        counted = at[matched >= length][: -OCCURRENCES - 1 : -1]
        yield length, text[counted[:, None] + ahead].tolist()


def grow(rows: list[list[int]], limit: int, min_probability: float, prior: float, end_tokens: frozenset[int]) -> Candidate:
    """The most probable tree of at most ``limit`` nodes over the continuations in ``rows``.

    P(child) = P(parent) * count(child) / (count + prior), where count sums over the parent's children.
    """
    tokens: list[int] = []
    parents: list[int] = []
    estimates: list[float] = []
    heap: list[tuple[float, int, int, int, int, list[list[int]]]] = []  # -P, order, parent, token, depth, rows through it
    order = 0
    score = 0.0

    def expand(parent: int, probability: float, depth: int, rows: list[list[int]]) -> None:
        nonlocal order
        children: dict[int, list[list[int]]] = {}
        for row in rows:
            if depth < len(row) and row[depth] != GAP:
                children.setdefault(row[depth], []).append(row)
        total = sum(map(len, children.values())) + prior
        for token, through in children.items():
            p = probability * len(through) / total
            if p >= min_probability:
                heapq.heappush(heap, (-p, order, parent, token, depth, through))
                order += 1

    expand(ROOT, 1.0, 0, rows)
    while heap and len(tokens) < limit:
        p, _, parent, token, depth, through = heapq.heappop(heap)
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        estimates.append(-p)
        score -= p  # one after the other, since later versions of Python sum in another way than the native library
        if token not in end_tokens:  # nothing after an end token can be emitted
            expand(node, -p, depth + 1, through)
    return Candidate(tuple(tokens), tuple(parents), tuple(estimates), score)
