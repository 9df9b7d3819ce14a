"""Notices when a drafter's acceptance has collapsed: its weights or its cache are damaged, or the texts have changed.

The measure is the share of asks in which some of the drafter's nodes agreed with what came, whether they were verified or
not (``Stats``: hits and misses). So neither a busy machine, on which fewer nodes are worth their rows, nor a better drafter
beside it looks like a collapse, and a drafter that falls silent does.

The rule, for each drafter: a *recent* share over about the last 128 asks and the *usual* share over about the last 16 384.
The alarm goes on when recent < usual / 4, and off when recent > usual / 2. It stays off until 512 asks have been seen, and
while the usual share is below 0.2: of a drafter that is seldom right a quarter of that is chance. What lasts becomes usual:
after tens of thousands of asks at the new share the alarm goes off by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.metrics.stats import Stats

RECENT, USUAL = 128, 16_384
"""Asks that the two shares remember."""
KNOWN = 512
"""Asks before a drafter is judged."""
LEAST = 0.2
"""Usual share below which there is nothing to collapse."""
ON, OFF = 1 / 4, 1 / 2
"""Of the usual share."""


@dataclass(slots=True)
class Share:
    """One drafter's shares of hits."""

    recent: float = 0.0
    usual: float = 0.0
    asks: int = 0
    collapsed: bool = False

    def add(self, hits: int, misses: int) -> None:
        """Take in asks, as if hits were spread evenly among them: of a few passes, so that this hardly differs from how they
        came."""
        n = hits + misses
        self.recent = _mean(self.recent, self.asks, RECENT, hits / n, n)
        self.usual = _mean(self.usual, self.asks, USUAL, hits / n, n)
        self.asks += n
        if self.asks < KNOWN or self.usual < LEAST:
            self.collapsed = False
        elif self.recent < ON * self.usual:
            self.collapsed = True
        elif self.recent > OFF * self.usual:
            self.collapsed = False


def _mean(mean: float, seen: int, memory: int, new: float, n: int) -> float:
    """The mean of all that was seen, and once that is more than the memory, one in which older values fade; after ``n`` more
    whose own mean is ``new``."""
    first = min(n, max(0, memory - seen))  # those that still fill the memory
    if first:
        mean += (new - mean) * first / (seen + first)
    return new + (mean - new) * (1 - 1 / memory) ** (n - first)


class Watch:
    """Follows an engine's counters; to be shown them often."""

    def __init__(self) -> None:
        self.shares: dict[str, Share] = {}
        self._seen: dict[str, tuple[int, int]] = {}

    def look(self, stats: Stats) -> None:
        """Take in what has been counted since the last look."""
        for name in stats.asked_by_drafter:
            now = stats.hits_by_drafter[name], stats.misses_by_drafter[name]
            hits, misses = self._seen.get(name, (0, 0))
            if now != (hits, misses):
                self._seen[name] = now
                self.shares.setdefault(name, Share()).add(now[0] - hits, now[1] - misses)
