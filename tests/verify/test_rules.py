"""Single verdicts of the rules that decide by chance: what they never accept, where they stop, what they refuse to judge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from specdec import config
from specdec.sampling import SamplingError
from specdec.tree import chain
from specdec.types import ROOT, Draft, Tree, Verdict
from specdec.verify import RULES, Law
from specdec.verify.typical import threshold

BY_CHANCE = [rule for rule in RULES.values() if rule.keeps == "law"]
BELOW_ONE = math.nextafter(1, 0)


def drafted(tree: Tree, q: Tensor | None = None, draws: tuple[int, ...] = ()) -> Draft:
    return Draft(tree, ("test",) * len(tree), q, draws=draws)


def rows(*q: tuple[float, ...]) -> Tensor:
    return torch.tensor(q, dtype=torch.float64)


def fixed(*probabilities: float) -> Law:
    p = torch.tensor(probabilities, dtype=torch.float64)
    return lambda node, tokens: p


class Scripted:
    """Chance that gives the uniforms it is told to, the last one for ever, and draws the most likely token."""

    def __init__(self, *uniforms: float) -> None:
        self._uniforms = list(uniforms)
        self.drawn: list[Tensor] = []

    def uniform(self) -> float:
        return self._uniforms.pop(0) if len(self._uniforms) > 1 else self._uniforms[0]

    def draw(self, p: Tensor) -> int:
        self.drawn.append(p)
        return int(p.argmax())


def each(rules: Iterable = BY_CHANCE) -> Callable:
    return pytest.mark.parametrize("rule", list(rules), ids=lambda rule: rule.name)


@each()
def test_what_the_target_rules_out_is_never_accepted(rule) -> None:
    """A uniform may be exactly 0, and 0 < 0 must not hold."""
    for q in (None, rows((0.2, 0.8, 0.0))):
        assert rule.judge(drafted(chain([1]), q), fixed(1, 0, 0), Scripted(0.0)) == Verdict((), 0)


@each(rule for rule in BY_CHANCE if rule.siblings != "one")
def test_no_sibling_that_the_target_rules_out_is_accepted(rule) -> None:
    tree = Tree(tokens=(1, 2), parents=(ROOT, ROOT))
    for q in (None, rows((0.2, 0.5, 0.3), (0.4, 0.0, 0.6))):
        assert rule.judge(drafted(tree, q), fixed(1, 0, 0), Scripted(0.0)) == Verdict((), 0)


@each()
def test_all_is_accepted_where_draft_and_target_agree(rule) -> None:
    q = rows((0.2, 0.5, 0.3), (0.2, 0.5, 0.3))
    verdict = rule.judge(drafted(chain([0, 2]), q), fixed(0.2, 0.5, 0.3), Scripted(BELOW_ONE))
    assert verdict == Verdict((0, 1), 1)


@each()
def test_residual_without_mass_stands_by_the_target(rule) -> None:
    """Where p and q differ by rounding alone, the residual is noise: it must be neither 0 / 0 nor blown up into a law."""
    q = rows((0.2 - 1e-14, 0.5, 0.3 + 1e-14))
    chance = Scripted(BELOW_ONE)
    assert rule.judge(drafted(chain([2]), q), fixed(0.2, 0.5, 0.3), chance).path == ()
    assert chance.drawn[0].tolist() == [0.2, 0.5, 0.3]


@each()
@pytest.mark.parametrize("u", [0.1, 0.25, 0.45, 0.8])
def test_one_hot_rows_are_judged_as_none(rule, u: float) -> None:
    """None is a shorthand for deterministic nodes, so both must judge alike, to the last bit."""
    tree = chain([2, 1]) if rule.siblings == "one" else Tree(tokens=(2, 0, 1), parents=(ROOT, ROOT, 0))
    one_hot = torch.eye(3, dtype=torch.float64)[list(tree.tokens)]
    chances = [Scripted(u), Scripted(u)]
    verdicts = [
        rule.judge(drafted(tree, q), fixed(0.4, 0.3, 0.3), chance) for q, chance in zip((None, one_hot), chances, strict=True)
    ]
    assert verdicts[0] == verdicts[1]
    assert torch.equal(chances[0].drawn[0], chances[1].drawn[0])


@each(RULES.values())
def test_an_empty_draft_is_plain_decoding(rule) -> None:
    assert rule.judge(Draft(), fixed(0.2, 0.5, 0.3), Scripted(0.5)) == Verdict((), 1)


@each(RULES.values())
def test_a_target_that_is_certain_keeps_its_own_path_whatever_the_chance(rule) -> None:
    """At temperature 0 the law is one-hot, and every rule is the greedy walk."""
    path = (2, 0, 1)

    def law(node: int, tokens: tuple[int, ...]) -> Tensor:
        return torch.eye(3, dtype=torch.float64)[path[len(tokens)]]

    for u in (0.0, 0.5, BELOW_ONE):
        assert rule.judge(drafted(chain([2, 0])), law, Scripted(u)) == Verdict((0, 1), 1)
        assert rule.judge(drafted(chain([2, 1])), law, Scripted(u)) == Verdict((0,), 0)


@each(RULES.values())
def test_a_path_ends_where_nothing_can_follow(rule) -> None:
    """Plain decoding emits those tokens too, and may end on one of them before it meets the error."""

    def until(depth: int) -> Law:
        def law(node: int, tokens: tuple[int, ...]) -> Tensor:
            if len(tokens) == depth:
                raise SamplingError("damaged")
            return torch.eye(4, dtype=torch.float64)[len(tokens) + 1]

        return law

    draft = drafted(chain([1, 2, 3]))
    assert rule.judge(draft, until(3), Scripted(0.5)) == Verdict((0, 1), 3)
    assert rule.judge(draft, until(2), Scripted(0.5)) == Verdict((0,), 2)
    assert rule.judge(draft, until(1), Scripted(0.5)) == Verdict((), 1)
    with pytest.raises(SamplingError):
        rule.judge(draft, until(0), Scripted(0.5))


@each()
def test_rows_that_tokens_cannot_come_from_are_refused(rule) -> None:
    """A token outside its own q means that q is not the law it was drawn from: nothing exact can be done with it."""
    with pytest.raises(ValueError, match="node 0 holds token 1"):
        rule.judge(drafted(chain([1]), rows((0.5, 0.0, 0.5))), fixed(0.2, 0.5, 0.3), Scripted(0.0))


@each(rule for rule in BY_CHANCE if rule.siblings == "one")
def test_rules_for_chains_refuse_trees(rule) -> None:
    with pytest.raises(ValueError, match=f"{rule.name} judges chains"):
        rule.judge(drafted(Tree((1, 2), (ROOT, ROOT))), fixed(0.2, 0.5, 0.3), Scripted(0.0))


@each(rule for rule in BY_CHANCE if rule.siblings == "distinct")
def test_siblings_drawn_with_replacement_are_refused_where_they_must_differ(rule) -> None:
    tree, law = Tree((1, 2), (ROOT, ROOT)), fixed(0.2, 0.5, 0.3)
    with pytest.raises(ValueError, match="row of node 1 gives its earlier siblings' tokens"):
        rule.judge(drafted(tree, rows((0.2, 0.5, 0.3), (0.2, 0.5, 0.3))), law, Scripted(0.0))
    with pytest.raises(ValueError, match="drew one again"):
        rule.judge(drafted(chain([1]), rows((0.2, 0.5, 0.3), (0.2, 0.5, 0.3)), (0, 0)), law, Scripted(0.0))


def test_a_token_drawn_twice_is_judged_twice() -> None:
    """The second refusal takes its share of the residual too: (0, 0.25, 0.75) after the first, then (0, 0.05, 0.75) / 0.8."""
    q = rows((0.8, 0.2, 0.0), (0.8, 0.2, 0.0))
    chance = Scripted(0.5)
    assert RULES["multistep"].judge(drafted(chain([0]), q, (0, 0)), fixed(0.4, 0.3, 0.3), chance) == Verdict((), 2)
    assert chance.drawn[0].tolist() == pytest.approx([0, 0.0625, 0.9375])


def test_typical_acceptance_asks_less_where_the_target_is_less_certain() -> None:
    assert threshold(rows((1.0, 0.0))[0]) == 0.09
    flat = torch.full((100,), 0.01, dtype=torch.float64)
    assert threshold(flat) == pytest.approx(0.003)


def test_typical_acceptance_takes_the_longest_then_the_likeliest_path() -> None:
    law = fixed(0.5, 0.3, 0.15, 0.05)
    judge = RULES["typical"].judge
    assert judge(drafted(Tree((0, 1, 2), (ROOT, ROOT, 1))), law, Scripted(0.5)) == Verdict((1, 2), 0)
    assert judge(drafted(Tree((1, 0), (ROOT, ROOT))), law, Scripted(0.5)) == Verdict((1,), 0)
    assert judge(drafted(chain([0, 3, 0])), law, Scripted(0.5)) == Verdict((0,), 0)  # 0.05 is below every threshold


def test_the_configuration_names_the_rules() -> None:
    assert tuple(RULES) == config.ACCEPTANCES
