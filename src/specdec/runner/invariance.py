"""The start-up self-test: is a row's result the same bits whatever runs beside it, on this model and this machine?

Everything that speculation promises rests on it, so it is measured on the loaded model and not assumed. A short text is
run in one piece and one row at a time; the same rows are then repeated in a burst, in a tree whose branches lie
interleaved, in chunks, and beside another sequence, and compared bitwise.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.config import BLOCK_SIZE
from specdec.kernels.base import Kernels
from specdec.models.base import Model
from specdec.runner.probe import Probe, probe_text
from specdec.tree import chain
from specdec.types import ROOT, Draft, Span, Tree

PREFIX, SINGLES = 13, 6  # together they cross a block border
ROOM = 4 * BLOCK_SIZE
"""Slots of each of the sequences."""


@dataclass(frozen=True, slots=True)
class Invariance:
    """What the self-test found: for each way of running rows, the largest difference of a logit (0 is bitwise equal)."""

    differences: dict[str, float]
    seconds: float

    @property
    def exact(self) -> bool:
        return not any(self.differences.values())

    def describe(self) -> str:
        """One line for people."""
        if self.exact:
            return f"rows are bitwise independent of {', '.join(self.differences)}"
        worst = ", ".join(f"{name} {value:.1e}" for name, value in self.differences.items() if value)
        return f"NOT exact here: logits change with {worst}; tokens may differ where two are nearly tied"


def check_invariance(model: Model, kernels: Kernels) -> Invariance:
    """Run the self-test; takes about a dozen short passes."""
    started = time.perf_counter()
    probe = Probe(model, kernels, 4 * ROOM)
    vocab_size = model.shape.vocab_size
    text = probe_text(PREFIX + SINGLES, vocab_size)

    # The reference: one row at a time.
    alone = probe.sequence(text[:PREFIX], ROOM)
    reference = probe.run(Span(alone, 0, PREFIX))
    for i in range(PREFIX, len(text)):
        alone.tokens.append(text[i])
        reference += probe.run(Span(alone, i, i + 1))
    alone.table.truncate(0)
    expected = torch.cat(reference)  # [1 + SINGLES, V]

    def draft(tree: Tree) -> Draft:
        return Draft(tree, ("probe",) * len(tree))

    differences = {}
    line = chain(text[PREFIX:])
    burst = probe.sequence(text[:PREFIX], ROOM, skip_blocks=3)
    probe.run(Span(burst, 0, PREFIX - 1))
    differences["burst width"] = _difference(probe.run(Span(burst, PREFIX - 1, PREFIX, draft(line)))[0], expected)
    burst.table.truncate(0)

    # Each true node is preceded by a wrong sibling, so that the path lies on every other slot.
    tokens, parents, parent = [], [], ROOT
    for token in text[PREFIX:]:
        tokens += [(token + 1) % vocab_size, token]
        parents += [parent, parent]
        parent = len(tokens) - 1
    tree = probe.sequence(text[:PREFIX], ROOM)
    rows = probe.run(Span(tree, 0, PREFIX, draft(Tree(tuple(tokens), tuple(parents)))))[0]
    differences["tree shape"] = _difference(rows[[0, *range(2, len(rows), 2)]], expected)
    tree.table.truncate(0)

    chunked = probe.sequence(list(text), ROOM)
    for start in range(0, len(text), 5):
        last = probe.run(Span(chunked, start, min(start + 5, len(text))))[0]
    differences["chunking"] = _difference(last, expected[-1:])
    chunked.table.truncate(0)

    other = probe.sequence(text[::-1], ROOM, skip_blocks=1)
    beside = probe.sequence(text[:PREFIX], ROOM)
    both = probe.run(Span(other, 0, len(text)), Span(beside, 0, PREFIX, draft(line)))
    differences["batch"] = _difference(both[1], expected)
    return Invariance(differences, time.perf_counter() - started)


def _difference(rows: Tensor, expected: Tensor) -> float:
    return 0.0 if torch.equal(rows, expected) else max((rows - expected).abs().max().item(), torch.finfo(torch.float32).tiny)
