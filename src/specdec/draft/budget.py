"""Which drafters are asked, and how many of their nodes are verified: what a pass costs against what it may gain.

Every node has a *chance*, the probability that it will be accepted: the drafter's own estimate, corrected by how often
estimates of that kind came true. A pass emits one token and, on average, the sum of the chances of its nodes. Nodes of all
sequences are taken together, best first, as many as make tokens per second largest (a child's chance never exceeds its
parent's, so what is taken is a tree). Asking costs time as well: gates.py decides who is asked.

What was proposed is scored against what was emitted, whether it was verified or not, so a drafter that has fallen silent
need not be paid for with rows to show that it is right again. None of this can change a token.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from specdec.draft.base import Drafter
from specdec.draft.gates import GLANCES, GOOD, Gates, blend
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
        self._known: dict[int, Record] = {}
        self._plans: dict[int, _Plan] = {}
        self._asked: dict[int, dict[str, bool]] = {}
        self._gates = Gates()
        self._chosen = 0.0
        self._since_glance, self._turn = 0, 0
        self._glance_every = GLANCES
        self._token = self._row = 0.0
        """Seconds that a token and a row of the pass are worth."""
        self._host = 0.0
        """Seconds of a step beside its pass and its drafting, running mean."""

    def propose(self, sequences: Many[Sequence], limits: Many[int], rows: int) -> list[Draft]:
        """A draft to verify for each sequence whose next token this pass gives.

        Args:
            limits: most nodes of each.
            rows: of the pass without any draft, those of other sequences' prompts among them.
        """
        self._asked, self._plans = {}, {}
        if not self._by_chance:
            limits = [0 if self._gates.rests(s.id) else limit for s, limit in zip(sequences, limits, strict=True)]
            if not any(limits):
                return [Draft()] * len(sequences)
            self._token, self._row = self._worth(len(sequences), rows)
        started = self._clock()
        if len(self._drafters) == 1:
            proposed = self._ask(self._drafters[0], sequences, limits, [0.0] * len(sequences))
        else:
            proposed = overlay(self._drafters, sequences, limits, self._ask)
        if not self._by_chance:
            for sequence, limit in zip(sequences, limits, strict=True):
                if limit and sequence.id not in self._asked:
                    self._gates.rest(sequence.id)
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

    def _worth(self, n: int, rows: int) -> tuple[float, float]:
        """Seconds that a token and a row of a pass for n sequences are worth."""
        plain = self.costs.seconds(rows)
        row = (self.costs.seconds(rows + 2 * n) - plain) / max(1, 2 * n)  # a row among the first few
        return (self._host + plain) / max(1, n), row

    def _ask(self, drafter: Drafter, sequences: Many[Sequence], limits: Many[int], found: Many[float]) -> list[Draft]:
        """Ask a drafter for those sequences for which it pays or is due; empty drafts for the others."""
        name = drafter.name
        drafts = [Draft()] * len(sequences)
        askers = [
            i
            for i, (sequence, limit) in enumerate(zip(sequences, limits, strict=True))
            if limit > 0
            and _allowed(sequence, name)
            and (self._gates.opens(sequence, drafter, found[i] >= GOOD) or self._fixed(sequence))
        ]
        if not askers:
            return drafts
        if not self._by_chance:
            drafter.weigh(self._token, self._row)
        if unread := {i: n for i in askers if (n := drafter.unread(sequences[i]))}:
            started = self._clock()
            drafter.read([sequences[i] for i in unread])
            self._gates.read(name, (self._clock() - started) / sum(unread.values()))
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
        """The chance of each node: its parent's, times that of being the next token then."""
        depth = depths(draft.tree)
        kinds: list[Kind] = []
        chances: list[float] = []
        if len(draft):
            mine = self._known.setdefault(sequence.id, Record(MEMORY[1]))
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
            self._gates.handled(self._chosen + (self._clock() - began) / scored)
        self._plans = {}
        self._since_glance += 1
        glance = self._since_glance >= self._glance_every
        for drafter in self._drafters:
            if drafter.thrifty:
                self._let_watch(drafter, step, forward, verdicts, asked.get(drafter.name, []), glance)
            else:
                drafter.observe(step, forward, verdicts)
        if glance:
            seconds = self._host + self.costs.seconds(len(verdicts))
            self._gates.passed(self._since_glance * seconds)
            self._glance_every = self._gates.glances(seconds, len(verdicts))
            self._since_glance = 0
            self._turn += GLANCES

    def _let_watch(
        self, drafter: Drafter, step: Step, forward: Forward, verdicts: Many[Verdict | None], asked: list[int], glance: bool
    ) -> None:
        """Have a thrifty drafter observe the spans for which it was asked, and now and then some of the others."""
        spans = asked
        if glance:
            others = [i for i, verdict in enumerate(verdicts) if verdict is not None and i not in asked]
            start = self._turn % max(1, len(others))  # in turn, where there are more than that
            spans = sorted([*asked, *(others[start:] + others[:start])[:GLANCES]])
        if not spans:
            return
        started = self._clock()
        if len(spans) < len(verdicts):
            step = Step(tuple(step.spans[i] for i in spans))
            forward = Forward(forward.logits, tuple(forward.rows[i] for i in spans))
            verdicts = [verdicts[i] for i in spans]
        drafter.observe(step, forward, verdicts)
        self._gates.watched(drafter.name, (self._clock() - started) / len(spans))

    def _score(self, sequence: Sequence, plan: _Plan, emitted: list[int]) -> None:
        draft = plan.proposed
        right = {ROOT}  # nodes that agree with what was emitted
        for node, (token, parent) in enumerate(zip(draft.tree.tokens, draft.tree.parents, strict=True)):
            depth = plan.depth[node]
            if parent in right and depth <= len(emitted):
                accepted = token == emitted[depth - 1]
                kind = plan.kinds[node]
                self._known[sequence.id].add(kind, accepted)
                self._record.add(kind, accepted)
                if not draft.estimates:
                    self._record.add((kind[0], 0, CLASSES), accepted)
                if accepted:
                    right.add(node)
        saved = dict.fromkeys(plan.asked, 0.0)
        hits: dict[str, float] = {}  # what it would have saved to verify them alone
        for node in right - {ROOT}:
            source = self._drafter_of(draft.sources[node])
            hits[source] = hits.get(source, 0.0) + plan.per_token - self._row
        for node in plan.kept:
            source = self._drafter_of(draft.sources[node])
            if source in saved:
                # Half what came of it, which is true but noisy, half what was expected, which is steady but may be wrong.
                share = ((node in right) + plan.chances[node]) / 2
                saved[source] += share * plan.per_token - plan.per_row
        for stats in (self._stats, sequence.stats):
            stats.record_asks(plan.asked, hits.keys())
        for name, seconds in saved.items():
            self._gates.close(sequence.id, (name, plan.asked[name]), seconds, hits.get(name, 0.0), plan.per_token)
        self._note(sequence, len(draft), tuple(plan.asked), plan.expected)

    def _drafter_of(self, source: str) -> str:
        """The drafter whose node carries this source."""
        return self._predicting.get(source, source)

    def _note(self, sequence: Sequence, proposed: int, asked: Many[str], expected: float) -> None:
        for stats in (self._stats, sequence.stats):
            stats.record_plan(proposed, asked, expected)

    def follow(self, host: float) -> None:
        """Take note of the seconds of a step beside its pass and its drafting."""
        self._host = blend(self._host, host)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that ended."""
        self._known.pop(sequence.id, None)
        self._plans.pop(sequence.id, None)
        self._gates.release(sequence.id)
        for drafter in self._drafters:
            drafter.release(sequence)

    def clear(self) -> None:
        """Forget everything but the costs of passes, also what drafters learned; only between requests."""
        self._record = Record(MEMORY[0])
        self._known, self._plans = {}, {}
        self._gates.clear()
        for drafter in self._drafters:
            drafter.clear()


def _allowed(sequence: Sequence, name: str) -> bool:
    """May this drafter be asked for this sequence?"""
    drafters = sequence.speculation.drafters
    return drafters is None or name in drafters
