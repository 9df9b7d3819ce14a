"""Arithmetic of the rules that accept by chance: a node's odds, what a refusal leaves of the target's law, and the checks of
what a draft must be. float64 throughout; a deterministic node's row is one-hot and is never written out."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from specdec.types import ROOT, Draft

EXHAUSTED = 1e-12
"""A residual of less mass than this is rounding: target and draft agree, and the target itself stands in."""


class Draw(NamedTuple):
    """One time that a node was drawn."""

    node: int
    row: int
    """Of q."""


def drawn(draft: Draft) -> dict[int, list[Draw]]:
    """For ``ROOT`` and every node, its children in the order drawn; one that was drawn again is there again."""
    found: dict[int, list[Draw]] = {node: [] for node in range(ROOT, len(draft))}
    for row, node in enumerate(draft.draws or range(len(draft))):
        found[draft.tree.parents[node]].append(Draw(node, row))
    return found


def odds(p: Tensor, draft: Draft, draw: Draw) -> float:
    """p / q of a drawn token, p [V] being the target's law or what is left of it.

    Raises:
        ValueError: q rules the token out, so q is not what it was drawn from.
    """
    token = draft.tree.tokens[draw.node]
    if draft.q is None:
        return float(p[token])
    q = float(draft.q[draw.row, token])
    if not q > 0:
        raise ValueError(f"node {draw.node} holds token {token}, to which its own row of q gives no probability")
    return float(p[token]) / q


def excess(p: Tensor, draft: Draft, draw: Draw, share: float = 1.0) -> tuple[Tensor, float]:
    """What of share x p lies above the draw's row of q: [V] normalised, and its mass. p itself where that is no mass."""
    if draft.q is None:
        rest = p * share
        rest[draft.tree.tokens[draw.node]] = 0
    else:
        rest = (p * share - draft.q[draw.row]).clamp(min=0)
    mass = float(rest.sum())
    return (rest / mass, mass) if mass >= EXHAUSTED else (p, 0.0)


def check_chain(draft: Draft, rule: str) -> None:
    """Raise ValueError unless each token continues the one before."""
    if draft.tree.parents != tuple(range(ROOT, len(draft) - 1)) or len(draft.draws) > len(draft):
        raise ValueError(f"{rule} judges chains, and this draft is a tree with parents {draft.tree.parents}")


def check_distinct(draft: Draft, rule: str) -> None:
    """Raise ValueError where a sampled node could have been drawn as one of its earlier siblings."""
    if draft.q is None:
        return
    if len(draft.draws) > len(draft):
        raise ValueError(f"{rule} needs siblings drawn without replacement, and this draft drew one again: {draft.draws}")
    for siblings in drawn(draft).values():
        tokens = [draft.tree.tokens[draw.node] for draw in siblings]
        for i, draw in enumerate(siblings[1:], start=1):
            if float(draft.q[draw.row, tokens[:i]].sum()) > 0:
                raise ValueError(
                    f"{rule} needs siblings drawn without replacement, "
                    f"and the row of node {draw.node} gives its earlier siblings' tokens some probability"
                )
