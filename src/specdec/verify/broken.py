"""Rules with a fault each: what a check of rules must catch before its silence means anything.

Most were shipped somewhere. They are the two walks that all rules by chance are, down from the root and up from the leaves,
written once more with their parts apart, and one part wrong. With no part wrong they are exact, so that what is caught is the
fault.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.types import ROOT, Draft, Siblings, Verdict
from specdec.verify.base import Chance, Law, Rule
from specdec.verify.enumeration import Judge, context_free, distance, siblings
from specdec.verify.follow import follow, greedy
from specdec.verify.rows import Draw, drawn

CAUGHT = 1e-9
"""A rule is at fault if what it emits is further than this from the target's law: three orders above what rounding leaves."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A faulty rule, under the name of its fault, and which right one it mimics."""

    rule: Rule
    mimics: str

    def distance(self) -> float:
        """Of what it emits from the target's law, by enumeration in a world where the fault shows; see ``CAUGHT``."""
        kinds, depth = {"distinct": (("sampled", "top"), 2), "repeated": (("again", "again"), 1)}.get(
            self.rule.siblings or "", (("sampled",), 2)
        )
        p, q = context_free((0.1, 0.6, 0.3)), context_free((0.8, 0.1, 0.1))
        return distance(self.rule.judge, p, q, siblings(*kinds), depth)


@dataclass(frozen=True, slots=True)
class Down:
    """The walk from the root. ``p`` is the target's law at a node, ``left`` what refusals of children leave of it."""

    coins: Callable[[Chance], Callable[[], float]] = lambda chance: chance.uniform
    """What the numbers of a burst that decide about children come from."""
    below: Callable[[float, float], bool] = operator.lt
    """(uniform, odds) -> is the child accepted?"""
    odds: Callable[[Tensor, Tensor, Tensor, int], float] = lambda left, p, row, token: float(left[token] / row[token])
    draws: Callable[[Many[Draw]], Many[Draw]] = lambda draws: draws
    row: Callable[[Many[Draw], Draw], Draw] = lambda draws, draw: draw
    """(all of a node's children, one) -> the draw whose row of q judges that one."""
    after: Callable[[Tensor, Tensor], Tensor] = lambda rest, left: _normalised(rest, left)
    """(what lies above the row of q, what was left before) -> what is left for the next child."""
    corrected: Callable[[Tensor, Tensor], Tensor] = lambda left, p: left
    """Of what the corrected or bonus token is drawn."""

    def __call__(self, draft: Draft, law: Law, chance: Chance) -> Verdict:
        below, coin = drawn(draft), self.coins(chance)
        node, path, tokens = ROOT, list[int](), tuple[int, ...]()
        while True:
            left = p = law(node, tokens)
            draws = self.draws(below[node])
            for draw in draws:
                token = draft.tree.tokens[draw.node]
                row = _row(draft, self.row(draws, draw), len(p))
                if self.below(coin(), self.odds(left, p, row, token)):
                    break
                left = self.after((left - row).clamp(min=0), left)
            else:
                return Verdict(tuple(path), chance.draw(self.corrected(left, p)))
            node = draw.node
            path.append(node)
            tokens = (*tokens, token)


@dataclass(frozen=True, slots=True)
class Up:
    """The walk from the leaves; ``kept`` is the share of the target's mass that the path down to a node carries."""

    turn: Callable[[Many[Draw]], Draw] = lambda draws: draws[0]
    """Of the children that are left, the one that is tried next."""
    most: float = 1.0
    """What is kept is at most this."""
    share: Callable[[float], float] = lambda kept: kept
    """The part of the law that a refused child is taken out of."""
    staying: Callable[[float, float], float] = lambda kept, mass: mass / (mass + 1 - kept) if mass + 1 - kept > 0 else 1.0
    """(kept, mass of the residual) -> what is kept after a refusal."""
    corrected: Callable[[Tensor, Tensor], Tensor] = lambda left, p: left

    def __call__(self, draft: Draft, law: Law, chance: Chance) -> Verdict:
        below, tree = drawn(draft), draft.tree
        node, path, tokens = ROOT, list[int](), tuple[int, ...]()
        kept, first = {ROOT: 1.0}, {ROOT: law(ROOT, ())}
        left = dict(first)
        while True:
            while below[node]:
                draw = self.turn(below[node])
                token = tree.tokens[draw.node]
                row = _row(draft, draw, len(left[node]))
                kept[draw.node] = min(self.most, kept[node] * float(left[node][token] / row[token]))
                node = draw.node
                path.append(node)
                tokens = (*tokens, token)
                if node not in left:
                    left[node] = first[node] = law(node, tokens)
            if node == ROOT or chance.uniform() < kept[node]:
                return Verdict(tuple(path), chance.draw(self.corrected(left[node], first[node])))
            node, path, tokens = tree.parents[node], path[:-1], tokens[:-1]
            refused = self.turn(below[node])
            below[node].remove(refused)
            rest = (self.share(kept[node]) * left[node] - _row(draft, refused, len(left[node]))).clamp(min=0)
            kept[node] = self.staying(kept[node], float(rest.sum()))
            left[node] = _normalised(rest, left[node])


def _row(draft: Draft, draw: Draw, v: int) -> Tensor:
    if draft.q is not None:
        return draft.q[draw.row]
    return torch.eye(v, dtype=torch.float64)[draft.tree.tokens[draw.node]]


def _normalised(rest: Tensor, instead: Tensor) -> Tensor:
    return rest / rest.sum() if rest.sum() > 0 else instead


def _fresh_choice(draft: Draft, law: Law, chance: Chance) -> Verdict:
    def pick(node: int, tokens: tuple[int, ...]) -> int:
        p = law(node, tokens)
        drafted = {t for t, parent in zip(draft.tree.tokens, draft.tree.parents, strict=True) if parent == node}
        token = chance.draw(p)
        return token if token in drafted else chance.draw(p)

    return follow(draft.tree, pick)


def _one_coin(chance: Chance) -> Callable[[], float]:
    coin = chance.uniform()
    return lambda: coin


def _stale_noise(draft: Draft, law: Law, chance: Chance) -> Verdict:
    noise = chance.uniform()

    def pick(node: int, tokens: tuple[int, ...]) -> int:
        possible = [(token, likely) for token, likely in enumerate(law(node, tokens).tolist()) if likely > 0]
        below = 0.0
        for token, likely in possible:
            below += likely
            if noise < below:
                return token
        return possible[-1][0]

    return follow(draft.tree, pick)


def _certain(left: Tensor, p: Tensor) -> Tensor:
    return torch.eye(len(p), dtype=torch.float64)[int(left.argmax())]


def _whole(left: Tensor, p: Tensor) -> Tensor:
    return p


def _broken(name: str, fault: str, mimics: str, drawn_as: Siblings | None, judge: Judge) -> Broken:
    return Broken(Rule(name, judge, "law", drawn_as, "", fault), mimics)


BROKEN: dict[str, Broken] = {
    broken.rule.name: broken
    for broken in (
        _broken("at-most", "u <= p / q lets tokens of probability 0 through", "rejection", "one", Down(below=operator.le)),
        _broken(
            "odds-of-target", "accepts by p, not by p / q", "rejection", "one", Down(odds=lambda left, p, q, t: float(p[t]))
        ),
        _broken("corrected-from-target", "draws the corrected token from p", "rejection", "one", Down(corrected=_whole)),
        _broken("one-coin", "decides all tokens of a burst by one random number", "rejection", "one", Down(coins=_one_coin)),
        _broken("corrected-by-argmax", "takes the likeliest token last", "rejection", "one", Down(corrected=_certain)),
        _broken(
            "siblings-against-target",
            "judges later siblings by p, not by what refusals leave of it",
            "recursive",
            "distinct",
            Down(odds=lambda left, p, row, token: float(p[token] / row[token])),
        ),
        _broken(
            "residual-not-normalised",
            "judges later siblings by a residual that does not add up to 1",
            "recursive",
            "distinct",
            Down(after=lambda rest, left: rest if rest.sum() > 0 else left, corrected=lambda left, p: left / left.sum()),
        ),
        _broken(
            "rows-not-renormalised",
            "judges later siblings by the first one's row of q",
            "recursive",
            "distinct",
            Down(row=lambda draws, draw: draws[0]),
        ),
        _broken(
            "repeated-draws-forgotten",
            "judges a token once however often it was drawn",
            "multistep",
            "repeated",
            Down(draws=lambda draws: list({draw.node: draw for draw in reversed(draws)}.values())[::-1]),
        ),
        _broken("block-without-shares", "leaves p - q, not share x p - q", "block", "one", Up(share=lambda kept: 1.0)),
        _broken(
            "block-never-lowered", "keeps prefixes by min(1, p / q) alone", "block", "one", Up(staying=lambda kept, mass: kept)
        ),
        _broken("block-above-one", "lets a prefix carry more than the target's mass", "block", "one", Up(most=math.inf)),
        _broken(
            "last-leaf-first",
            "tries siblings in another order than they were drawn in",
            "traversal",
            "distinct",
            Up(turn=lambda draws: draws[-1]),
        ),
        _broken("corrected-from-law", "draws the corrected token from p", "traversal", "distinct", Up(corrected=_whole)),
        _broken(
            "shares-never-lowered",
            "keeps a node's share of the mass when its children are refused",
            "traversal",
            "distinct",
            Up(staying=lambda kept, mass: kept),
        ),
        _broken("fresh-choice", "draws anew where its first draw was not drafted", "coupled", None, _fresh_choice),
        _broken("stale-noise", "draws all tokens of a burst by one random number", "coupled", None, _stale_noise),
        _broken("always-greedy", "takes the likeliest token at any temperature", "coupled", None, greedy),
    )
}
"""Every broken rule by name."""
