"""Everything that is derived from a ``Tree``: depths, children, paths, subtrees. Pure functions over integers.

A chain and the empty tree are ordinary cases. Every function is O(nodes) or O(nodes x depth) and runs once per step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from specdec.types import ROOT, Draft, Tree


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


def main_path(draft: Draft) -> list[int]:
    """The nodes from the root down, at each the child of the largest estimate; the first, of several or without estimates."""
    path: list[int] = []
    below = children(draft.tree)
    while found := list(below[path[-1] if path else ROOT].values()):
        path.append(max(found, key=lambda node: draft.estimates[node]) if draft.estimates else found[0])
    return path


def prune(draft: Draft, kept: Collection[int]) -> Draft:
    """The draft of the ``kept`` nodes alone, in the same order.

    Raises:
        ValueError: a node is kept whose parent is not, or nodes were sampled. Dropping a sampled node after a look at its
            token would change the law of what is emitted where drafts are accepted by chance: ask for fewer instead.
    """
    if draft.q is not None:
        raise ValueError("a sampled draft cannot be pruned: its nodes were drawn to be verified, ask for fewer instead")
    tree = draft.tree
    nodes, parents = sorted(kept), list[int]()
    place = {ROOT: ROOT}  # node -> its place among those kept
    for i, node in enumerate(nodes):
        parent = place.get(tree.parents[node])
        if parent is None:
            raise ValueError(f"node {node} is kept, but its parent {tree.parents[node]} is not")
        place[node] = i
        parents.append(parent)
    return Draft(
        Tree(tuple([tree.tokens[node] for node in nodes]), tuple(parents)),
        tuple([draft.sources[node] for node in nodes]),
        estimates=tuple([draft.estimates[node] for node in nodes]) if draft.estimates else (),
    )
