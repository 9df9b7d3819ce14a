"""Traversal Verification (Weng et al., arXiv 2505.12398): a tree judged from its leaves to its root.

A leaf's whole path stays or the leaf is taken off, which leaves its parent with a residual, a share of the target's mass and
its other children; so a node that a walk from the root would have refused stays where its descendants are good. On a chain
it is block verification.
"""

from __future__ import annotations

from torch import Tensor

from specdec.sampling import SamplingError
from specdec.tree import path_tokens
from specdec.types import ROOT, Draft, Verdict
from specdec.verify.base import Chance, Law, ending
from specdec.verify.block import staying
from specdec.verify.rows import check_distinct, drawn, excess, odds


def traversal(draft: Draft, law: Law, chance: Chance) -> Verdict:
    """Judge leaf by leaf, the first one first; ``law`` is asked for the nodes on the paths to the leaves that were tried.

    Raises:
        ValueError: a row of q gives its node's earlier siblings, or does not give the node's token, any probability.
    """
    check_distinct(draft, "traversal")
    tree = draft.tree
    left = drawn(draft)  # children that were not taken off
    kept = {ROOT: 1.0}  # share of the target's mass that the path down to a node carries
    laws: dict[int, Tensor | None] = {ROOT: law(ROOT, ())}  # or what is left of them; None: nothing can follow the node

    node = ROOT
    while True:
        p = laws[node]
        while left[node] and p is not None:
            draw = left[node][0]
            kept[draw.node] = min(1.0, kept[node] * odds(p, draft, draw))
            node = draw.node
            if node not in laws:
                try:
                    laws[node] = law(node, path_tokens(tree, node))
                except SamplingError:
                    laws[node] = None
            p = laws[node]
        if node == ROOT or chance.uniform() < kept[node]:
            break
        parent = tree.parents[node]
        above = laws[parent]
        assert above is not None, "a node after which nothing can come has no children that are judged"
        laws[parent], mass = excess(above, draft, left[parent].pop(0), kept[parent])
        kept[parent] = staying(kept[parent], mass)
        node = parent
    return ending(tree, node, p, chance)
