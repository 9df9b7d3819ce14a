"""Sequences without a cache, and the other side of a drafter: the pass that it observes."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, cast

import torch

from specdec.config import SamplingParams
from specdec.draft.base import Drafter
from specdec.metrics.stats import Stats
from specdec.types import ROOT, Draft, Forward, Sequence, Span, Step, Tree, Verdict

if TYPE_CHECKING:
    from specdec.history import History
    from specdec.kv.blocks import BlockTable


def sequence(
    tokens: Many[int], n_prompt: int | None = None, *, number: int = 0, end_tokens: Many[int] = (), room: int = 1 << 30
) -> Sequence:
    return Sequence(
        id=number,
        tokens=list(tokens),
        n_prompt=len(tokens) if n_prompt is None else n_prompt,
        params=SamplingParams(),
        seed=0,
        max_len=len(tokens) + room,
        end_tokens=frozenset(end_tokens),
        table=cast("BlockTable", None),
        history=cast("History", None),
        stats=Stats(),
        status="running",
    )


def propose(drafter: Drafter, row: Sequence, budget: int) -> Draft:
    (draft,) = drafter.propose([row], [budget])
    assert len(draft) <= budget
    return draft


def paths(tree: Tree) -> list[tuple[int, ...]]:
    """The tokens from the root to each node, in order of node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((() if parent == ROOT else found[parent]) + (token,))
    return found


def walk(tree: Tree, wanted: Many[int]) -> tuple[int, ...]:
    """The nodes that a target accepts whose next tokens are ``wanted``."""
    nodes = {path: node for node, path in enumerate(paths(tree))}
    accepted: list[int] = []
    for depth in range(1, len(wanted) + 1):
        if (node := nodes.get(tuple(wanted[:depth]))) is None:
            break
        accepted.append(node)
    return tuple(accepted)


def run_pass(drafter: Drafter, row: Sequence, draft: Draft, wanted: Many[int], logits: torch.Tensor | None = None) -> int:
    """Verify a draft against the tokens the target wants, commit, let the drafter observe; returns tokens emitted."""
    path = walk(draft.tree, wanted[:-1])
    emitted = list(wanted[: len(path) + 1])
    span = Span(row, len(row.tokens) - 1, len(row.tokens), draft)
    row.tokens += emitted
    n = 1 + len(draft)
    forward = Forward(torch.zeros(n, 4) if logits is None else logits, (slice(0, n),))
    drafter.observe(Step((span,)), forward, [Verdict(path, emitted[-1])])
    return len(emitted)
