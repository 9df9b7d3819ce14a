"""Random numbers beside the noise of the target: for rules that decide by chance, and for drafters that draw their tokens.

A stream is a pure function of (seed, position, purpose), by a counter-based generator (Philox, Salmon et al. 2011), so what
comes out of it does not depend on what else runs. Streams of different positions or purposes share no numbers, with each
other or with the Gumbel noise that plain decoding draws its tokens by.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Purpose = Literal["judging", "drafting"]
_KEYS: dict[Purpose, int] = {"judging": 1, "drafting": 2}


class Stream:
    """Numbers of one burst of a sequence, as many as it takes.

    Args:
        seed: of the sequence, in [0, 2^63).
        position: of the first token that the burst decides; every burst emits one, so no two have the same.
        purpose: the numbers that a draft is made with must not be those that it is judged with.
    """

    def __init__(self, seed: int, position: int, purpose: Purpose) -> None:
        # The counter is 256 bits wide and runs from its low end, the position stands at its high end.
        self._generator = np.random.Generator(np.random.Philox(counter=[0, 0, 0, position], key=[seed, _KEYS[purpose]]))

    def uniform(self) -> float:
        """A number in [0, 1), a multiple of 2^-53."""
        return float(self._generator.random())

    def draw(self, p: Tensor | NDArray[np.float64]) -> int:
        """An index with the probabilities [V] float64 that it is given, which need not add up to 1 exactly; never one of 0."""
        weights = np.asarray(p)
        possible = np.flatnonzero(weights)
        below = np.cumsum(weights[possible])
        index = int(np.searchsorted(below, self.uniform() * below[-1], side="right"))
        return int(possible[min(index, len(possible) - 1)])  # the product may be rounded up to the whole
