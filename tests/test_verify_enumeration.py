"""Verification by exact enumeration: every draft, every coin and every draw of a tiny world, weighed and summed.

The joint law of the first tokens, the burst's and then plain decoding's where the burst was short, must be the target's to
1e-12 in total variation. Variants with a fault that was shipped somewhere, in the rule or in the drafter, must miss it.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import verify
from specdec.config import SamplingParams
from specdec.sampling import History, warp
from specdec.types import ROOT, Tree, Verdict
from specdec.verify import residual

Law = Callable[[tuple[int, ...]], Tensor]
"""Tokens so far -> [V] float64 probabilities."""
Walk = Callable[..., Verdict]

TINY = 2.0**-24
"""The step of a float32 uniform: how much more often u <= x holds than u < x."""


# Chance, replayed until every outcome was seen.


@dataclass
class Chance:
    """Follows a script of outcomes, then takes the first possible one and notes the others as scripts to run later."""

    script: list[int]
    weight: float = 1.0
    taken: list[int] = field(default_factory=list)
    untried: list[list[int]] = field(default_factory=list)

    def pick(self, probabilities: list[float]) -> int:
        possible = [i for i, p in enumerate(probabilities) if p > 0]
        if len(self.taken) < len(self.script):
            outcome = self.script[len(self.taken)]
        else:
            outcome = possible[0]
            self.untried += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(outcome)
        self.weight *= probabilities[outcome]
        return outcome

    def draw(self, p: Tensor) -> int:
        return self.pick(p.tolist())

    def uniform(self) -> float:
        return Uniform(self)


class Uniform(float):
    """All numbers in [0, 1) at once: a comparison with it has both outcomes, each with its probability."""

    def __new__(cls, chance: Chance) -> Uniform:
        return super().__new__(cls, math.nan)

    def __init__(self, chance: Chance) -> None:
        self.chance = chance

    def __lt__(self, bound: float) -> bool:
        return self._below(bound)

    def __le__(self, bound: float) -> bool:
        return self._below(bound + TINY)

    def _below(self, bound: float) -> bool:
        accepted = min(1.0, max(0.0, bound))
        return self.chance.pick([accepted, 1 - accepted]) == 0


def outcomes(run: Callable[[Chance], tuple[int, ...]]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every result of ``run`` with its probability."""
    scripts: list[list[int]] = [[]]
    while scripts:
        chance = Chance(scripts.pop())
        result = run(chance)
        scripts += chance.untried
        yield chance.weight, result


# Drafters, as what they do at a node: which children, drawn from what, and what they claim they were drawn from.


@dataclass(frozen=True)
class Child:
    token: int
    row: Tensor
    """[V] the law that the drafter says the token was drawn from."""


Sprout = Callable[[Law, tuple[int, ...], Chance], list[Child]]
"""(q, tokens so far, chance) -> the children that are drafted there, in order."""


def without(p: Tensor, tokens: list[int]) -> Tensor:
    """The law given that none of ``tokens`` comes; all zero where nothing else can."""
    rest = p.clone()
    rest[tokens] = 0
    return rest / rest.sum() if rest.sum() > 0 else rest


def one_hot(v: int, token: int) -> Tensor:
    return torch.eye(v, dtype=torch.float64)[token]


def siblings(*kinds: str) -> Sprout:
    """Children of the given kinds: ``sampled`` from what earlier siblings leave of q, or ``top``, the best that they leave."""

    def sprout(q: Law, tokens: tuple[int, ...], chance: Chance) -> list[Child]:
        found: list[Child] = []
        for kind in kinds:
            left = without(q(tokens), [child.token for child in found])
            if left.sum() == 0:
                break
            if kind == "sampled":
                found.append(Child(chance.draw(left), left))
            else:
                best = int(left.argmax())
                found.append(Child(best, one_hot(len(left), best)))
        return found

    return sprout


def draft(sprout: Sprout, q: Law, depth: int, chance: Chance) -> tuple[Tree, Tensor | None]:
    """``depth`` levels of what ``sprout`` grows at each node."""
    nodes: list[Child] = []
    parents: list[int] = []
    level: list[tuple[int, tuple[int, ...]]] = [(ROOT, ())]
    for _ in range(depth):
        below = []
        for parent, tokens in level:
            for child in sprout(q, tokens, chance):
                below.append((len(nodes), (*tokens, child.token)))
                nodes.append(child)
                parents.append(parent)
        level = below
    rows = [node.row for node in nodes]
    deterministic = all(row.max() == 1 for row in rows)
    return Tree(tuple(node.token for node in nodes), tuple(parents)), None if deterministic else torch.stack(rows)


def distance(p: Law, q: Law, sprout: Sprout, depth: int, walk: Walk = residual) -> float:
    """Total variation between the law of the first ``depth + 1`` tokens and the target's."""
    found: dict[tuple[int, ...], float] = defaultdict(float)

    def burst(chance: Chance) -> tuple[int, ...]:
        tree, rows = draft(sprout, q, depth, chance)
        verdict = walk(tree, rows, lambda node, tokens: p(tokens), chance.uniform, chance.draw)
        tokens = (*(tree.tokens[node] for node in verdict.path), verdict.token)
        while len(tokens) <= depth:
            tokens = (*tokens, chance.draw(p(tokens)))
        return tokens

    for weight, tokens in outcomes(burst):
        found[tokens] += weight
    assert sum(found.values()) == pytest.approx(1, abs=1e-7)

    expected = {
        tokens: math.prod(p(tokens[:i])[token].item() for i, token in enumerate(tokens))
        for tokens in itertools.product(range(len(p(()))), repeat=depth + 1)
    }
    return sum(abs(found[tokens] - weight) for tokens, weight in expected.items()) / 2


# Worlds: pairs of a target and a draft, both depending on the whole context.


def laws(seed: int, v: int, zeros: int = 0) -> Law:
    """A random law per context, with ``zeros`` tokens impossible in each."""

    @cache
    def law(tokens: tuple[int, ...]) -> Tensor:
        generator = np.random.default_rng([seed, len(tokens), *tokens])
        p = generator.dirichlet(np.ones(v))
        p[generator.permutation(v)[:zeros]] = 0
        return torch.from_numpy(p / p.sum())

    return law


def context_free(*probabilities: float) -> Law:
    p = torch.tensor(probabilities, dtype=torch.float64)
    p /= p.sum()
    return lambda tokens: p


WORLDS: dict[str, tuple[Law, Law]] = {
    "random": (laws(1, 3), laws(2, 3)),
    "zeros in p": (laws(3, 3, zeros=1), laws(4, 3)),
    "zeros in q": (laws(5, 3), laws(6, 3, zeros=1)),
    "zeros in both": (laws(7, 3, zeros=1), laws(8, 3, zeros=1)),
    "q certain": (laws(9, 3), laws(10, 3, zeros=2)),
    "p certain": (laws(11, 3, zeros=2), laws(12, 3)),
    "equal": (laws(13, 3), laws(13, 3)),
    "disjoint": (context_free(0.3, 0.7, 0, 0), context_free(0, 0, 0.6, 0.4)),
    "four tokens": (laws(14, 4), laws(15, 4)),
}
SHAPES: dict[str, tuple[Sprout, int]] = {
    "plain decoding": (siblings(), 1),
    "sampled chain": (siblings("sampled"), 2),
    "top chain": (siblings("top"), 3),
    "sampled pairs": (siblings("sampled", "sampled"), 1),
    "top pairs": (siblings("top", "top"), 2),
    "top then sampled": (siblings("top", "sampled"), 2),
    "sampled then top": (siblings("sampled", "top"), 1),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("world", WORLDS)
def test_emitted_law_is_the_targets(world: str, shape: str) -> None:
    assert distance(*WORLDS[world], *SHAPES[shape]) < 1e-12


@pytest.mark.parametrize("world", ["random", "zeros in both"])
def test_deep_tree_of_sampled_siblings(world: str) -> None:
    """Two levels of two siblings each: the residual is handed on from sibling to sibling and starts afresh at each level."""
    assert distance(*WORLDS[world], siblings("sampled", "sampled"), 2) < 1e-12


def test_sampled_chain_of_three() -> None:
    assert distance(*WORLDS["random"], siblings("sampled"), 3) < 1e-12


# Faults in the rule.


def mutant(old: str, new: str) -> Walk:
    """``residual`` with one piece of its source exchanged."""
    source = inspect.getsource(residual)
    assert source.count(old) == 1, f"residual no longer holds {old!r} exactly once: adapt the mutants"
    namespace = dict(vars(verify))
    exec(source.replace(old, new), namespace)
    walk: Walk = namespace["residual"]
    return walk


AT_MOST = ("if uniform() < ", "if uniform() <= ")


@pytest.mark.parametrize(
    ("fault", "least"),
    [
        (AT_MOST, 1e-9),
        (("rest = (p - row).clamp(min=0)", "rest = p"), 1e-2),  # corrected token drawn from p
        (("float(p[token] / row[token])", "float(p[token])"), 1e-2),  # acceptance by p alone
        (("float(p[token] / row[token])", "float(law(node, tokens)[token] / row[token])"), 1e-3),  # siblings against p
        (("rest / mass if mass >= EXHAUSTED else p", "p"), 1e-2),  # no correction at all
    ],
)
def test_faulty_rules_are_seen(fault: tuple[str, str], least: float) -> None:
    p, q = WORLDS["random"]
    assert distance(p, q, siblings("sampled", "sampled"), 1, mutant(*fault)) > least


def test_at_most_accepts_the_impossible() -> None:
    """With ``<=`` a uniform of exactly 0 lets a token through that the target rules out."""
    tree = Tree((1,), (ROOT,))
    for walk, path in ((residual, ()), (mutant(*AT_MOST), (0,))):
        verdict = walk(tree, None, lambda node, tokens: one_hot(2, 0), lambda: 0.0, lambda p: int(p.argmax()))
        assert verdict.path == path


# Faults in the drafter: rows that are not what the tokens were drawn from, and pruning that looks at the token.


def test_top_token_passed_off_as_sampled() -> None:
    """An argmax token judged by the full softmax of the drafter."""

    def sprout(q: Law, tokens: tuple[int, ...], chance: Chance) -> list[Child]:
        return [Child(int(q(tokens).argmax()), q(tokens))]

    assert distance(*WORLDS["random"], sprout, 1) > 0.05


PEAKED = (context_free(0.1, 0.6, 0.3), context_free(0.8, 0.1, 0.1))


def test_siblings_without_replacement_judged_by_the_row_with_replacement() -> None:
    def sprout(q: Law, tokens: tuple[int, ...], chance: Chance) -> list[Child]:
        first = chance.draw(q(tokens))
        second = chance.draw(without(q(tokens), [first]))
        return [Child(first, q(tokens)), Child(second, q(tokens))]

    assert distance(*PEAKED, sprout, 1) > 0.1


def test_second_draw_dropped_where_it_repeats_the_first() -> None:
    """Siblings of a tree differ, so a repeated draw must be drawn again (from what the first leaves), not forgotten."""

    def sprout(q: Law, tokens: tuple[int, ...], chance: Chance) -> list[Child]:
        first, second = (Child(chance.draw(q(tokens)), q(tokens)) for _ in range(2))
        return [first] if first.token == second.token else [first, second]

    assert distance(*PEAKED, sprout, 1) > 0.01
    assert distance(*PEAKED, siblings("sampled", "sampled"), 1) < 1e-12


def test_row_from_before_the_drafters_own_filter() -> None:
    """The token was drawn after top-k, the row was taken before it: the output drifts towards the draft."""
    top2 = SamplingParams(top_k=2)

    def filtered(*probabilities: float) -> Law:
        return context_free(*warp(torch.tensor(probabilities).log(), top2, History([])).exp().tolist())

    target, drafted, raw = filtered(0.45, 0.35, 0.20), filtered(0.35, 0.45, 0.20), context_free(0.35, 0.45, 0.20)

    def sprout(q: Law, tokens: tuple[int, ...], chance: Chance) -> list[Child]:
        return [Child(chance.draw(drafted(tokens)), q(tokens))]

    def first_token(row: Law) -> list[float]:
        law = [0.0, 0.0, 0.0]

        def run(chance: Chance) -> tuple[int, ...]:
            tree, rows = draft(sprout, row, 1, chance)
            verdict = residual(tree, rows, lambda node, tokens: target(tokens), chance.uniform, chance.draw)
            return (tree.tokens[0] if verdict.path else verdict.token,)

        for weight, (token,) in outcomes(run):
            law[token] += weight
        return law

    assert first_token(drafted) == pytest.approx([0.5625, 0.4375, 0], abs=1e-7)
    assert first_token(raw) == pytest.approx([0.453, 0.547, 0], abs=1e-3)


def test_pruning_must_not_look_at_the_token_itself() -> None:
    """Dropping a token because its own q is low bends the law; keeping it and stopping after it does not."""

    def drop(q: Law, tokens: tuple[int, ...], chance: Chance) -> list[Child]:
        (child,) = siblings("sampled")(q, tokens, chance)
        return [child] if child.row[child.token] > 0.3 else []

    def stop_after(q: Law, tokens: tuple[int, ...], chance: Chance) -> list[Child]:
        if tokens and q(tokens[:-1])[tokens[-1]] <= 0.3:
            return []
        return siblings("sampled")(q, tokens, chance)

    p, q = WORLDS["random"]
    assert distance(p, q, drop, 2) > 0.01
    assert distance(p, q, stop_after, 2) < 1e-12
