"""A hypothesis strategy for draft trees of every shape."""

from __future__ import annotations

from hypothesis import strategies as st

from specdec.types import ROOT, Tree


@st.composite
def trees(draw: st.DrawFn, max_nodes: int, vocab_size: int) -> Tree:
    """Trees of at most ``max_nodes`` nodes, the empty tree and chains among them."""
    taken: list[tuple[int, int]] = []
    for node in range(draw(st.integers(0, max_nodes))):
        edge = (draw(st.integers(ROOT, node - 1)), draw(st.integers(0, vocab_size - 1)))
        if edge in taken:
            break
        taken.append(edge)
    return Tree(tuple(token for _, token in taken), tuple(parent for parent, _ in taken))
