"""Tree shapes against every tree there is, and against a draw of what is right."""

from __future__ import annotations

import itertools
import random

import pytest

from specdec.draft.shape import Accuracy, Shape, chain, expected_tokens, fitted, optimum, static, values
from specdec.types import ROOT


def table(dice: random.Random, depths: int, ranks: int, *, ordered: bool = True) -> list[list[float]]:
    found = []
    for _ in range(depths):
        weights = [dice.random() for _ in range(ranks)]
        scale = dice.uniform(0.3, 1.0) / sum(weights)
        found.append([w * scale for w in (sorted(weights, reverse=True) if ordered else weights)])
    return found


def every_tree(nodes: int, depths: int, ranks: int) -> list[Shape]:
    """All trees of at most that many nodes: every set of paths that holds the parent of each."""
    paths = [p for n in range(1, depths + 1) for p in itertools.product(range(ranks), repeat=n)]
    found = []
    for n in range(nodes + 1):
        for chosen in itertools.combinations(paths, n):
            held = {(): ROOT} | {path: i for i, path in enumerate(chosen)}
            if all(path[:-1] in held for path in chosen):
                found.append(Shape(tuple(held[path[:-1]] for path in chosen), tuple(path[-1] for path in chosen)))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_static_and_optimum_emit_as_much_as_the_best_tree_there_is(seed: int) -> None:
    """Accuracies fall with the rank or do not, and differ by depth; each tree size from 0 to 4."""
    dice = random.Random(seed)
    accuracy = table(dice, 3, 2, ordered=seed % 2 == 0)
    trees = every_tree(4, 3, 2)
    for nodes in range(5):
        best = max(expected_tokens(tree, accuracy) for tree in trees if len(tree) <= nodes)
        for shape in (static(accuracy, nodes), optimum(accuracy, nodes)):
            assert len(shape) <= nodes
            assert expected_tokens(shape, accuracy) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_two_ways_agree_on_larger_trees(seed: int) -> None:
    accuracy = table(random.Random(100 + seed), 5, 4)
    for nodes in (1, 7, 16, 31):
        greedy, programmed = static(accuracy, nodes), optimum(accuracy, nodes)
        assert len(greedy) == len(programmed) == nodes
        assert expected_tokens(greedy, accuracy) == pytest.approx(expected_tokens(programmed, accuracy), abs=1e-12)
        for shape in (greedy, programmed):
            assert values(shape, accuracy) == sorted(values(shape, accuracy), reverse=True)


def test_the_start_of_a_static_tree_is_the_smaller_tree() -> None:
    """So one shape serves every budget."""
    accuracy = table(random.Random(3), 4, 3)
    whole = static(accuracy, 20)
    for n in range(20):
        assert Shape(whole.parents[:n], whole.ranks[:n]) == static(accuracy, n)


def test_expected_tokens_is_what_a_walk_emits() -> None:
    """A draw of right ranks, depth by depth, walked down the tree."""
    dice = random.Random(5)
    accuracy = table(dice, 3, 3)
    shape = static(accuracy, 9)
    below = {(parent, rank): node for node, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True))}
    emitted = 0
    for _ in range(40_000):
        node, depth = ROOT, 0
        while True:
            emitted += 1
            if depth == len(accuracy):
                break
            outcomes = [*range(3), None]
            (rank,) = dice.choices(outcomes, [*accuracy[depth], 1 - sum(accuracy[depth])])
            if (node, rank) not in below:
                break
            node, depth = below[node, rank], depth + 1
    assert emitted / 40_000 == pytest.approx(expected_tokens(shape, accuracy), rel=0.02)


@pytest.mark.parametrize("seed", range(4))
def test_the_fitted_tree_is_the_fastest_of_all_trees(seed: int) -> None:
    dice = random.Random(seed)
    accuracy = table(dice, 3, 2)
    per_row, per_depth = dice.uniform(0.01, 0.4), dice.uniform(0.0, 0.3)

    def seconds(depth: int, n: int) -> float:
        return 1.0 + per_depth * depth + per_row * n

    def rate(shape: Shape) -> float:
        return expected_tokens(shape, accuracy) / seconds(max(shape.depths, default=0), len(shape))

    best = max(rate(tree) for tree in every_tree(4, 3, 2))
    assert rate(fitted(accuracy, 4, seconds)) == pytest.approx(best, abs=1e-12)


def test_rows_without_price_take_the_whole_tree_and_dear_ones_none() -> None:
    accuracy = [[0.6, 0.2], [0.5, 0.1]]
    assert len(fitted(accuracy, 6, lambda depth, n: 1.0)) == 6
    assert fitted(accuracy, 6, lambda depth, n: 1.0 + 2 * n) == Shape()


def test_chain_and_nothing() -> None:
    assert chain(3) == Shape((-1, 0, 1), (0, 0, 0))
    assert expected_tokens(chain(3), [[0.5], [0.4], [0.3]]) == pytest.approx(1 + 0.5 + 0.2 + 0.06)
    assert expected_tokens(chain(3), [[0.5]]) == 1.5, "depths past the table are never right"
    nothing: list[Accuracy] = [[], [[]], [[0.0, 0.0]]]
    for accuracy in nothing:
        assert static(accuracy, 4) == optimum(accuracy, 4) == Shape()


@pytest.mark.parametrize(
    ("parents", "ranks"), [((0,), (0,)), ((-1, 1), (0, 0)), ((-1, -1), (1, 1)), ((-1,), (-1,)), ((-2,), (0,))]
)
def test_what_is_no_tree_is_refused(parents: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="node"):
        Shape(parents, ranks)
