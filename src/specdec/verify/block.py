"""Block verification of a chain (Sun et al., arXiv 2403.10444): the longest prefix that may stay, judged as a whole.

Judging token by token gives up what a later token would have made good. Here prefix i stays with a probability that knows how
much of the target's mass the tokens up to i have used, and how much is left to correct with, and the longest that may stay is
taken. No rule for one chain accepts more on average.
"""

from __future__ import annotations

from torch import Tensor

from specdec.sampling import SamplingError
from specdec.types import Draft, Verdict
from specdec.verify.base import Chance, Law
from specdec.verify.rows import Draw, check_chain, excess, odds


def block(draft: Draft, law: Law, chance: Chance) -> Verdict:
    """Judge a chain from its end; ``law`` is asked for all of its nodes.

    Raises:
        ValueError: the draft is no chain, or a node holds a token that its row of q rules out.
    """
    check_chain(draft, "block")
    tokens = draft.tree.tokens
    laws: list[Tensor] = []
    kept = [1.0]  # kept[i]: the share of the target's mass that the first i tokens carry, at most 1
    for i in range(len(draft) + 1):
        try:
            laws.append(law(i - 1, tokens[:i]))
        except SamplingError:
            if not i:
                raise
            break  # nothing can follow token i - 1, which may stay
        if i < len(draft):
            kept.append(min(1.0, kept[i] * odds(laws[i], draft, Draw(i, i))))
    last = len(kept) - 1
    for i in range(last, -1, -1):
        if i == last:
            stays, p = kept[i], laws[i] if i < len(laws) else None
        else:
            p, mass = excess(laws[i], draft, Draw(i, i), kept[i])
            stays = staying(kept[i], mass)
        if i == 0 or chance.uniform() < stays:
            break
    if p is None:
        return Verdict(tuple(range(i - 1)), tokens[i - 1])
    return Verdict(tuple(range(i)), chance.draw(p))


def staying(kept: float, mass: float) -> float:
    """The probability that a prefix stays whose continuation was refused, ``mass`` being left to correct it with."""
    lost = 1.0 - kept
    return mass / (mass + lost) if mass + lost > 0 else 1.0
