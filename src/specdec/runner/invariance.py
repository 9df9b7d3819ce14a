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

from specdec import attention
from specdec.config import BLOCK_SIZE, SamplingParams
from specdec.kernels.base import Kernels
from specdec.kv.blocks import BlockAllocator, BlockTable
from specdec.kv.pool import Pool
from specdec.metrics.stats import Stats
from specdec.models.base import Model
from specdec.runner.compiled import make_runner
from specdec.sampling import History
from specdec.tree import chain
from specdec.types import ROOT, Draft, Sequence, Span, Step, Tree

PREFIX, SINGLES = 13, 6  # together they cross a block border


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


class _Probe:
    """A private pool and runner to feed sequences through."""

    def __init__(self, model: Model, kernels: Kernels) -> None:
        shape = model.shape
        pool = Pool(shape.n_layers, 16, shape.n_kv_heads, shape.head_dim, model.kv_dtype, model.device)
        self._allocator = BlockAllocator(pool.n_blocks)
        self._runner = make_runner(model, attention.select(pool, kernels))

    def sequence(self, tokens: list[int], skip_blocks: int = 0) -> Sequence:
        """A sequence whose table does not begin at the pool's next block if ``skip_blocks`` are held back meanwhile."""
        held = self._allocator.take(skip_blocks)
        table = BlockTable(self._allocator)
        table.reserve(4 * BLOCK_SIZE)
        self._allocator.drop(held)
        n = len(tokens)
        return Sequence(0, tokens, n, SamplingParams(), 0, 4 * BLOCK_SIZE, frozenset(), table, History.of(tokens, n), Stats())

    def run(self, *spans: Span) -> list[Tensor]:
        forward = self._runner.forward(Step(spans))
        return [forward.logits[rows].clone() for rows in forward.rows]  # per span [1 + n, V]


def check_invariance(model: Model, kernels: Kernels) -> Invariance:
    """Run the self-test; takes about a dozen short passes."""
    started = time.perf_counter()
    probe = _Probe(model, kernels)
    vocab_size = model.shape.vocab_size
    text = [(7919 * (i + 1)) % vocab_size for i in range(PREFIX + SINGLES)]

    # The reference: one row at a time.
    alone = probe.sequence(text[:PREFIX])
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
    burst = probe.sequence(text[:PREFIX], skip_blocks=3)
    probe.run(Span(burst, 0, PREFIX - 1))
    differences["burst width"] = _difference(probe.run(Span(burst, PREFIX - 1, PREFIX, draft(line)))[0], expected)
    burst.table.truncate(0)

    # Each true node is preceded by a wrong sibling, so that the path lies on every other slot.
    tokens, parents, parent = [], [], ROOT
    for token in text[PREFIX:]:
        tokens += [(token + 1) % vocab_size, token]
        parents += [parent, parent]
        parent = len(tokens) - 1
    tree = probe.sequence(text[:PREFIX])
    rows = probe.run(Span(tree, 0, PREFIX, draft(Tree(tuple(tokens), tuple(parents)))))[0]
    differences["tree shape"] = _difference(rows[[0, *range(2, len(rows), 2)]], expected)
    tree.table.truncate(0)

    chunked = probe.sequence(list(text))
    for start in range(0, len(text), 5):
        last = probe.run(Span(chunked, start, min(start + 5, len(text))))[0]
    differences["chunking"] = _difference(last, expected[-1:])
    chunked.table.truncate(0)

    other = probe.sequence(text[::-1], skip_blocks=1)
    beside = probe.sequence(text[:PREFIX])
    both = probe.run(Span(other, 0, len(text)), Span(beside, 0, PREFIX, draft(line)))
    differences["batch"] = _difference(both[1], expected)
    return Invariance(differences, time.perf_counter() - started)


def _difference(rows: Tensor, expected: Tensor) -> float:
    return 0.0 if torch.equal(rows, expected) else max((rows - expected).abs().max().item(), torch.finfo(torch.float32).tiny)
