"""SuffixDecoding (Oliaro et al., arXiv 2411.04975): what followed the longest tails of the text, weighed by counts.

Two stores are asked, the request's own prompt and output (*local*) and the outputs of finished requests of the same salt
(*global*), and the better answer wins. The paper keeps suffix trees; here a store is the text itself as an integer array,
and the occurrences of a tail are found by scanning it. At the sizes an engine keeps (2,000 tokens of a request, 100,000 of
the past) a scan takes microseconds, adding text is a copy, evicting it is a slice, and there is no index that could disagree
with the text. The counts that a tree would hold are taken from the occurrences when they are needed.

The global store changes no token, but how fast an answer comes can tell whether somebody of the same salt had a similar
one. ``suffix_global_tokens=0`` turns it off.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.config import SpeculationConfig
from specdec.draft.base import Drafter
from specdec.draft.stores import Stores
from specdec.types import ROOT, Draft, Forward, Sequence, Step, Tree, Verdict

Ints = NDArray[np.int32]

PLACES = 512
"""Most places, latest first, where the shortest tail stands that are compared with the longer ones; bounds a step's time."""

OCCURRENCES = 64
"""Most occurrences of a tail whose continuations are counted, latest first; more would cost time and tell little."""

_STRIDE = 8
"""Tokens by which a comparison goes back at a time."""

ENOUGH = 0.9
"""A longer match is taken without a look at shorter ones if its score is this share of the most that they could reach."""

_GAP = -1
"""No token: fills the ends of a store and parts the outputs in it, so that no match and no continuation crosses."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafted tree with the estimated probability of each node and their sum, the expected number accepted."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    estimates: tuple[float, ...]
    score: float


NOTHING = Candidate((), (), (), 0.0)


class SuffixDrafter(Drafter):
    """Drafts the tree of likely continuations of the text's tail.

    For every match length l a tree of at most ``min(budget, suffix_factor * l)`` nodes is grown, most probable first, down
    to ``suffix_min_probability``; the tree with the largest sum of probabilities is drafted. A node's probability is its
    parent's times its share of the parent's continuations, shrunk by ``suffix_prior / l`` imagined failures: one
    occurrence of two tokens is weak evidence, one of twenty is strong.
    """

    name = "suffix"
    prediction = "prediction"

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._local: dict[int, Text] = {}
        self._predicted: dict[int, tuple[Ints, int]] = {}
        """Of sequences with a prediction: the end of the prompt and the predicted text behind it, and where that begins."""
        self._global = self._outputs()

    def _outputs(self) -> Stores[Outputs]:
        most, depth = self._config.suffix_global_tokens, self._config.suffix_depth
        return Stores(lambda: Outputs(most, depth), most)

    def propose(self, sequences: Many[Sequence], budgets: Many[int]) -> list[Draft]:
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: Sequence, budget: int) -> Draft:
        if budget <= 0:
            return Draft()
        local = self._text(sequence)
        local.follow(sequence.tokens)
        config = self._config
        best = self._best(local.array, local.tail, config.suffix_min_match, budget, sequence.end_tokens)
        if past := self._global.find(sequence.salt):
            other = self._best(past.array, local.tail, config.suffix_global_min_match, budget, sequence.end_tokens)
            if other.score > best.score:
                best = other
        source = self.name
        if sequence.speculation.prediction:
            array, start = self._prediction_of(sequence)
            other = self._best(array, local.tail, config.suffix_min_match, budget, sequence.end_tokens, start)
            if other.score > best.score:
                best, source = other, self.prediction
        return Draft(Tree(best.tokens, best.parents), (source,) * len(best.tokens), estimates=best.estimates)

    def _prediction_of(self, sequence: Sequence) -> tuple[Ints, int]:
        """The predicted text as if it had once followed the prompt, and where in the array it begins.

        So it is found from the first token on, and with a match as long as the prompt while the output keeps to it.
        """
        known = self._predicted.get(sequence.id)
        if known is None:
            depth = self._config.suffix_depth
            prompt = sequence.tokens[max(0, sequence.n_prompt - depth) : sequence.n_prompt]
            text = Text(depth)
            text.follow([*prompt, *sequence.speculation.prediction])
            known = self._predicted[sequence.id] = text.array, depth + len(prompt)
        return known

    def _best(
        self, array: Ints, tail: Ints, min_match: int, budget: int, end_tokens: frozenset[int], start: int = 0
    ) -> Candidate:
        config = self._config
        best = NOTHING
        # Longest matches first: a shorter one cannot score above its own limit.
        for length, rows in continuations(array, tail, min_match, min(budget, config.suffix_depth), start):
            limit = min(budget, int(config.suffix_factor * length))
            if best.score >= ENOUGH * limit:
                break
            found = grow(rows, limit, config.suffix_min_probability, config.suffix_prior / length, end_tokens)
            if found.score > best.score:
                best = found
        return best

    def observe(self, step: Step, forward: Forward, verdicts: Many[Verdict | None]) -> None:
        """Take note of the sequences that decode, so that their outputs are kept even if nothing was drafted for them."""
        for span, verdict in zip(step, verdicts, strict=True):
            if verdict is not None:
                self._text(span.sequence)

    def release(self, sequence: Sequence) -> None:
        """Forget the sequence; if it finished, its output is remembered for later requests."""
        self._predicted.pop(sequence.id, None)
        known = self._local.pop(sequence.id, None)
        if known is not None and sequence.status == "finished":
            self._global.of(sequence.salt).add(sequence.tokens[sequence.n_prompt :])
            self._global.grown(sequence.salt)

    def clear(self) -> None:
        self._local.clear()
        self._predicted.clear()
        self._global = self._outputs()

    @property
    def n_bytes(self) -> int:
        return sum(past.array.nbytes for past in self._global.values) + sum(text.n_bytes for text in self._local.values())

    def _text(self, sequence: Sequence) -> Text:
        text = self._local.get(sequence.id)
        if text is None:
            text = self._local[sequence.id] = Text(self._config.suffix_depth)
        return text


def continuations(array: Ints, tail: Ints, min_match: int, width: int, start: int = 0) -> Iterator[tuple[int, list[list[int]]]]:
    """Match length, and what followed the latest occurrences of that many last tokens of ``tail``, latest first.

    Lengths run from the longest one that occurs down to ``min_match``; of several with the same occurrences only the
    longest is given. ``array`` has at least ``len(tail)`` gaps in front and ``width`` behind. A row ends at a gap.
    Continuations that begin before ``start`` are left out.
    """
    if len(tail) < min_match:
        return
    at = np.flatnonzero(array == tail[-1])
    for back in range(1, min_match):
        at = at[array[at - back] == tail[-1 - back]]
    if start:
        at = at[at >= start - 1]
    at = at[array[at + 1] != _GAP][-PLACES:]  # what nothing follows tells nothing: so the tail does not find itself
    if not len(at):
        return
    # How far back each place agrees with the tail, compared a few tokens at a time since most differ soon.
    matched = np.full(len(at), min_match)
    same = np.arange(len(at))  # places that agree with all of the tail so far
    for start in range(min_match, len(tail), _STRIDE):
        backs = np.arange(start, min(start + _STRIDE, len(tail)))
        differs = np.ones((len(same), len(backs) + 1), bool)  # the last column ends a comparison that never differs
        differs[:, :-1] = array[at[same, None] - backs] != tail[-1 - backs]
        agreed = differs.argmax(1)
        matched[same] += agreed
        same = same[agreed == len(backs)]
        if not len(same):
            break
    ahead = np.arange(1, width + 1)
    for length in sorted(set(matched.tolist()), reverse=True):
        counted = at[matched >= length][: -OCCURRENCES - 1 : -1]
        yield length, array[counted[:, None] + ahead].tolist()


def grow(rows: list[list[int]], limit: int, min_probability: float, prior: float, end_tokens: frozenset[int]) -> Candidate:
    """The most probable tree of at most ``limit`` nodes over the continuations in ``rows``.

    P(child) = P(parent) * count(child) / (count + prior), where count sums over the parent's children.
    """
    tokens: list[int] = []
    parents: list[int] = []
    estimates: list[float] = []
    heap: list[tuple[float, int, int, int, int, list[list[int]]]] = []  # -P, order, parent, token, depth, rows through it
    order = 0

    def expand(parent: int, probability: float, depth: int, rows: list[list[int]]) -> None:
        nonlocal order
        children: dict[int, list[list[int]]] = {}
        for row in rows:
            if depth < len(row) and row[depth] != _GAP:
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
        if token not in end_tokens:  # nothing after an end token can be emitted
            expand(node, -p, depth + 1, through)
    return Candidate(tuple(tokens), tuple(parents), tuple(estimates), sum(estimates))


class Text:
    """The tokens of one request in an array that grows by doubling, with ``depth`` gaps at either end."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._seen: list[int] = []
        self._buffer: Ints = np.full(2 * depth, _GAP, np.int32)

    def follow(self, tokens: list[int]) -> None:
        """Take in what is new in ``tokens``; start over where they are not a continuation of what was seen."""
        if self._seen != tokens[: len(self._seen)]:  # the id was given to another sequence
            self._buffer[:] = _GAP
            self._seen.clear()
        start, stop = self._depth + len(self._seen), self._depth + len(tokens)
        if stop + self._depth > len(self._buffer):
            grown: Ints = np.full(2 * (stop + self._depth), _GAP, np.int32)
            grown[:start] = self._buffer[:start]
            self._buffer = grown
        new = tokens[len(self._seen) :]
        self._buffer[start:stop] = new
        self._seen.extend(new)

    @property
    def array(self) -> Ints:
        return self._buffer[: len(self._seen) + 2 * self._depth]

    @property
    def tail(self) -> Ints:
        """The last ``depth`` tokens, or all of a shorter text."""
        stop = self._depth + len(self._seen)
        return self._buffer[max(self._depth, stop - self._depth) : stop]

    @property
    def n_bytes(self) -> int:
        return self._buffer.nbytes + 8 * len(self._seen)


class Outputs:
    """Outputs of finished requests in one array, parted by gaps: at most ``capacity`` tokens and gaps, oldest out first.

    Of an output longer than that the end is kept.
    """

    def __init__(self, capacity: int, depth: int) -> None:
        self._capacity = capacity
        self._edge: Ints = np.full(depth, _GAP, np.int32)
        self._outputs: deque[Ints] = deque()
        self._n = 0
        self.array: Ints = self._edge

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def __len__(self) -> int:
        return len(self.array)

    def add(self, tokens: list[int]) -> None:
        if self._capacity < 2 or not tokens:
            return
        output: Ints = np.array([*tokens[1 - self._capacity :], _GAP], np.int32)
        self._outputs.append(output)
        self._n += len(output)
        while self._n > self._capacity:
            self._n -= len(self._outputs.popleft())
        self.array = np.concatenate((self._edge, *self._outputs, self._edge))
