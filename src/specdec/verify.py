"""Which drafted tokens are accepted, and the token that follows them. Pure, exact, and blind to models and drafters.

``follow`` lets the target choose and keeps the drafted nodes that agree: the output is that of plain decoding, token for
token, whatever was drafted. ``residual`` accepts and corrects by chance so that the output has the target's law: the rule
for drafts that were sampled, where the randomness is not shared with plain decoding.

*accepted*: a drafted node on the emitted path. *corrected*: the last token, where drafted children were refused.
*bonus*: the last token, where the path ran to a leaf. Every call emits ``len(path) + 1`` tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.sampling import SamplingError
from specdec.tree import children
from specdec.types import ROOT, Tree, Verdict

EXHAUSTED = 1e-12
"""A residual of less mass than this is rounding: target and draft agree, and the target itself stands in."""


def follow(tree: Tree, pick: Callable[[int, tuple[int, ...]], int]) -> Verdict:
    """Walk down the tree along the tokens that the target picks.

    Args:
        pick: (node, tokens of the path down to it) -> the target's token after that path; the node is ``ROOT`` for the
            pending token. It is called for the nodes on the emitted path only, in order.

    Raises:
        SamplingError: no token can be picked after the pending one. Where that happens further down, the walk ends before
            it, and the error is met again if plain decoding would get there: an end token may come first.
    """
    below = children(tree)
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
        if token not in below[node]:
            return Verdict(tuple(path), token)
        node = below[node][token]
        path.append(node)
        tokens = (*tokens, token)


def residual(
    tree: Tree,
    q: Tensor | None,
    law: Callable[[int, tuple[int, ...]], Tensor],
    uniform: Callable[[], float],
    draw: Callable[[Tensor], int],
) -> Verdict:
    """Accept or refuse the children of each accepted node in turn; what is emitted has the target's law exactly.

    A child is accepted with probability min(1, p(token) / q(token)). Where it is refused, p becomes the normalised part of
    p above q, for the next child and at last for the corrected token (Leviathan et al., arXiv 2211.17192, one child;
    Miao et al., arXiv 2305.09781, several). Exact only if ``q[i]`` is the law that node i was really drawn from, given all
    that was drawn before it: for a child drawn so as to differ from earlier siblings, the row without their tokens,
    normalised. Whether a node exists may depend on anything but its own token.

    Args:
        q: [n, V] float64 rows that the nodes were drawn from, one-hot for a deterministic node; None where all are.
        law: (node, tokens of the path down to it) -> [V] float64, the target's probabilities after that path.
        uniform: a number in [0, 1), independent of all others.
        draw: a token with the probabilities it is given.

    Raises:
        ValueError: a node holds a token that its row of q rules out, so that row is not what it was drawn from.
    """
    below = children(tree)
    node = ROOT
    path: list[int] = []
    tokens: tuple[int, ...] = ()
    while True:
        p = law(node, tokens)
        for token, child in below[node].items():
            row = _one_hot(p, token) if q is None else q[child]
            if row[token] <= 0:
                raise ValueError(f"node {child} holds token {token}, to which its own row of q gives no probability")
            if uniform() < float(p[token] / row[token]):  # strict: a token of probability 0 is never accepted
                break
            rest = (p - row).clamp(min=0)
            mass = rest.sum()
            p = rest / mass if mass >= EXHAUSTED else p
        else:
            return Verdict(tuple(path), draw(p))
        node = child
        path.append(node)
        tokens = (*tokens, token)


def _one_hot(p: Tensor, token: int) -> Tensor:
    row = torch.zeros_like(p)
    row[token] = 1
    return row
