"""The target chooses, and drafted nodes that agree stay: the output is that of plain decoding, whatever was drafted."""

from __future__ import annotations

from collections.abc import Callable

from specdec.sampling import SamplingError
from specdec.types import ROOT, Draft, Tree, Verdict
from specdec.verify.base import Chance, Law


def follow(tree: Tree, pick: Callable[[int, tuple[int, ...]], int]) -> Verdict:
    """Walk down the tree along the tokens that the target picks.

    Args:
        pick: (node, tokens of the path down to it) -> the target's token after that path; the node is ``ROOT`` for the
            pending token. It is called for the nodes on the emitted path only, in order.

    Raises:
        SamplingError: no token can be picked after the pending one. Where that happens further down, the walk ends before
            it, and the error is met again if plain decoding would get there: an end token may come first.
    """
    below = {(parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    node = ROOT
    path: list[int] = []
    tokens: tuple[int, ...] = ()
    while True:
        try:
            token = pick(node, tokens)
        except SamplingError:
            if not path:
                raise
            return Verdict(tuple(path[:-1]), tokens[-1])
        if (node, token) not in below:
            return Verdict(tuple(path), token)
        node = below[node, token]
        path.append(node)
        tokens = (*tokens, token)


def coupled(draft: Draft, law: Law, chance: Chance) -> Verdict:
    """Draw each token from the target's law. With ``chance`` the noise of the token's position, as plain decoding has it, the
    tokens are plain decoding's (Daliri, Musco, Suresh, arXiv 2408.07978)."""
    return follow(draft.tree, lambda node, tokens: chance.draw(law(node, tokens)))


def greedy(draft: Draft, law: Law, chance: Chance) -> Verdict:
    """Take the most likely token, the lowest of several: plain decoding at temperature 0."""
    return follow(draft.tree, lambda node, tokens: int(law(node, tokens).argmax()))
