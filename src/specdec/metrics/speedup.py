"""How much faster decoding is than with speculation off, estimated while it runs.

The truth needs the same load twice. What can be had live is what the emitted tokens *would* have taken: of every pass it is
known how many sequences it served, how many rows of drafts it carried besides, how long its parts took, and, from the
measured costs of passes by their rows, which share of its forward is owed to those rows. Only this ratio of costs is used,
not the costs themselves: a machine that is slow today, or a long context, slows the passes with and without drafts alike.

Without drafts no drafter would have been asked, each pass would have had one row for each sequence that decodes, and the host
its work of one step. How many such passes? Every running sequence holds a place in the batch: one that decodes needs a pass
per token, one whose prompt is being read needs this pass either way. So of n that decode, k that read, and E tokens emitted,
(E + k) / (n + k) passes: E / n where nobody reads, and fewer otherwise, since without drafts decoding takes longer and reading
is hidden behind it. Each token is chosen once in either case (at temperature 0 refused nodes are looked at too, which costs
next to nothing), and the prompts' rows have to be run in either case, so those seconds stand on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from specdec.metrics.stats import Seconds

MEMORY_SECONDS = 60.0
"""Live figures are means over about this much time spent in passes; older ones fade."""


class Pass(NamedTuple):
    """One step of the engine: its rows, what came of it, and the seconds of its parts."""

    rows: int
    sequences: int
    """Those that were due their next token; each has one row that is neither a prompt's nor a draft's."""
    reading: int
    """Running sequences that were not, because their prompts are being read."""
    drafted: int
    """Rows of drafts."""
    emitted: int
    spent: Seconds
    """Drafting, in the forward, verifying, and the host's."""

    @property
    def seconds(self) -> float:
        return sum(self.spent)

    @property
    def plain_passes(self) -> float:
        """Passes without drafts that would have done the same."""
        running = self.sequences + self.reading
        return (self.emitted + self.reading) / running if self.emitted else 1.0


class Plain(NamedTuple):
    """What passes without drafts would have taken in place of one that ran, its rows of prompts being read too."""

    one: float
    """Seconds of one such pass."""
    prompts: float
    """Seconds of what would have to be run however many of them there are."""

    def seconds(self, passes: float) -> float:
        """Of so many: ``Pass.plain_passes`` do the same for the whole batch, and the number of tokens that one sequence emitted
        gives the time that this sequence would have waited."""
        return passes * self.one + self.prompts


def plain(done: Pass, cost: Callable[[int], float]) -> Plain:
    """Estimate them.

    Args:
        done: what really ran.
        cost: measured seconds of a forward by its rows, >= 1; only its ratios matter.
    """
    _, forward, verify, host = done.spent
    if not done.emitted:
        return Plain(0.0, forward + verify + host)
    whole, decoding = cost(done.rows), done.sequences + done.drafted
    prompts = forward * (1 - cost(decoding) / whole) if done.rows > decoding else 0.0
    rows = done.emitted / done.plain_passes
    choosing = verify * rows / done.emitted
    return Plain(forward * _between(cost, rows) / whole + choosing + host, prompts)


def _between(cost: Callable[[int], float], rows: float) -> float:
    """The cost of a mean number of rows."""
    below = int(rows)
    return cost(below) + (rows - below) * (cost(below + 1) - cost(below)) if rows > below else cost(below)


class Recent:
    """Figures of the engine over about the last minute that it spent in passes."""

    def __init__(self, memory: float = MEMORY_SECONDS) -> None:
        self._memory = memory
        self._spent = self._plain = self._passes = self._emitted = 0.0

    def add(self, spent: float, plain: float, passes: int, emitted: int) -> None:
        """Take in one step.

        Args:
            spent: seconds.
            plain: what ``plain`` gives for it.
            passes: target passes in it, one per sequence that was due its next token.
            emitted: tokens.
        """
        keep = math.exp(-spent / self._memory)
        self._spent = self._spent * keep + spent
        self._plain = self._plain * keep + plain
        self._passes = self._passes * keep + passes
        self._emitted = self._emitted * keep + emitted

    @property
    def speedup(self) -> float:
        """Over speculation off; 1 before anything ran."""
        return self._plain / self._spent if self._spent else 1.0

    @property
    def tokens_per_pass(self) -> float:
        """τ; 0 before the first target pass."""
        return self._emitted / self._passes if self._passes else 0.0
