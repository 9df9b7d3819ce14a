"""The engine's counters and gauges at one moment, for readers on other threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from specdec.engine import Counts
from specdec.metrics.stats import Stats


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies of numbers; nothing in it changes."""

    counters: Mapping[str, int]
    drafted: Mapping[str, int]
    """Verified nodes by drafter."""
    accepted: Mapping[str, int]
    """Emitted nodes by drafter."""
    gauges: Mapping[str, int]

    @classmethod
    def of(cls, stats: Stats, counts: Counts) -> Snapshot:
        """Of an engine's ``stats`` and what its ``counts()`` gives."""
        return cls(
            {name: getattr(stats, name) for name in COUNTERS},
            dict(stats.drafted_by_drafter),
            dict(stats.accepted_by_drafter),
            {name: getattr(counts, name) for name in GAUGES},
        )


COUNTERS = (
    "target_passes",
    "prefill_passes",
    "prompt_rows",
    "cached_tokens",
    "emitted",
    "proposed",
    "drafted",
    "accepted",
    "quiet_passes",
    "preemptions",
)
"""Fields of Stats."""
GAUGES = tuple(field.name for field in fields(Counts))
