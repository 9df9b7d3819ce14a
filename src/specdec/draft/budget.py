"""Which drafters are asked, and how many of their nodes are verified: what a pass costs against what it may gain.

Every node has a *chance*, the probability that it will be accepted (chances.py). A pass emits one token and, on average, the
sum of the chances of its nodes. Nodes of all sequences are taken together, best first, as many as make tokens per second
largest (a child's chance never exceeds its parent's, so what is taken is a tree). Asking costs time as well: gates.py decides
who is asked. None of this can change a token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from specdec.draft.base import Drafter
from specdec.draft.chances import Chances, Kind
from specdec.draft.gates import GOOD, Gates
from specdec.draft.merge import Merge, overlay
from specdec.draft.observers import Observers
from specdec.draft.worth import Worth
from specdec.metrics.stats import Stats
from specdec.runner.cost import Costs
from specdec.tree import depths, main_path, prune
from specdec.types import NO_DRAFT, ROOT, Draft, Forward, Sequence, Step, Verdict


@dataclass(slots=True)
class _Plan:
    """One sequence's part in a pass, from the proposal to the verdict."""

    proposed: Draft
    depth: list[int]
    kinds: list[Kind]
    chances: list[float]
    asked: dict[str, bool]
    """Drafters, and whether each was asked behind a good draft of others."""
    fixed: bool
    """Is what is verified decided beforehand, and not by what it costs?"""
    kept: list[int]
    """Nodes that are verified."""
    expected: float = 1.0
    """Tokens that the pass is expected to emit for this sequence."""
    per_token: float = 0.0
    """Seconds that a token takes in plain decoding."""
    per_row: float = 0.0
    """Seconds that a verified node adds to the pass."""


class Budget:
    """Asks drafters and cuts their drafts to what pays.

    Args:
        drafter: a merge is asked part by part.
        costs: of a pass; whoever runs passes lets them follow.
        stats: counters over all sequences.
        clock: gives seconds.
        by_chance: what is verified decides, above temperature 0, which tokens come out. So it may not depend on the clock, or
            a seed would not give them again: every drafter is asked, and all that it proposes is verified.
        chains: what is verified so must be a chain: of a tree that is a function of the text, the likeliest path.
    """

    def __init__(
        self,
        drafter: Drafter,
        costs: Costs,
        stats: Stats,
        clock: Callable[[], float],
        *,
        by_chance: bool = False,
        chains: bool = False,
    ) -> None:
        self.costs = costs
        self._drafters = drafter.drafters if isinstance(drafter, Merge) else (drafter,)
        self._predicting = {part.prediction: part.name for part in self._drafters if part.prediction}
        self._stats = stats
        self._clock = clock
        self._by_chance, self._chains = by_chance, chains
        self._chances = Chances()
        self._plans: dict[int, _Plan] = {}
        self._asked: dict[int, dict[str, bool]] = {}
        self._gates = Gates()
        self._observers = Observers(self._drafters, self._gates, clock, whole=by_chance)
        self._chosen = 0.0
        self._worth = Worth(costs)

    def propose(self, sequences: Many[Sequence], limits: Many[int], rows: int) -> list[Draft]:
        """A draft to verify for each sequence whose next token this pass gives.

        Args:
            limits: most nodes of each.
            rows: of the pass without any draft, those of other sequences' prompts among them.
        """
        self._asked, self._plans = {}, {}
        if not self._by_chance:
            self._gates.gather(len(sequences))
            rests = self._gates.rests
            limits = [0 if rests(s.id) else limit for s, limit in zip(sequences, limits, strict=True)]
            if not any(limits):
                return [NO_DRAFT] * len(sequences)
        per_token = self._worth.token(len(sequences), rows)
        ask = functools.partial(self._ask, None if self._by_chance else (per_token, self._worth.row(len(sequences), rows)))
        started = self._clock()
        if len(self._drafters) == 1:
            proposed = ask(self._drafters[0], sequences, limits, [0.0] * len(sequences))
        else:
            proposed = overlay(self._drafters, sequences, limits, ask)
        if not self._by_chance:
            for sequence, limit in zip(sequences, limits, strict=True):
                if limit and sequence.id not in self._asked:
                    self._gates.rest(sequence.id)
        if not self._asked:
            return proposed
        asked = self._clock()
        at = [i for i, sequence in enumerate(sequences) if sequence.id in self._asked]
        plans = [self._plan(sequences[i], proposed[i]) for i in at]
        self._plans = {sequences[i].id: plan for i, plan in zip(at, plans, strict=True)}
        kept = self._choose(plans, len(sequences), rows, asked - started + len(sequences) * per_token)
        self._settle(plans, kept, rows, per_token)
        for i, nodes in zip(at, kept, strict=True):
            if len(nodes) < len(proposed[i]):
                proposed[i] = prune(proposed[i], nodes)
        self._chosen = (self._clock() - asked) / len(plans)
        return proposed

    def _ask(
        self,
        worth: tuple[float, float] | None,
        drafter: Drafter,
        sequences: Many[Sequence],
        limits: Many[int],
        found: Many[float],
    ) -> list[Draft]:
        """Ask a drafter for those sequences for which it pays or is due; empty drafts for the others.

        Args:
            worth: as ``Drafter.weigh`` takes it; None where costs play no part.
            found: tokens of the drafts so far that are expected to be accepted.
        """
        name, opens = drafter.name, self._gates.opens
        askers: list[int] = []
        unread: list[Sequence] = []
        n_unread = 0
        for i, sequence in enumerate(sequences):
            if limits[i] <= 0 or not _allowed(sequence, name):
                continue
            if self._fixed(sequence) or opens(sequence, drafter, found[i] >= GOOD):
                askers.append(i)
                if n := drafter.unread(sequence):
                    unread.append(sequence)
                    n_unread += n
        drafts = [NO_DRAFT] * len(sequences)
        if not askers:
            return drafts
        if worth:
            drafter.weigh(*worth)
        if unread:
            started = self._clock()
            drafter.read(unread)
            self._gates.read(name, (self._clock() - started) / n_unread)
        started = self._clock()
        proposed = drafter.propose([sequences[i] for i in askers], [limits[i] for i in askers])
        self._gates.asked(name, (self._clock() - started) / len(askers))
        for i, draft in zip(askers, proposed, strict=True):
            if len(draft) > limits[i]:
                raise RuntimeError(f"{name} drafted {len(draft)} nodes where {limits[i]} were granted")
            self._asked.setdefault(sequences[i].id, {})[name] = found[i] >= GOOD
            drafts[i] = draft
        return drafts

    def _plan(self, sequence: Sequence, draft: Draft) -> _Plan:
        depth = depths(draft.tree)
        kinds, chances = self._chances.of(sequence.id, draft, depth)
        return _Plan(draft, depth, kinds, chances, self._asked[sequence.id], self._fixed(sequence), [])

    def _fixed(self, sequence: Sequence) -> bool:
        return self._by_chance and not sequence.params.greedy

    def _choose(self, plans: Many[_Plan], n: int, rows: int, spent: float) -> list[list[int]]:
        """For each plan the nodes to verify: those that make the expected tokens per second of n decoding sequences largest.

        Prompts that are read in the same pass take their time whether drafts are verified or not, and it is spent on later
        tokens. Were it counted, a pass would seem so dear that nodes of little chance could ride on it.

        Args:
            spent: seconds that the n sequences' tokens take without any node.
        """
        kept: list[list[int]] = [[] for _ in plans]
        tokens = float(n)
        seconds = self.costs.seconds
        fixed = spent - seconds(rows)
        pool: list[tuple[float, int, int]] = []
        for index, plan in enumerate(plans):
            if plan.proposed.q is None and not plan.fixed:
                pool += [(-chance, index, node) for node, chance in enumerate(plan.chances)]
            else:
                # Whether a sampled node is verified must not depend on its token: its number was limited before it was drawn.
                chain = self._chains and plan.fixed and plan.proposed.q is None
                kept[index] = main_path(plan.proposed) if chain else list(range(len(plan.proposed)))
                tokens += sum(plan.chances[node] for node in kept[index])
                rows += len(kept[index])
        pool.sort()  # of equal chances the earlier node first, so parents before children
        best, count = tokens / (fixed + seconds(rows)), 0
        for added, (chance, _, _) in enumerate(pool, start=1):
            tokens -= chance
            rate = tokens / (fixed + seconds(rows + added))
            if rate > best:
                best, count = rate, added
        for _, index, node in pool[:count]:
            kept[index].append(node)
        return kept

    def _settle(self, plans: Many[_Plan], kept: Many[list[int]], rows: int, per_token: float) -> None:
        """Note what is expected of the pass, and at which prices what comes of it will be weighed."""
        n = sum(map(len, kept))
        per_row = (self.costs.seconds(rows + n) - self.costs.seconds(rows)) / n if n else 0.0
        for plan, nodes in zip(plans, kept, strict=True):
            plan.kept, plan.per_token, plan.per_row = nodes, per_token, per_row
            plan.expected = 1 + sum(plan.chances[node] for node in nodes)

    def observe(self, step: Step, forward: Forward, verdicts: Many[Verdict | None]) -> None:
        """Score what was proposed against what was emitted, then let the drafters learn."""
        asked: dict[str, list[int]] = {}  # drafter -> the spans for which it was asked
        self._worth.ran(step)
        began, scored = self._clock(), 0
        for i, (span, verdict) in enumerate(zip(step, verdicts, strict=True)):
            if verdict is None:
                continue
            plan = self._plans.get(span.sequence.id)
            if plan is None:
                self._note(span.sequence, 0, (), 1.0)
            else:
                tree = span.draft.tree
                self._score(span.sequence, plan, [*(tree.tokens[node] for node in verdict.path), verdict.token])
                for name in plan.asked:
                    asked.setdefault(name, []).append(i)
                scored += 1
        if scored:
            self._gates.handled(self._chosen + (self._clock() - began) / scored)
        self._plans = {}
        self._observers.observe(step, forward, verdicts, asked, self._worth.host + self.costs.seconds(len(verdicts)))

    def _score(self, sequence: Sequence, plan: _Plan, emitted: list[int]) -> None:
        draft = plan.proposed
        right = self._chances.score(sequence.id, draft, plan.depth, plan.kinds, emitted)
        saved = dict.fromkeys(plan.asked, 0.0)
        hits = {self._drafter_of(draft.sources[node]) for node in right if node != ROOT}
        for node in plan.kept:
            source = self._drafter_of(draft.sources[node])
            if source in saved:
                # Half what came of it, which is true but noisy, half what was expected, which is steady but may be wrong.
                share = ((node in right) + plan.chances[node]) / 2
                saved[source] += share * plan.per_token - plan.per_row
        for stats in (self._stats, sequence.stats):
            stats.record_asks(plan.asked, hits)
        for name, seconds in saved.items():
            self._gates.close(sequence.id, (name, plan.asked[name]), seconds, name in hits, plan.per_token)
        self._note(sequence, len(draft), tuple(plan.asked), plan.expected)

    def _drafter_of(self, source: str) -> str:
        """The drafter whose node carries this source."""
        return self._predicting.get(source, source)

    def _note(self, sequence: Sequence, proposed: int, asked: Many[str], expected: float) -> None:
        for stats in (self._stats, sequence.stats):
            stats.record_plan(proposed, asked, expected)

    def follow(self, host: float) -> None:
        """Take note of the seconds of a step beside its pass and its drafting."""
        self._worth.follow(host)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that ended."""
        self._chances.release(sequence.id)
        self._plans.pop(sequence.id, None)
        self._gates.release(sequence.id)
        for drafter in self._drafters:
            drafter.release(sequence)

    def clear(self) -> None:
        """Forget sequences, and what drafters and gates learned; what passes and steps cost stays. Only between requests."""
        self._chances.clear()
        self._plans = {}
        self._gates.clear()
        for drafter in self._drafters:
            drafter.clear()


def _allowed(sequence: Sequence, name: str) -> bool:
    """May this drafter be asked for this sequence?"""
    drafters = sequence.speculation.drafters
    return drafters is None or name in drafters
