"""What an engine has counted and how it stands at one moment, for readers on other threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specdec.engine import Counts, Engine
from specdec.metrics.watch import Watch


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies of numbers; nothing in it changes."""

    counters: Mapping[str, int]
    """Fields of Stats, by name."""
    by_depth: Mapping[str, Mapping[int, int]]
    """Drafted, reached and accepted nodes; depths count from 1."""
    by_drafter: Mapping[str, Mapping[str, int]]
    """Nodes drafted and accepted, by their source; asks, hits and misses, by drafter."""
    seconds: Mapping[str, float]
    """By phase."""
    plain_seconds: float
    speedup: float
    tokens_per_pass: float
    counts: Counts
    collapsed: Mapping[str, bool]
    """By drafter."""
    cached: bool
    """Is there a prefix cache?"""

    @classmethod
    def of(cls, engine: Engine, watch: Watch) -> Snapshot:
        """Of an engine, taken on its own thread. ``watch`` has a look at it."""
        stats = engine.stats
        watch.look(stats)
        return cls(
            counters={name: getattr(stats, name) for name in COUNTERS},
            by_depth={name: dict(getattr(stats, f"{name}_by_depth")) for name in ("drafted", "reached", "accepted")},
            by_drafter={
                name: dict(getattr(stats, f"{name}_by_drafter")) for name in ("drafted", "accepted", "asked", "hits", "misses")
            },
            seconds=stats.seconds,
            plain_seconds=stats.plain_seconds,
            speedup=engine.recent.speedup,
            tokens_per_pass=engine.recent.tokens_per_pass,
            counts=engine.counts(),
            collapsed={name: share.collapsed for name, share in watch.shares.items()},
            cached=engine.cache is not None,
        )

    def at_rest(self) -> Snapshot:
        """The same once nothing runs, waits, or holds anything: of an engine that has failed, whose requests have ended."""
        return replace(self, counts=Counts(running=0, waiting=0, blocks=self.counts.blocks, blocks_used=0, blocks_cached=0))


COUNTERS = (
    "target_passes",
    "prefill_passes",
    "prompt_rows",
    "prompt_tokens",
    "cached_tokens",
    "emitted",
    "proposed",
    "drafts",
    "drafted",
    "accepted",
    "quiet_passes",
    "preemptions",
)
"""Fields of Stats."""
