"""Every rule by exact enumeration: what is emitted has the target's law to 1e-12, and published counts come out."""

from __future__ import annotations

import pytest
import torch

from specdec.config import SamplingParams
from specdec.history import History
from specdec.sampling import warp
from specdec.types import ROOT, Draft, Siblings, Tree
from specdec.verify import RULES, Chance, Rule
from specdec.verify.broken import BROKEN, CAUGHT, Broken, Down, Up
from specdec.verify.enumeration import (
    Child,
    Context,
    Replay,
    Sprout,
    bursts,
    context_free,
    distance,
    laws,
    mean_accepted,
    outcomes,
    siblings,
    without,
)

WORLDS: dict[str, tuple[Context, Context]] = {
    "random": (laws(1, 3), laws(2, 3)),
    "zeros in p": (laws(3, 3, zeros=1), laws(4, 3)),
    "zeros in q": (laws(5, 3), laws(6, 3, zeros=1)),
    "zeros in both": (laws(7, 3, zeros=1), laws(8, 3, zeros=1)),
    "q certain": (laws(9, 3), laws(10, 3, zeros=2)),
    "p certain": (laws(11, 3, zeros=2), laws(12, 3)),
    "equal": (laws(13, 3), laws(13, 3)),
    "disjoint": (context_free([0.3, 0.7, 0, 0]), context_free([0, 0, 0.6, 0.4])),
    "four tokens": (laws(14, 4), laws(15, 4)),
    "five tokens": (laws(16, 5), laws(17, 5)),
}
CHAINS: dict[str, tuple[Sprout, int]] = {
    "plain decoding": (siblings(), 1),
    "sampled chain": (siblings("sampled"), 2),
    "top chain": (siblings("top"), 3),
}
SHAPES: dict[str | None, dict[str, tuple[Sprout, int]]] = {
    "one": CHAINS,
    "distinct": {
        **CHAINS,
        "sampled pairs": (siblings("sampled", "sampled"), 1),
        "top pairs": (siblings("top", "top"), 2),
        "top then sampled": (siblings("top", "sampled"), 2),
        "sampled then top": (siblings("sampled", "top"), 1),
    },
    "repeated": {
        **CHAINS,
        "independent pairs": (siblings("again", "again"), 1),
        "independent triples": (siblings("again", "again", "again"), 1),
        "top then independent": (siblings("top", "again"), 2),
        "independent then top": (siblings("again", "top"), 1),
    },
}
SHAPES[None] = {"sampled chain": (siblings("sampled"), 2), "top then sampled": (siblings("top", "sampled"), 1)}
EXACT = [rule for rule in RULES.values() if rule.keeps == "law" or rule.name == "coupled"]
CASES = [pytest.param(rule, shape, id=f"{rule.name}-{shape}") for rule in EXACT for shape in SHAPES[rule.siblings]]


@pytest.mark.parametrize(("rule", "shape"), CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_emitted_law_is_the_targets(world: str, rule, shape: str) -> None:
    assert distance(rule.judge, *WORLDS[world], *SHAPES[rule.siblings][shape]) < 1e-12


@pytest.mark.parametrize("world", ["random", "zeros in both"])
@pytest.mark.parametrize(
    ("rule", "kinds"),
    [
        ("recursive", ("sampled", "sampled")),
        ("traversal", ("sampled", "sampled")),
        ("multistep", ("again", "again")),
    ],
)
def test_two_levels_of_two_sampled_children(world: str, rule: str, kinds: tuple[str, ...]) -> None:
    """The residual is handed on from sibling to sibling and starts afresh at each level."""
    assert distance(RULES[rule].judge, *WORLDS[world], siblings(*kinds), 2) < 1e-12


@pytest.mark.parametrize("rule", [rule for rule in EXACT if rule.keeps == "law"], ids=lambda rule: rule.name)
def test_a_draft_may_stop_behind_any_token_it_has_drawn(rule) -> None:
    """Whether a node exists may depend on what was drawn before it: an end token, or one that is unlikely, ends its branch."""
    grow = siblings("sampled") if rule.siblings == "one" else siblings("sampled", "sampled")

    def stop_after(q: Context, tokens: tuple[int, ...], chance: Chance) -> list[Child]:
        if tokens and (tokens[-1] == 0 or q(tokens[:-1])[tokens[-1]] <= 0.3):
            return []
        return grow(q, tokens, chance)

    if rule.siblings == "repeated":
        grow = siblings("again", "again")
    assert distance(rule.judge, *WORLDS["random"], stop_after, 2) < 1e-12


def test_block_accepts_what_was_published() -> None:
    """Sun et al.: p = (1/3, 2/3), q = (2/3, 1/3), two drafted tokens: 10/9 token by token, 11/9 as a block."""
    p, q = context_free([1, 2]), context_free([2, 1])
    chain = siblings("sampled")
    assert mean_accepted(RULES["rejection"].judge, p, q, chain, 2) == pytest.approx(10 / 9, abs=1e-12)
    assert mean_accepted(RULES["block"].judge, p, q, chain, 2) == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_traversal_of_a_chain_is_block_verification(depth: int) -> None:
    """Not only on average: the same bursts with the same probabilities."""
    p, q = WORLDS["random"]
    found = []
    for name in ("block", "traversal"):
        weights: dict[tuple, float] = {}
        for weight, tokens, verdict in bursts(RULES[name].judge, p, q, siblings("sampled"), depth):
            key = tokens, verdict.path
            weights[key] = weights.get(key, 0.0) + weight
        found.append(weights)
    assert found[0].keys() == found[1].keys()
    for key, weight in found[0].items():
        assert found[1][key] == pytest.approx(weight, abs=1e-12)


def test_traversal_keeps_a_path_as_often_as_was_published() -> None:
    """Weng et al.: where p / q is 1/2 for a node and 4/3 for its child, a walk from the root keeps both half of the time, and
    one from the leaves with 1/2 x 4/3 = 2/3. The sibling that is tried later has no say in that."""
    tree = Tree(tokens=(0, 1, 1), parents=(ROOT, ROOT, 0))
    q = torch.tensor([[0.6, 0.3, 0.1], [0.0, 0.75, 0.25], [0.4, 0.3, 0.3]], dtype=torch.float64)
    draft = Draft(tree, ("test",) * 3, q)

    def law(node: int, tokens: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64)

    def kept(rule: str) -> float:
        judged = outcomes(lambda chance: RULES[rule].judge(draft, law, chance))
        return sum(weight for weight, verdict in judged if verdict.path == (0, 2))

    assert kept("recursive") == pytest.approx(1 / 2, abs=1e-12)
    assert kept("traversal") == pytest.approx(2 / 3, abs=1e-12)


def ragged(q: Context, tokens: tuple[int, ...], chance: Chance) -> list[Child]:
    """Two children of the root, and below them one behind an even token, none behind an odd one."""
    kinds = ("sampled",) * (tokens[-1] % 2 == 0) if tokens else ("sampled", "sampled")
    return siblings(*kinds)(q, tokens, chance)


PAIRS = siblings("sampled", "sampled")
TREES: dict[str, tuple[Sprout, int, int, int]] = {
    # children, levels, tokens, impossible tokens of the target
    "pairs below pairs": (PAIRS, 2, 3, 0),
    "sampled and top": (siblings("sampled", "top"), 2, 3, 0),
    "ragged": (ragged, 2, 4, 0),
    "ragged, zeros in p": (ragged, 2, 4, 2),
    "chains": (siblings("sampled"), 3, 3, 0),
    "one level": (PAIRS, 1, 4, 1),
}


@pytest.mark.parametrize("shape", TREES)
def test_traversal_accepts_at_least_as_much_as_the_walk_from_the_root(shape: str) -> None:
    """On average over what is drafted, in worlds at random; with one level there is nothing to gain."""
    sprout, depth, v, zeros = TREES[shape]
    gains = []
    for seed in range({"pairs below pairs": 2, "ragged, zeros in p": 8}.get(shape, 4)):
        p, q = laws(100 + seed, v, zeros), laws(200 + seed, v)
        counts = [mean_accepted(RULES[name].judge, p, q, sprout, depth) for name in ("traversal", "recursive")]
        gains.append(counts[0] - counts[1])
    assert min(gains) > -1e-12
    assert (max(gains) > 0.01) == (depth > 1), gains


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_tokens_per_pass_of_independent_acceptance(depth: int) -> None:
    """E[tau] = (1 - a^(n + 1)) / (1 - a) with a = sum of min(p, q) at every position."""
    p, q = context_free([0.5, 0.3, 0.2]), context_free([0.2, 0.3, 0.5])
    a = float(torch.minimum(p(()), q(())).sum())
    tau = 1 + mean_accepted(RULES["rejection"].judge, p, q, siblings("sampled"), depth)
    assert tau == pytest.approx((1 - a ** (depth + 1)) / (1 - a), abs=1e-12)


# Faults of a drafter: rows that are not what the tokens were drawn from, and pruning that looks at the token.


def test_top_token_passed_off_as_sampled() -> None:
    """An argmax token judged by the full softmax of the drafter."""

    def sprout(q: Context, tokens: tuple[int, ...], chance: Chance) -> list[Child]:
        return [Child(int(q(tokens).argmax()), q(tokens))]

    for name in ("rejection", "block", "recursive", "multistep", "traversal"):
        assert distance(RULES[name].judge, *WORLDS["random"], sprout, 1) > 0.05


PEAKED = (context_free([0.1, 0.6, 0.3]), context_free([0.8, 0.1, 0.1]))


def test_siblings_without_replacement_judged_as_if_independent() -> None:
    def sprout(q: Context, tokens: tuple[int, ...], chance: Chance) -> list[Child]:
        first = chance.draw(q(tokens))
        second = chance.draw(without(q(tokens), [first]))
        return [Child(first, q(tokens)), Child(second, q(tokens))]

    assert distance(RULES["multistep"].judge, *PEAKED, sprout, 1) > 0.1


def test_second_draw_dropped_where_it_repeats_the_first() -> None:
    """A repeated draw must be judged again, or drawn again from what the first leaves, not forgotten."""

    def sprout(q: Context, tokens: tuple[int, ...], chance: Chance) -> list[Child]:
        first, second = (Child(chance.draw(q(tokens)), q(tokens)) for _ in range(2))
        return [first] if first.token == second.token else [first, second]

    judge = RULES["multistep"].judge
    assert distance(judge, *PEAKED, sprout, 1) > 0.01
    assert distance(judge, *PEAKED, siblings("again", "again"), 1) < 1e-12
    assert distance(judge, *PEAKED, siblings("sampled", "sampled"), 1) < 1e-12


def test_row_from_before_the_drafters_own_filter() -> None:
    """The token was drawn after top-k, the row was taken before it: the output drifts towards the draft."""
    top2 = SamplingParams(top_k=2)

    def filtered(*probabilities: float) -> Context:
        return context_free(warp(torch.tensor(probabilities).log(), top2, History([])).exp().tolist())

    target, drafted, raw = filtered(0.45, 0.35, 0.20), filtered(0.35, 0.45, 0.20), context_free([0.35, 0.45, 0.20])

    def sprout(q: Context, tokens: tuple[int, ...], chance: Chance) -> list[Child]:
        return [Child(chance.draw(drafted(tokens)), q(tokens))]

    def first_token(row: Context) -> list[float]:
        law = [0.0, 0.0, 0.0]
        for weight, tokens, _ in bursts(RULES["rejection"].judge, target, row, sprout, 1):
            law[tokens[0]] += weight
        return law

    assert first_token(drafted) == pytest.approx([0.5625, 0.4375, 0], abs=1e-7)
    assert first_token(raw) == pytest.approx([0.453, 0.547, 0], abs=1e-3)


def test_pruning_must_not_look_at_the_token_itself() -> None:
    """Dropping a token because its own q is low bends the law."""

    def drop(q: Context, tokens: tuple[int, ...], chance: Chance) -> list[Child]:
        (child,) = siblings("sampled")(q, tokens, chance)
        return [child] if child.row[child.token] > 0.3 else []

    for name in ("rejection", "block", "traversal"):
        assert distance(RULES[name].judge, *WORLDS["random"], drop, 2) > 0.01


# Faults of a rule.


def test_a_number_is_the_same_however_often_it_is_compared() -> None:
    """Else a rule that decides everything by one random number would be taken for a right one."""
    found: dict[tuple[bool, bool], float] = {}
    for weight, answers in outcomes(lambda chance: (lambda u: (u < 0.3, u < 0.75))(chance.uniform())):
        found[answers] = found.get(answers, 0.0) + weight
    assert found == pytest.approx({(True, True): 0.3, (False, True): 0.45, (False, False): 0.25})


def test_each_kind_of_rule_has_faults_that_are_caught() -> None:
    """Eight and more, and none of the rules is without one."""
    assert len(BROKEN) >= 8
    assert {broken.mimics for broken in BROKEN.values()} >= {rule.name for rule in EXACT}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_broken_rules_are_caught(broken: Broken) -> None:
    least = CAUGHT if broken.rule.name == "at-most" else 1e-3  # a uniform of exactly 0 comes once in 2^24 times
    assert broken.distance() > least
    assert broken.mimics in RULES


@pytest.mark.parametrize("drawn_as", ["one", "distinct", "repeated"])
def test_broken_rules_with_nothing_broken_are_exact(drawn_as: Siblings) -> None:
    """So what is caught is the fault, and not the way in which broken rules are written."""
    for judge in [Down()] if drawn_as == "repeated" else [Down(), Up()]:
        assert Broken(Rule("whole", judge, "law", drawn_as, "", ""), "").distance() < 1e-12


def test_at_most_accepts_the_impossible() -> None:
    """With ``<=`` a uniform of exactly 0 lets a token through that the target rules out."""
    chance = Replay([])
    chance.uniform = lambda: 0.0  # type: ignore[method-assign]
    verdict = BROKEN["at-most"].rule.judge(
        Draft(Tree((1,), (ROOT,)), ("test",)), lambda node, tokens: torch.tensor([1.0, 0.0]), chance
    )
    assert verdict.path == (0,)
