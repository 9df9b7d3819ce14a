"""What a rule emits, exactly: every draft, every coin and every draw of a tiny world, weighed and summed.

For a rule that keeps the law, the joint law of the first tokens (the burst's, and then plain decoding's where the burst was
short) is the target's up to rounding, 1e-12 in total variation; for one with a fault it is not. Cost grows with the power of
everything: three to five tokens, two levels, two children.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from specdec.types import ROOT, Draft, Tree, Verdict
from specdec.verify.base import Chance, Law

Judge: TypeAlias = Callable[[Draft, Law, Chance], Verdict]
Context: TypeAlias = Callable[[tuple[int, ...]], Tensor]
"""Tokens so far -> [V] float64 probabilities."""

TINY = 2.0**-24
"""The step of a float32 uniform: how much more often u <= x holds than u < x."""

_Result = TypeVar("_Result")


@dataclass
class Replay:
    """Chance that follows a script of outcomes, then takes the first possible one and notes the others as scripts to run."""

    script: list[int]
    weight: float = 1.0
    taken: list[int] = field(default_factory=list)
    untried: list[list[int]] = field(default_factory=list)

    def pick(self, probabilities: list[float]) -> int:
        if len(self.taken) < len(self.script):
            outcome = self.script[len(self.taken)]
        else:
            possible = [i for i, p in enumerate(probabilities) if p > 0]
            outcome = possible[0]
            self.untried += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(outcome)
        self.weight *= probabilities[outcome]
        return outcome

    def draw(self, p: Tensor) -> int:
        return self.pick(p.tolist())

    def uniform(self) -> float:
        return _Uniform(self)


class _Uniform(float):
    """All numbers in [0, 1) at once: a comparison with it has both outcomes, each with its probability. It is one number all
    the same: what a comparison has shown of it holds for those that follow."""

    _replay: Replay
    _low: float
    _high: float

    def __new__(cls, replay: Replay) -> _Uniform:
        every = super().__new__(cls, math.nan)
        every._replay, every._low, every._high = replay, 0.0, 1.0
        return every

    def __lt__(self, bound: float) -> bool:
        return self._below(bound)

    def __le__(self, bound: float) -> bool:
        return self._below(bound + TINY)

    def _below(self, bound: float) -> bool:
        bound = min(self._high, max(self._low, bound))
        share = (bound - self._low) / (self._high - self._low)
        below = self._replay.pick([share, 1 - share]) == 0
        self._low, self._high = (self._low, bound) if below else (bound, self._high)
        return below


def outcomes(run: Callable[[Replay], _Result]) -> Iterator[tuple[float, _Result]]:
    """Every result of ``run`` with its probability."""
    scripts: list[list[int]] = [[]]
    while scripts:
        replay = Replay(scripts.pop())
        result = run(replay)
        scripts += replay.untried
        yield replay.weight, result


@dataclass(frozen=True)
class Child:
    """A drafted token and the law [V] that the drafter says it was drawn from."""

    token: int
    row: Tensor


Sprout: TypeAlias = Callable[[Context, tuple[int, ...], Chance], list[Child]]
"""(q, tokens so far, chance) -> the children that are drafted there, in order; a token may be drawn again."""


def siblings(*kinds: str) -> Sprout:
    """Children of the given kinds: ``sampled`` from what earlier siblings leave of q, ``top``, the best that they leave, or
    ``again``, from the whole of q."""

    def sprout(q: Context, tokens: tuple[int, ...], chance: Chance) -> list[Child]:
        found: list[Child] = []
        for kind in kinds:
            law = q(tokens)
            if kind != "again":
                law = without(law, [child.token for child in found])
                if law.sum() == 0:
                    break
            if kind == "top":
                law = torch.eye(len(law), dtype=torch.float64)[int(law.argmax())]
            found.append(Child(chance.draw(law), law))
        return found

    return sprout


def without(p: Tensor, tokens: list[int]) -> Tensor:
    """The law given that none of ``tokens`` comes; all zero where nothing else can."""
    rest = p.clone()
    rest[tokens] = 0
    return rest / rest.sum() if rest.sum() > 0 else rest


def grow(sprout: Sprout, q: Context, depth: int, chance: Chance) -> Draft:
    """``depth`` levels of what ``sprout`` gives at each node."""
    tokens: list[int] = []
    parents: list[int] = []
    rows: list[Tensor] = []
    draws: list[int] = []
    level: list[tuple[int, tuple[int, ...]]] = [(ROOT, ())]
    for _ in range(depth):
        below = []
        for parent, path in level:
            nodes: dict[int, int] = {}
            for child in sprout(q, path, chance):
                if child.token not in nodes:
                    nodes[child.token] = len(tokens)
                    below.append((len(tokens), (*path, child.token)))
                    tokens.append(child.token)
                    parents.append(parent)
                rows.append(child.row)
                draws.append(nodes[child.token])
        level = below
    sampled = any(row.max() < 1 for row in rows)
    return Draft(
        Tree(tuple(tokens), tuple(parents)),
        ("enumeration",) * len(tokens),
        torch.stack(rows) if sampled else None,
        draws=tuple(draws) if len(draws) > len(tokens) else (),
    )


def bursts(
    judge: Judge, p: Context, q: Context, sprout: Sprout, depth: int
) -> Iterator[tuple[float, tuple[int, ...], Verdict]]:
    """Every burst of a world, with its probability, the tokens that it emits and the verdict."""

    def burst(chance: Replay) -> tuple[tuple[int, ...], Verdict]:
        draft = grow(sprout, q, depth, chance)
        verdict = judge(draft, lambda node, tokens: p(tokens), chance)
        return (*(draft.tree.tokens[node] for node in verdict.path), verdict.token), verdict

    for weight, (tokens, verdict) in outcomes(burst):
        yield weight, tokens, verdict


def distance(judge: Judge, p: Context, q: Context, sprout: Sprout, depth: int) -> float:
    """Total variation between the law of the first ``depth + 1`` tokens and the target's."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, tokens, _ in bursts(judge, p, q, sprout, depth):
        found[tokens] += weight
    target: dict[tuple[int, ...], float] = {(): 1.0}
    for n in range(depth + 1):  # what is as long as that goes on as plain decoding would
        found = _extended({k: w for k, w in found.items() if len(k) == n}, p, {k: w for k, w in found.items() if len(k) > n})
        target = _extended(target, p, {})
    return sum(abs(found.get(k, 0.0) - target.get(k, 0.0)) for k in found.keys() | target.keys()) / 2


def _extended(
    weights: dict[tuple[int, ...], float], p: Context, others: dict[tuple[int, ...], float]
) -> dict[tuple[int, ...], float]:
    extended = defaultdict(float, others)
    for tokens, weight in weights.items():
        for token, likely in enumerate(p(tokens).tolist()):
            extended[(*tokens, token)] += weight * likely
    return extended


def mean_accepted(judge: Judge, p: Context, q: Context, sprout: Sprout, depth: int) -> float:
    """Drafted tokens that a burst accepts on average."""
    return sum(weight * len(verdict.path) for weight, _, verdict in bursts(judge, p, q, sprout, depth))


def laws(seed: int, v: int, zeros: int = 0) -> Context:
    """A random law per context over v tokens, of which ``zeros`` are impossible in each."""

    @cache
    def law(tokens: tuple[int, ...]) -> Tensor:
        generator = np.random.default_rng([seed, len(tokens), *tokens])
        p = generator.dirichlet(np.ones(v))
        p[generator.permutation(v)[:zeros]] = 0
        return torch.from_numpy(p / p.sum())

    return law


def context_free(probabilities: Many[float]) -> Context:
    """The same law after all tokens."""
    p = torch.tensor(probabilities, dtype=torch.float64)
    p = p / p.sum()
    return lambda tokens: p
