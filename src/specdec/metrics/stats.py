"""Plain counters of what drafting and verification did, per sequence and for the whole engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from specdec.types import ROOT, Draft

PHASES = ("draft", "forward", "verify", "host")
Seconds: TypeAlias = tuple[float, float, float, float]
"""Of a pass, by phase."""
MOST_PASSES = 256
"""Kept before they are summed up."""


@dataclass(slots=True)
class Stats:
    """Counts and seconds; a fresh one is all zeros.

    A *target pass* is a forward pass whose logits were used to emit tokens. Passes over parts of a prompt that emit
    nothing are counted apart. A depth is *reached* when the walk stood at a node that had children at that depth.
    *proposed* nodes came from drafters, *drafted* ones among them were verified, the others were not worth their rows.
    *cached* tokens of a prompt need no rows: the prefix cache had them when the prompt was first read. A prompt's tokens
    count once it has been read to its end. A *draft* is what was verified of one sequence in one target pass, if anything.
    A *quiet* pass is a target pass for which no drafter was asked. *expected* tokens were foreseen when nodes were chosen.
    A drafter's ask is a *hit* where some of its nodes agreed with what came, verified or not, and a *miss* where no drafter's
    did; where only another's did, it is neither. *plain* seconds are what the same tokens would have taken with speculation
    off, an estimate (metrics/speedup.py).
    """

    acceptance: str | None = None
    """The rule by which drafted tokens were accepted, where it is not the coupled one."""
    lossy: bool = False
    """Does the rule not even keep the target's law?"""
    target_passes: int = 0
    prefill_passes: int = 0
    prompt_rows: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    emitted: int = 0
    proposed: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    quiet_passes: int = 0
    expected: float = 0.0
    preemptions: int = 0
    drafted_by_depth: Counter[int] = field(default_factory=Counter)
    reached_by_depth: Counter[int] = field(default_factory=Counter)
    accepted_by_depth: Counter[int] = field(default_factory=Counter)
    asked_by_drafter: Counter[str] = field(default_factory=Counter)
    drafted_by_drafter: Counter[str] = field(default_factory=Counter)
    accepted_by_drafter: Counter[str] = field(default_factory=Counter)
    hits_by_drafter: Counter[str] = field(default_factory=Counter)
    misses_by_drafter: Counter[str] = field(default_factory=Counter)
    _sums: list[float] = field(default_factory=lambda: [0.0] * (len(PHASES) + 1))
    """Seconds by phase and plain ones, of passes that have been summed up."""
    _passes: list[tuple[Seconds, float]] = field(default_factory=list)
    """Those that have not: every sequence has one more after each pass, and to sum them up then would take as many cold looks
    at memory as there are sequences."""

    @property
    def seconds(self) -> dict[str, float]:
        """Spent, by phase."""
        return dict(zip(PHASES, self._sum(), strict=False))

    @property
    def plain_seconds(self) -> float:
        return self._sum()[-1]

    def add_pass(self, spent: Seconds, plain: float) -> None:
        """Count what a pass took, and what it would have taken with speculation off."""
        self._passes.append((spent, plain))
        if len(self._passes) >= MOST_PASSES:
            self._sum()

    def _sum(self) -> list[float]:
        if self._passes:
            spent, plain = zip(*self._passes, strict=True)
            columns = (*zip(*spent, strict=True), plain)
            self._sums = [before + sum(column) for before, column in zip(self._sums, columns, strict=True)]
            self._passes = []
        return self._sums

    @property
    def tokens_per_pass(self) -> float:
        """τ: mean tokens emitted per target pass, the corrected or bonus token included; 0 before the first pass."""
        return self.emitted / self.target_passes if self.target_passes else 0.0

    @property
    def speedup(self) -> float:
        """Over speculation off, estimated; 1 before anything ran."""
        spent = sum(self.seconds.values())
        return self.plain_seconds / spent if spent else 1.0

    def record_plan(self, proposed: int, asked: Collection[str], expected: float) -> None:
        """Count what was decided for one target pass.

        Args:
            proposed: nodes that drafters proposed.
            asked: names of the drafters that were asked.
            expected: tokens that the pass was to emit, on average.
        """
        self.proposed += proposed
        self.quiet_passes += not asked
        for name in asked:
            self.asked_by_drafter[name] += 1
        self.expected += expected

    def record_asks(self, asked: Collection[str], right: Collection[str]) -> None:
        """Count what became of one pass's asks.

        Args:
            asked: names of the drafters that were asked.
            right: names of those of whose nodes some agreed with what came.
        """
        for name in asked:
            if name in right:
                self.hits_by_drafter[name] += 1
            elif not right:
                self.misses_by_drafter[name] += 1

    def record_burst(self, draft: Draft, depths: list[int], path: tuple[int, ...], emitted: int) -> None:
        """Count one target pass.

        Args:
            draft: what was verified.
            depths: depth of each node, 1 for one that follows the pending token.
            path: the accepted nodes that were really emitted.
            emitted: tokens that were really emitted.
        """
        self.target_passes += 1
        self.emitted += emitted
        if not len(draft):
            return
        self.drafts += 1
        self.drafted += len(draft)
        self.accepted += len(path)
        for depth, source in zip(depths, draft.sources, strict=True):
            self.drafted_by_depth[depth] += 1
            self.drafted_by_drafter[source] += 1
        for depth, node in enumerate(path, start=1):
            self.reached_by_depth[depth] += 1
            self.accepted_by_depth[depth] += 1
            self.accepted_by_drafter[draft.sources[node]] += 1
        last = path[-1] if path else ROOT
        if last in draft.tree.parents:
            self.reached_by_depth[len(path) + 1] += 1

    def as_dict(self) -> dict[str, Any]:
        """Everything, as plain values for JSON; depths count from 1."""
        return {
            **({} if self.acceptance is None else {"acceptance": self.acceptance, "lossy": self.lossy}),
            "target_passes": self.target_passes,
            "prefill_passes": self.prefill_passes,
            "prompt_rows": self.prompt_rows,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "emitted": self.emitted,
            "proposed": self.proposed,
            "drafts": self.drafts,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "quiet_passes": self.quiet_passes,
            "tokens_per_pass": self.tokens_per_pass,
            "expected_tokens_per_pass": self.expected / self.target_passes if self.target_passes else 0.0,
            "preemptions": self.preemptions,
            "drafted_by_depth": _by_depth(self.drafted_by_depth),
            "reached_by_depth": _by_depth(self.reached_by_depth),
            "accepted_by_depth": _by_depth(self.accepted_by_depth),
            "asked_by_drafter": dict(self.asked_by_drafter),
            "drafted_by_drafter": dict(self.drafted_by_drafter),
            "accepted_by_drafter": dict(self.accepted_by_drafter),
            "hits_by_drafter": dict(self.hits_by_drafter),
            "misses_by_drafter": dict(self.misses_by_drafter),
            "plain_seconds": self.plain_seconds,
            "speedup": self.speedup,
            "seconds": self.seconds,
        }


def _by_depth(counts: Counter[int]) -> list[int]:
    """Counts as a list, depth 1 first."""
    return [counts[depth] for depth in range(1, max(counts, default=0) + 1)]
