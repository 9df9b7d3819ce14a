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

from collections import deque
from collections.abc import Sequence as Many

import numpy as np

from specdec.config import SpeculationConfig
from specdec.draft.base import Drafter
from specdec.draft.continuations import GAP, Ints, make_search
from specdec.draft.stores import Stores
from specdec.types import Draft, Sequence, Tree


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
        self._search = make_search(config)
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
        best = self._search(local.array, local.tail, config.suffix_min_match, budget, sequence.end_tokens, 0)
        if past := self._global.find(sequence.salt):
            other = self._search(past.array, local.tail, config.suffix_global_min_match, budget, sequence.end_tokens, 0)
            if other.score > best.score:
                best = other
        source = self.name
        if sequence.speculation.prediction:
            array, start = self._prediction_of(sequence)
            other = self._search(array, local.tail, config.suffix_min_match, budget, sequence.end_tokens, start)
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

    def release(self, sequence: Sequence) -> None:
        """Forget the sequence; if it finished, its output is remembered for later requests."""
        self._predicted.pop(sequence.id, None)
        self._local.pop(sequence.id, None)
        if sequence.n_output and sequence.status == "finished":
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


class Text:
    """The tokens of one request in an array that grows by doubling, with ``depth`` gaps at either end."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._tokens: list[int] = []
        self._n = 0
        self._buffer: Ints = np.full(2 * depth, GAP, np.int32)

    def follow(self, tokens: list[int]) -> None:
        """Take in what was appended to ``tokens``; start over where it is another list, or one that lost some."""
        if tokens is not self._tokens or len(tokens) < self._n:
            self._buffer[:] = GAP
            self._tokens, self._n = tokens, 0
        start, stop = self._depth + self._n, self._depth + len(tokens)
        if stop + self._depth > len(self._buffer):
            grown: Ints = np.full(2 * (stop + self._depth), GAP, np.int32)
            grown[:start] = self._buffer[:start]
            self._buffer = grown
        self._buffer[start:stop] = tokens[self._n :]
        self._n = len(tokens)

    @property
    def array(self) -> Ints:
        return self._buffer[: self._n + 2 * self._depth]

    @property
    def tail(self) -> Ints:
        """The last ``depth`` tokens, or all of a shorter text."""
        stop = self._depth + self._n
        return self._buffer[max(self._depth, stop - self._depth) : stop]

    @property
    def n_bytes(self) -> int:
        return self._buffer.nbytes


class Outputs:
    """Outputs of finished requests in one array, parted by gaps: at most ``capacity`` tokens and gaps, oldest out first.

    Of an output longer than that the end is kept.
    """

    def __init__(self, capacity: int, depth: int) -> None:
        self._capacity = capacity
        self._edge: Ints = np.full(depth, GAP, np.int32)
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
        output: Ints = np.array([*tokens[1 - self._capacity :], GAP], np.int32)
        self._outputs.append(output)
        self._n += len(output)
        while self._n > self._capacity:
            self._n -= len(self._outputs.popleft())
        self.array = np.concatenate((self._edge, *self._outputs, self._edge))
