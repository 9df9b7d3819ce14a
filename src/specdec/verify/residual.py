"""Rules that walk down a tree and accept or refuse the children of each accepted node in turn.

A child is accepted with probability min(1, p(token) / q(token)). Where it is refused, p becomes the normalised part of p above
q, for the next child and at last for the corrected token. What is emitted then has the target's law exactly, if each row of q
is the law that its node was really drawn from, given all that was drawn before it. Whether a node exists may depend on
anything but its own token and what was computed from that.

One walk serves three rules. They differ in how the children must have been drawn, which decides what their rows are.
"""

from __future__ import annotations

from torch import Tensor

from specdec.sampling import SamplingError
from specdec.types import ROOT, Draft, Verdict
from specdec.verify.base import Chance, Law
from specdec.verify.rows import check_chain, check_distinct, drawn, excess, odds


def rejection(draft: Draft, law: Law, chance: Chance) -> Verdict:
    """A chain, token by token (Leviathan, Kalman, Matias, arXiv 2211.17192; Chen et al., arXiv 2302.01318).

    Raises:
        ValueError: the draft is no chain, or a node holds a token that its row of q rules out.
    """
    check_chain(draft, "rejection")
    return _walk(draft, law, chance)


def recursive(draft: Draft, law: Law, chance: Chance) -> Verdict:
    """Siblings drawn without replacement, each row without the tokens before it (RSD, Jeon et al., arXiv 2402.14160; Sequoia,
    Chen et al., arXiv 2402.12374).

    Raises:
        ValueError: a row of q gives its node's earlier siblings, or does not give the node's token, any probability.
    """
    check_distinct(draft, "recursive")
    return _walk(draft, law, chance)


def multistep(draft: Draft, law: Law, chance: Chance) -> Verdict:
    """Siblings drawn independently, each from the whole law; a token that was drawn twice is judged twice (multi-step
    speculative sampling of SpecInfer, Miao et al., arXiv 2305.09781).

    Raises:
        ValueError: a node holds a token that its row of q rules out.
    """
    return _walk(draft, law, chance)


def _walk(draft: Draft, law: Law, chance: Chance) -> Verdict:
    below = drawn(draft)
    node = ROOT
    path: list[int] = []
    tokens: tuple[int, ...] = ()
    while True:
        try:
            p: Tensor = law(node, tokens)
        except SamplingError:
            if not path:
                raise
            return Verdict(tuple(path[:-1]), tokens[-1])
        for draw in below[node]:
            if chance.uniform() < odds(p, draft, draw):  # strict: a token of probability 0 is never accepted
                break
            p = excess(p, draft, draw)[0]
        else:
            return Verdict(tuple(path), chance.draw(p))
        node = draw.node
        path.append(node)
        tokens = (*tokens, draft.tree.tokens[node])
