"""A small world cut out of the audited model, in which the joint law of the first tokens is known exactly.

After a prompt, the few most likely tokens of each context, with the probabilities that the sampler really gives them, and their
continuations.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specdec.config import SamplingParams
from specdec.history import History
from specdec.llm import LLM
from specdec.runner.probe import Probe
from specdec.sampling import warp
from specdec.types import ROOT, Draft, Span, Tree

WIDE, DEEP = 3, 2
"""Tokens per context and drafted levels of the world that is drawn from; the joint law is that of one token more."""

PARAMS = SamplingParams(temperature=1.0, top_k=WIDE, ignore_eos=True, max_tokens=DEEP + 1)
"""Of requests whose answers are the world's."""


@dataclass(frozen=True, slots=True)
class World:
    """The most likely tokens of some contexts of the model, by rank: 0 is the most likely one.

    ``law`` and ``tokens`` are by path of ranks.
    """

    prompt: tuple[int, ...]
    law: dict[tuple[int, ...], Tensor]
    """[WIDE] float64, sums to 1."""
    tokens: dict[tuple[int, ...], list[int]]
    """The tokens of the ranks."""
    draft: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """[WIDE] the law of a drafter that is wrong in a known way: half the target's turned round, half a flatter one."""

    def __post_init__(self) -> None:
        for path, p in self.law.items():
            flat = p.sqrt()
            self.draft[path] = (p.flip(0) + flat / flat.sum()) / 2

    def p(self, path: tuple[int, ...]) -> Tensor:
        return self.law[path[:DEEP]]

    def q(self, path: tuple[int, ...]) -> Tensor:
        return self.draft[path[:DEEP]]

    def holed(self, path: tuple[int, ...]) -> Tensor:
        """``p`` with its last token ruled out, which the drafter goes on drafting."""
        p = self.p(path).clone()
        p[-1] = 0
        return p / p.sum()

    def astray(self, path: tuple[int, ...]) -> Tensor:
        """Another drafter, which drafts hardly anything but the least likely token: where the target is sure of itself, it
        alone leaves more than one token to choose from when its first one is refused."""
        p = self.p(path)
        few = min(float(p[1]) / 2, 0.1)
        q = torch.full_like(p, few)
        q[-1] = 1 - few * (WIDE - 1)
        return q

    def joint(self) -> dict[tuple[int, ...], float]:
        """Of the first ``DEEP + 1`` tokens, by their ranks."""
        paths = itertools.product(range(WIDE), repeat=DEEP + 1)
        return {path: float(np.prod([float(self.p(path[:i])[path[i]]) for i in range(len(path))])) for path in paths}

    def ranks(self, tokens: Many[int]) -> tuple[int, ...]:
        """The path of an answer; -1 for a token that its context rules out, and the path ends there."""
        path: tuple[int, ...] = ()
        for token in tokens[: DEEP + 1]:
            known = self.tokens[path]
            path = (*path, known.index(token) if token in known else -1)
            if path[-1] < 0:
                break
        return path


def cut_world(llm: LLM, prompt: tuple[int, ...]) -> World:
    """Compute the rows of a world: a pass for each level, over all contexts of it at once."""
    law: dict[tuple[int, ...], Tensor] = {}
    tokens: dict[tuple[int, ...], list[int]] = {}
    probe = Probe(llm.engine.model, llm.kernels, len(prompt) + WIDE + WIDE**2)
    nodes: dict[tuple[int, ...], int] = {(): ROOT}
    tree = Tree()
    for level in range(DEEP + 1):
        draft = Draft(tree, ("audit",) * len(tree))
        sequence = probe.sequence(list(prompt), len(prompt) + len(tree))
        (rows,) = probe.run(Span(sequence, 0, len(prompt), draft))
        sequence.table.truncate(0)
        for path in [path for path in nodes if len(path) == level]:
            written = [tokens[path[:i]][rank] for i, rank in enumerate(path)]
            history = History.of([*prompt, *written], len(prompt))
            p = warp(rows[nodes[path] + 1], PARAMS, history).exp()
            best = p.topk(WIDE)
            law[path], tokens[path] = best.values / best.values.sum(), best.indices.tolist()
            if level < DEEP:
                for rank, token in enumerate(tokens[path]):
                    nodes[(*path, rank)] = len(tree)
                    tree = Tree((*tree.tokens, token), (*tree.parents, nodes[path]))
    return World(prompt, law, tokens)
