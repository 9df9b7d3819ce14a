"""Typical acceptance (Medusa, Cai et al., arXiv 2401.10774). Lossy: what is emitted does not have the target's law.

A drafted token stays if the target finds it likely enough, where the less certain the target is, the less is enough.
"""

from __future__ import annotations

import math

from torch import Tensor

from specdec.sampling import SamplingError
from specdec.tree import path_tokens
from specdec.types import ROOT, Draft, Verdict
from specdec.verify.base import Chance, Law, ending

EPSILON = 0.09
"""A token more likely than this always stays."""

DELTA = 0.3
"""Of exp(-entropy), a token more likely than this share of it stays."""


def typical(draft: Draft, law: Law, chance: Chance) -> Verdict:
    """The longest path all of whose tokens stay, of several the likeliest; then a token from the target's law."""
    tree = draft.tree
    stays = {ROOT: (0, 0.0)}  # depth, log-likelihood
    laws: dict[int, Tensor | None] = {ROOT: law(ROOT, ())}  # None: nothing can follow the node
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent not in stays:
            continue
        p = _law(laws, law, draft, parent)
        if p is not None and (likely := float(p[token])) > threshold(p):
            depth, total = stays[parent]
            stays[node] = depth + 1, total + math.log(likely)
    node = max(stays, key=lambda node: stays[node])
    p = _law(laws, law, draft, node)
    return ending(tree, node, p, chance)


def threshold(p: Tensor) -> float:
    """The probability above which a token of the law p [V] stays."""
    likely = p[p > 0]
    entropy = -float((likely * likely.log()).sum())
    return min(EPSILON, DELTA * math.exp(-entropy))


def _law(laws: dict[int, Tensor | None], law: Law, draft: Draft, node: int) -> Tensor | None:
    if node not in laws:
        try:
            laws[node] = law(node, path_tokens(draft.tree, node))
        except SamplingError:
            laws[node] = None
    return laws[node]
