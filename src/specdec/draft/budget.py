"""Which drafters are asked, and how many of their nodes are verified: what a pass costs against what it may gain.

Every node has a *chance*, the probability that it will be accepted: the drafter's own estimate, corrected by how often
estimates of that kind came true. A pass emits one token and, on average, the sum of the chances of its nodes. Nodes of all
sequences are taken together, best first, as many as make tokens per second largest (a child's chance never exceeds its
parent's, so what is taken is a tree). Asking costs time as well: a drafter that saves less than that for a sequence is
asked more and more seldom, but never so seldom that it would not be noticed when the text begins to suit it.

What was proposed is scored against what was emitted, whether it was verified or not, so a drafter that has fallen silent
need not be paid for with rows to show that it is right again. None of this can change a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from specdec.draft.base import Drafter
from specdec.draft.merge import Merge, overlay
from specdec.metrics.stats import Stats
from specdec.runner.cost import Costs
from specdec.tree import depths, main_path, prune
from specdec.types import ROOT, Draft, Forward, Sequence, Step, Verdict

Kind = tuple[str, int, int]
"""Nodes whose chances are alike: their drafter and the class of its estimate; or the depth, where it makes none."""

CLASSES = 8
"""Classes of estimates, of equal width."""

DEPTHS = 12
"""Depths told apart where the drafter makes no estimates; deeper nodes count as the last of them."""

MEMORY = 400, 30
"""Nodes of a kind that are remembered over all sequences, and of one sequence: older ones fade."""

WEIGHT = 6.0
"""Nodes that a prior counts for: the drafter's estimate against all sequences, and these against one sequence."""

PRIOR = 0.5
"""Chance of a node without an estimate before anything is known, given its parent."""

PROBING = 0.005
"""Most of the time of plain decoding that may go into asking a drafter that does not pay."""

GLANCES = 4
"""Of the sequences for which a thrifty drafter was not asked, it observes so many in one pass of so many."""

GOOD = 0.75
"""Tokens of others' drafts expected to be accepted, from which on a drafter's worth is judged apart: behind a long copy of
the prompt the same drafter saves less than where nothing was found."""

TRIALS = 8
"""Asks over which the time that a drafter saves is averaged, and so many a drafter that never helps is given at first."""

LATER = 4
"""Passes before a drafter is first asked for a new sequence where it has not paid for others."""


Door = tuple[str, bool]
"""A drafter, and whether others have already made a good draft."""


class Record:
    """How often nodes of each kind were accepted where their parents were; older observations fade."""

    def __init__(self, memory: int) -> None:
        self._keep = 1 - 1 / memory
        self._cells: dict[Kind, list[float]] = {}  # kind -> accepted, reached

    def chance(self, kind: Kind, prior: float, weight: float) -> float:
        """The share that was accepted, with ``weight`` imagined nodes of which ``prior`` were."""
        cell = self._cells.get(kind)
        return prior if cell is None else (cell[0] + weight * prior) / (cell[1] + weight)

    def add(self, kind: Kind, accepted: bool) -> None:
        cell = self._cells.setdefault(kind, [0.0, 0.0])
        cell[0] = cell[0] * self._keep + accepted
        cell[1] = cell[1] * self._keep + 1


@dataclass(slots=True)
class Gate:
    """Is a drafter worth its time for a sequence, and if not, when is it asked again?"""

    saved: float
    """Running mean of the seconds that asking saved, what the asking itself took not deducted."""
    interval: int = 1
    """Passes from one ask to the next."""
    waited: int = 0

    def opens(self) -> bool:
        """Called once for every pass in which the drafter could be asked."""
        self.waited += 1
        return self.waited >= self.interval

    def close(self, saved: float, right: bool, price: float, longest: int) -> None:
        """After an ask: ``right`` if one of its tokens was the next one, ``price`` is what it costs, ``longest`` the most
        passes to wait."""
        self.waited = 0
        # One very good draft is enough to open: text that begins to repeat goes on repeating.
        self.saved += (min(saved, TRIALS * price) - self.saved) / TRIALS
        if self.saved >= price:
            self.interval = 1
        else:
            self.interval = max(1, self.interval // 2 if right else min(2 * self.interval, longest))


@dataclass(slots=True)
class _Known:
    """What is known of one sequence."""

    record: Record
    gates: dict[Door, Gate] = field(default_factory=dict)


@dataclass(slots=True)
class _Plan:
    """One sequence's part in a pass, from the proposal to the verdict."""

    proposed: Draft
    depth: list[int]
    kinds: list[Kind]
    chances: list[float]
    asked: dict[str, bool] = field(default_factory=dict)
    """Drafters, and whether each was asked behind a good draft of others."""
    kept: list[int] = field(default_factory=list)
    """Nodes that are verified."""
    expected: float = 1.0
    """Tokens that the pass is expected to emit for this sequence."""
    per_token: float = 0.0
    """Seconds that a token takes in plain decoding."""
    per_row: float = 0.0
    """Seconds that a verified node adds to the pass."""
    fixed: bool = False
    """Is what is verified decided beforehand, and not by what it costs?"""


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
        self._record = Record(MEMORY[0])
        self._known: dict[int, _Known] = {}
        self._plans: dict[int, _Plan] = {}
        self._asked: dict[int, dict[str, bool]] = {}
        self._price: dict[str, float] = {}
        """Seconds of asking a drafter for one sequence, running mean."""
        self._watching: dict[str, float] = {}
        """Seconds in which a thrifty drafter observes one sequence, running mean: it does so seldom while it is not asked."""
        self._saved: dict[Door, float] = {}
        """Seconds that asking it saved, over all sequences; a new one starts from there."""
        self._chosen = 0.0
        self._handling: float | None = None
        """Seconds of choosing among a sequence's nodes and scoring them, running mean; 0 in passes in which none is asked."""
        self._passes = 0
        self._host = 0.0
        """Seconds of a step beside its pass and its drafting, running mean."""

    def propose(self, sequences: Many[Sequence], limits: Many[int], rows: int) -> list[Draft]:
        """A draft to verify for each sequence whose next token this pass gives.

        Args:
            limits: most nodes of each.
            rows: of the pass without any draft, those of other sequences' prompts among them.
        """
        self._asked, self._plans = {}, {}
        started = self._clock()
        if not self._by_chance:
            self._weigh(len(sequences), rows)
        if len(self._drafters) == 1:
            proposed = self._ask(self._drafters[0], sequences, limits, [0.0] * len(sequences))
        else:
            proposed = overlay(self._drafters, sequences, limits, self._ask)
        if not self._asked:
            return proposed
        asked = self._clock()
        at = {i: self._plan(s, proposed[i]) for i, s in enumerate(sequences) if s.id in self._asked}
        self._plans = {sequences[i].id: plan for i, plan in at.items()}
        plans = list(at.values())
        plain = self.costs.seconds(len(sequences))
        kept = self._choose(plans, len(sequences), rows, asked - started)
        self._settle(plans, kept, rows, (self._host + plain) / len(sequences))
        for i, nodes in zip(at, kept, strict=True):
            if len(nodes) < len(proposed[i]):
                proposed[i] = prune(proposed[i], nodes)
        self._chosen = (self._clock() - asked) / len(plans)
        return proposed

    def _weigh(self, n: int, rows: int) -> None:
        """Tell drafters what a token and a row of a pass for n sequences are worth."""
        plain = self.costs.seconds(rows)
        row = (self.costs.seconds(rows + 2 * n) - plain) / max(1, 2 * n)  # a row among the first few
        for drafter in self._drafters:
            drafter.weigh((self._host + plain) / max(1, n), row)

    def _ask(self, drafter: Drafter, sequences: Many[Sequence], limits: Many[int], found: Many[float]) -> list[Draft]:
        """Ask a drafter for those sequences for which it pays or is due; empty drafts for the others."""
        name = drafter.name
        drafts = [Draft()] * len(sequences)
        askers = [
            i
            for i, (sequence, limit) in enumerate(zip(sequences, limits, strict=True))
            if limit > 0
            and _allowed(sequence, name)
            and (self._gate(sequence, (name, found[i] >= GOOD)).opens() or self._fixed(sequence))
        ]
        if not askers:
            return drafts
        drafter.read([sequences[i] for i in askers])
        started = self._clock()
        proposed = drafter.propose([sequences[i] for i in askers], [limits[i] for i in askers])
        price = (self._clock() - started) / len(askers)
        self._price[name] = _blend(self._price.get(name), price)
        for i, draft in zip(askers, proposed, strict=True):
            if len(draft) > limits[i]:
                raise RuntimeError(f"{name} drafted {len(draft)} nodes where {limits[i]} were granted")
            self._asked.setdefault(sequences[i].id, {})[name] = found[i] >= GOOD
            drafts[i] = draft
        return drafts

    def _gate(self, sequence: Sequence, door: Door) -> Gate:
        known = self._known.get(sequence.id)
        if known is None:
            known = self._known[sequence.id] = _Known(Record(MEMORY[1]))
        gate = known.gates.get(door)
        if gate is None:
            # e times its price, where nothing is known, is what TRIALS asks in vain bring down to the price.
            cost = self._cost(door[0])
            saved = self._saved.get(door, math.e * cost)
            gate = known.gates[door] = Gate(saved, 1 if saved >= cost else LATER)
        return gate

    def _cost(self, name: str) -> float:
        """Seconds that asking a drafter for a sequence brings with it."""
        return self._price.get(name, 0.0) + self._watching.get(name, 0.0) + (self._handling or 0.0)

    def _plan(self, sequence: Sequence, draft: Draft) -> _Plan:
        """The chance of each node: its parent's, times that of being the next token then."""
        depth = depths(draft.tree)
        kinds: list[Kind] = []
        chances: list[float] = []
        if len(draft):
            mine = self._known[sequence.id].record
            estimates = draft.estimates
            for node, (parent, source) in enumerate(zip(draft.tree.parents, draft.sources, strict=True)):
                if estimates:
                    above = estimates[parent] if parent != ROOT else 1.0
                    prior = min(1.0, estimates[node] / above) if above > 0 else 0.0
                    kind = source, 0, min(int(prior * CLASSES), CLASSES - 1)
                else:
                    prior = self._record.chance((source, 0, CLASSES), PRIOR, WEIGHT)  # of this drafter at any depth
                    kind = source, min(depth[node], DEPTHS), CLASSES
                chance = mine.chance(kind, self._record.chance(kind, prior, WEIGHT), WEIGHT)
                kinds.append(kind)
                chances.append(chance if parent == ROOT else chance * chances[parent])
        return _Plan(draft, depth, kinds, chances, self._asked[sequence.id], fixed=self._fixed(sequence))

    def _fixed(self, sequence: Sequence) -> bool:
        return self._by_chance and not sequence.params.greedy

    def _choose(self, plans: Many[_Plan], n: int, rows: int, spent: float) -> list[list[int]]:
        """For each plan the nodes to verify: those that make the expected tokens per second of n decoding sequences largest.

        Prompts that are read in the same pass take their time whether drafts are verified or not, and it is spent on later
        tokens. Were it counted, a pass would seem so dear that nodes of little chance could ride on it.
        """
        kept: list[list[int]] = [[] for _ in plans]
        tokens = float(n)
        seconds = self.costs.seconds
        fixed = spent + self._host - (seconds(rows) - seconds(n))
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
            self._handling = _blend(self._handling, self._chosen + (self._clock() - began) / scored)
        self._plans = {}
        self._passes += 1
        for drafter in self._drafters:
            if drafter.thrifty:
                self._let_watch(drafter, step, forward, verdicts, asked.get(drafter.name, []))
            else:
                drafter.observe(step, forward, verdicts)

    def _let_watch(
        self, drafter: Drafter, step: Step, forward: Forward, verdicts: Many[Verdict | None], asked: list[int]
    ) -> None:
        """Have a thrifty drafter observe the spans for which it was asked, and now and then some of the others."""
        spans = asked
        if self._passes % GLANCES == 0:
            others = [i for i, verdict in enumerate(verdicts) if verdict is not None and i not in asked]
            start = self._passes // GLANCES * GLANCES % max(1, len(others))  # in turn, where there are more than that
            spans = sorted([*asked, *(others[start:] + others[:start])[:GLANCES]])
        if not spans:
            return
        started = self._clock()
        if len(spans) < len(verdicts):
            step = Step(tuple(step.spans[i] for i in spans))
            forward = Forward(forward.logits, tuple(forward.rows[i] for i in spans))
            verdicts = [verdicts[i] for i in spans]
        drafter.observe(step, forward, verdicts)
        seconds = (self._clock() - started) / len(spans)
        self._watching[drafter.name] = _blend(self._watching.get(drafter.name), seconds)

    def _score(self, sequence: Sequence, plan: _Plan, emitted: list[int]) -> None:
        draft, known = plan.proposed, self._known.get(sequence.id)
        right = {ROOT}  # nodes that agree with what was emitted
        if known is not None:
            for node, (token, parent) in enumerate(zip(draft.tree.tokens, draft.tree.parents, strict=True)):
                depth = plan.depth[node]
                if parent in right and depth <= len(emitted):
                    accepted = token == emitted[depth - 1]
                    kind = plan.kinds[node]
                    known.record.add(kind, accepted)
                    self._record.add(kind, accepted)
                    if not draft.estimates:
                        self._record.add((kind[0], 0, CLASSES), accepted)
                    if accepted:
                        right.add(node)
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
                price = self._cost(name)
                door = name, plan.asked[name]
                known.gates[door].close(seconds, name in hits, price, math.ceil(price / (PROBING * plan.per_token)))
                mean = self._saved.get(door, math.e * price)
                self._saved[door] = mean + (seconds - mean) / (4 * TRIALS)
        self._note(sequence, len(draft), tuple(plan.asked), plan.expected)

    def _drafter_of(self, source: str) -> str:
        """The drafter whose node carries this source."""
        return self._predicting.get(source, source)

    def _note(self, sequence: Sequence, proposed: int, asked: Many[str], expected: float) -> None:
        for stats in (self._stats, sequence.stats):
            stats.record_plan(proposed, asked, expected)

    def follow(self, host: float) -> None:
        """Take note of the seconds of a step beside its pass and its drafting."""
        self._host = _blend(self._host, host)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that ended."""
        self._known.pop(sequence.id, None)
        self._plans.pop(sequence.id, None)
        for drafter in self._drafters:
            drafter.release(sequence)

    def clear(self) -> None:
        """Forget everything but the costs of passes, also what drafters learned; only between requests."""
        self._record = Record(MEMORY[0])
        self._known, self._plans = {}, {}
        self._price, self._watching, self._saved = {}, {}, {}
        for drafter in self._drafters:
            drafter.clear()


def _allowed(sequence: Sequence, name: str) -> bool:
    """May this drafter be asked for this sequence?"""
    drafters = sequence.speculation.drafters
    return drafters is None or name in drafters


def _blend(mean: float | None, value: float) -> float:
    """A running mean of seconds that a single outlier moves little."""
    return mean + (min(value, 4 * mean) - mean) / 16 if mean else value
