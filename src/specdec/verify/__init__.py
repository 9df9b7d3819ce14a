"""Which drafted tokens are accepted, and the token that follows them. Pure, exact, and blind to models and drafters.

*accepted*: a drafted node on the emitted path. *corrected*: the last token, where drafted children were refused.
*bonus*: the last token, where the path ran to a leaf. Every verdict emits ``len(path) + 1`` tokens.

``coupled`` and ``greedy`` emit the tokens of plain decoding. The others decide by chance, with randomness that plain decoding
does not share: what they emit has the target's law, but other tokens than without a draft. ``typical`` does not even keep the
law. docs/rules.md says when each is of use.
"""

from __future__ import annotations

from specdec.verify.base import Chance, Guarantee, Law, Rule
from specdec.verify.block import block
from specdec.verify.follow import coupled, follow, greedy
from specdec.verify.residual import multistep, recursive, rejection
from specdec.verify.traversal import traversal
from specdec.verify.typical import typical

__all__ = ["RULES", "Chance", "Guarantee", "Law", "Rule", "follow"]

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            name="coupled",
            judge=coupled,
            keeps="tokens",
            siblings=None,
            paper="Daliri, Musco, Suresh, arXiv 2408.07978",
            summary="the target draws with its position's own noise; drafted tokens that it draws stay",
        ),
        Rule(
            name="greedy",
            judge=greedy,
            keeps="tokens",
            siblings=None,
            paper="Leviathan, Kalman, Matias, arXiv 2211.17192",
            summary="the target takes its most likely token; temperature 0 only",
        ),
        Rule(
            name="rejection",
            judge=rejection,
            keeps="law",
            siblings="one",
            paper="Leviathan, Kalman, Matias, arXiv 2211.17192; Chen et al., arXiv 2302.01318",
            summary="a chain, token by token: accept by p / q, correct from the residual",
        ),
        Rule(
            name="block",
            judge=block,
            keeps="law",
            siblings="one",
            paper="Sun et al., arXiv 2403.10444",
            summary="a chain, judged as a whole: accepts the most that a rule for one chain can",
        ),
        Rule(
            name="recursive",
            judge=recursive,
            keeps="law",
            siblings="distinct",
            paper="Jeon et al., arXiv 2402.14160; Chen et al., arXiv 2402.12374",
            summary="a tree from the root down, siblings drawn without replacement",
        ),
        Rule(
            name="multistep",
            judge=multistep,
            keeps="law",
            siblings="repeated",
            paper="Miao et al., arXiv 2305.09781",
            summary="a tree from the root down, siblings drawn independently",
        ),
        Rule(
            name="traversal",
            judge=traversal,
            keeps="law",
            siblings="distinct",
            paper="Weng et al., arXiv 2505.12398",
            summary="a tree from the leaves up, siblings drawn without replacement",
        ),
        Rule(
            name="typical",
            judge=typical,
            keeps="lossy",
            siblings=None,
            paper="Cai et al., arXiv 2401.10774",
            summary="lossy: drafted tokens that the target finds likely enough stay",
        ),
    )
}
"""Every rule by name; the names are those of config.ACCEPTANCES."""
