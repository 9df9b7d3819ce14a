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

import itertools
from array import array
from collections import deque
from collections.abc import Sequence as Many

from specdec.config import SpeculationConfig
from specdec.draft.base import Drafter
from specdec.draft.continuations import GAP, Ints, gaps, make_search
from specdec.draft.stores import Stores
from specdec.types import NO_DRAFT, Draft, Sequence, Tree


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
            return NO_DRAFT
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
        if not best.tokens:
            return NO_DRAFT
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
        return sum(past.n_bytes for past in self._global.values) + sum(text.n_bytes for text in self._local.values())

    def _text(self, sequence: Sequence) -> Text:
        text = self._local.get(sequence.id)
        if text is None:
            text = self._local[sequence.id] = Text(self._config.suffix_depth)
        return text


class Text:
    """The tokens of one request in an array that grows by doubling, with ``depth`` gaps or more at either end."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._tokens: list[int] = []
        self._n = 0
        self.array = gaps(2 * depth)

    def follow(self, tokens: list[int]) -> None:
        """Take in what was appended to ``tokens``; start over where it is another list, or one that lost some."""
        if tokens is not self._tokens or len(tokens) < self._n:
            self.array = gaps(len(self.array))
            self._tokens, self._n = tokens, 0
        start, stop = self._depth + self._n, self._depth + len(tokens)
        if stop + self._depth > len(self.array):
            self.array = self.array[:start] + gaps(2 * (stop + self._depth) - start)
        self.array[start:stop] = array("i", tokens[self._n :])
        self._n = len(tokens)

    @property
    def tail(self) -> Ints:
        """The last ``depth`` tokens, or all of a shorter text."""
        stop = self._depth + self._n
        return self.array[max(self._depth, stop - self._depth) : stop]

    @property
    def n_bytes(self) -> int:
        return len(self.array) * self.array.itemsize


class Outputs:
    """Outputs of finished requests in one array, parted by gaps: at most ``capacity`` tokens and gaps, oldest out first.

    Of an output longer than that the end is kept.
    """

    def __init__(self, capacity: int, depth: int) -> None:
        self._capacity = capacity
        self._edge = gaps(depth)
        self._outputs: deque[Ints] = deque()
        self._n = 0
        self.array = self._edge

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def __len__(self) -> int:
        return len(self.array)

    def add(self, tokens: list[int]) -> None:
        if self._capacity < 2 or not tokens:
            return
        output = array("i", [*tokens[1 - self._capacity :], GAP])
        self._outputs.append(output)
        self._n += len(output)
        while self._n > self._capacity:
            self._n -= len(self._outputs.popleft())
        self.array = array("i", itertools.chain(self._edge, *self._outputs, self._edge))

    @property
    def n_bytes(self) -> int:
        return len(self.array) * self.array.itemsize
