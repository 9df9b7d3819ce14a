"""Everything that is derived from a ``Tree``: depths, children, paths. Pure functions over integers.

A chain and the empty tree are ordinary cases. Every function is O(nodes) or O(nodes x depth) and runs once per step.
"""

from __future__ import annotations

from collections.abc import Iterable

from specdec.types import ROOT, Tree


def chain(tokens: Iterable[int]) -> Tree:
    """The tree in which each token continues the one before."""
    tokens = tuple(tokens)
    return Tree(tokens, tuple(range(ROOT, len(tokens) - 1)))


def depths(tree: Tree) -> list[int]:
    """Per node, its distance from the pending token: 1 for a node that directly follows it."""
    depth: list[int] = []
    for parent in tree.parents:
        depth.append(1 if parent == ROOT else depth[parent] + 1)
    return depth


def children(tree: Tree) -> dict[int, dict[int, int]]:
    """For ``ROOT`` and every node, its children as token -> node, in order of drafting."""
    found: dict[int, dict[int, int]] = {node: {} for node in range(ROOT, len(tree))}
    for node, parent in enumerate(tree.parents):
        found[parent][tree.tokens[node]] = node
    return found


def ancestors(tree: Tree) -> list[tuple[int, ...]]:
    """Per node, the nodes from the root's child down to the node itself: what it sees beyond the committed tokens."""
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(tree.parents):
        paths.append((node,) if parent == ROOT else (*paths[parent], node))
    return paths


def path_tokens(tree: Tree, node: int) -> tuple[int, ...]:
    """The tokens from the root's child down to ``node``, both included; empty for ``ROOT``."""
    tokens: list[int] = []
    while node != ROOT:
        tokens.append(tree.tokens[node])
        node = tree.parents[node]
    return tuple(reversed(tokens))
