"""The tree that grows level by level is the one that enumerating all nodes gives."""

from __future__ import annotations

import math
import random

import pytest
from drafting import paths

from specdec.draft.expand import Growth
from specdec.types import ROOT

END = 7


def law(seed: int, path: tuple[int, ...], children: int, certain: float) -> list[tuple[int, float]]:
    """Children of a path and their chances, the same whenever asked; now and then one is certain."""
    dice = random.Random(f"{seed}/{path}")
    tokens = dice.sample(range(10), children)
    if dice.random() < certain:
        return [(token, 1.0 if i == 0 else 0.0) for i, token in enumerate(tokens)]
    weights = sorted((dice.random() ** 3 for _ in range(children + 1)), reverse=True)
    return [(token, weight / sum(weights)) for token, weight in zip(tokens, weights, strict=False)]


def grown(growth: Growth, children: int, depth: int, chances) -> None:
    known = {ROOT: ()}
    expand = [ROOT]
    for level in range(depth):
        for node in expand:
            following = chances(known[node])
            growth.add(node, [token for token, _ in following], [chance for _, chance in following])
        for node in range(len(growth.tokens)):
            known[node] = (*known[growth.parents[node]], growth.tokens[node])
        expand = growth.next() if level < depth - 1 else []


@pytest.mark.parametrize("seed", range(40))
def test_best_nodes_of_all(seed: int) -> None:
    """Against brute force: all children of the best nodes of every depth, then the best of all that were proposed."""
    dice = random.Random(seed)
    children, depth, width, limit = dice.randint(1, 4), dice.randint(1, 5), dice.choice([1, 2, 3, 1000]), dice.randint(1, 12)
    least = dice.choice([1e-9, 0.02, 0.2])

    def chances(path: tuple[int, ...]) -> list[tuple[int, float]]:
        return law(seed, path, children, dice_certain)

    dice_certain = dice.choice([0.0, 0.3])
    growth = Growth(width, limit, least, {END})
    grown(growth, children, depth, chances)
    draft = growth.draft("test")

    found: list[tuple[tuple[int, ...], float]] = []
    level = [((), 1.0)]
    for _ in range(depth):
        proposed = [((*path, token), v * chance) for path, v in level for token, chance in chances(path) if v * chance >= least]
        found += proposed
        level = sorted((item for item in proposed if item[0][-1] != END), key=lambda item: -item[1])[:width]
    found = sorted(found, key=lambda item: -item[1])[:limit]
    assert sorted(draft.estimates, reverse=True) == list(draft.estimates) == pytest.approx([value for _, value in found])
    if len({value for _, value in found}) == len(found):
        assert paths(draft.tree) == [path for path, _ in found]
    assert draft.sources == ("test",) * len(found)


def test_of_equals_the_parent_comes_first_and_is_kept() -> None:
    growth = Growth(2, 2, 0.1, ())
    growth.add(ROOT, [1, 2], [0.9, 0.05])
    assert growth.next() == [0]
    growth.add(0, [3], [1.0])
    assert growth.next() == [1]
    growth.add(1, [4], [1.0000001])  # rounding
    assert growth.next() == [], "no room is left for its children"
    draft = growth.draft("test")
    assert paths(draft.tree) == [(1,), (1, 3)]
    assert draft.estimates == (0.9, 0.9)


def test_a_row_of_nan_proposes_nothing() -> None:
    growth = Growth(2, 8, 0.1, ())
    growth.add(ROOT, [1, 2], [math.nan, math.nan])
    assert growth.next() == []
    assert len(growth.draft("test")) == 0
