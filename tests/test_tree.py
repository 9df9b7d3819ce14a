"""What is derived from a tree equals what following parents one by one gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import trees

from specdec.tree import ancestors, chain, children, depths, path_tokens, prune
from specdec.types import ROOT, Draft, Tree

# a(0) - c(2)      Nodes 0 and 1 follow the pending token; 2 and 3 follow node 0; 4 follows node 3.
#      \ d(3) - b(4)
# b(1)
FORK = Tree(tokens=(10, 11, 12, 13, 11), parents=(ROOT, ROOT, 0, 0, 3))


def test_fork() -> None:
    assert depths(FORK) == [1, 1, 2, 2, 3]
    assert ancestors(FORK) == [(0,), (1,), (0, 2), (0, 3), (0, 3, 4)]
    assert children(FORK) == {ROOT: {10: 0, 11: 1}, 0: {12: 2, 13: 3}, 1: {}, 2: {}, 3: {11: 4}, 4: {}}
    assert path_tokens(FORK, 4) == (10, 13, 11)
    assert path_tokens(FORK, ROOT) == ()


def test_children_keep_the_order_of_drafting() -> None:
    """Verification by chance walks siblings in the order in which they were drawn, not by token."""
    tree = Tree(tokens=(9, 3, 5), parents=(ROOT, ROOT, ROOT))
    assert list(children(tree)[ROOT].items()) == [(9, 0), (3, 1), (5, 2)]


def test_empty_tree_is_plain_decoding() -> None:
    empty = chain([])
    assert len(empty) == 0
    assert (depths(empty), ancestors(empty)) == ([], [])
    assert children(empty) == {ROOT: {}}


@given(st.lists(st.integers(0, 5), max_size=64))
def test_chain_continues_node_by_node(tokens: list[int]) -> None:
    tree = chain(iter(tokens))
    assert depths(tree) == list(range(1, len(tokens) + 1))
    assert ancestors(tree) == [tuple(range(node + 1)) for node in range(len(tokens))]
    assert [path_tokens(tree, node) for node in range(len(tokens))] == [tuple(tokens[: n + 1]) for n in range(len(tokens))]


@given(trees(max_nodes=24, vocab_size=4))
def test_derived_values_equal_following_parents(tree: Tree) -> None:
    for node in range(len(tree)):
        walk = [node]
        while tree.parents[walk[-1]] != ROOT:
            walk.append(tree.parents[walk[-1]])
        walk.reverse()
        assert ancestors(tree)[node] == tuple(walk)
        assert path_tokens(tree, node) == tuple(tree.tokens[i] for i in walk)
        assert depths(tree)[node] == len(walk)
    for node in range(ROOT, len(tree)):
        below = [child for child in range(len(tree)) if tree.parents[child] == node]
        assert list(children(tree)[node].items()) == [(tree.tokens[child], child) for child in below]


@given(trees(max_nodes=12, vocab_size=3))
def test_paths_name_nodes(tree: Tree) -> None:
    """Siblings differ, so no two nodes have the same path of tokens: a path of tokens names at most one node."""
    paths = [path_tokens(tree, node) for node in range(len(tree))]
    assert len(set(paths)) == len(paths)


@settings(max_examples=200)
@given(trees(max_nodes=10, vocab_size=3), st.data())
def test_a_pruned_draft_keeps_its_paths(tree: Tree, data: st.DataObject) -> None:
    """The kept nodes have the paths, sources and estimates that they had, and nothing else is left."""
    kept = {n for n in range(len(tree)) if data.draw(st.booleans())}
    kept = {n for n in kept if set(ancestors(tree)[n]) <= kept}
    draft = Draft(tree, tuple(f"d{n}" for n in range(len(tree))), estimates=tuple(1 / (1 + n) for n in range(len(tree))))
    got = prune(draft, kept)
    order = sorted(kept)
    assert [path_tokens(got.tree, n) for n in range(len(got))] == [path_tokens(tree, n) for n in order]
    assert got.sources == tuple(f"d{n}" for n in order)
    assert got.estimates == tuple(1 / (1 + n) for n in order)


def test_what_cannot_be_pruned() -> None:
    """A node without its parent is no tree; a sampled node that is dropped would bias what is emitted."""
    draft = Draft(chain([1, 2]), ("x", "x"))
    with pytest.raises(ValueError, match="its parent 0 is not"):
        prune(draft, [1])
    with pytest.raises(ValueError, match="sampled"):
        prune(Draft(chain([1]), ("x",), torch.ones(1, 1)), [])
