"""A private pool and runner, to feed rows through a model outside any engine: for self-tests, replays and scores."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec import attention
from specdec.config import SamplingParams
from specdec.history import History
from specdec.kernels.base import Kernels
from specdec.kv.blocks import BlockAllocator, BlockTable, blocks_for
from specdec.kv.pool import Pool
from specdec.metrics.stats import Stats
from specdec.models.base import Model
from specdec.runner.compiled import make_runner
from specdec.types import Sequence, Span, Step

_EVERY_ROW = SamplingParams(prompt_logprobs=0)
"""Of a sequence with these parameters all rows' logits come out of a pass, not only the last one's."""


def probe_text(n: int, vocab_size: int) -> list[int]:
    """``n`` tokens that follow no pattern and are the same each time."""
    return [(7919 * (i + 1)) % vocab_size for i in range(n)]


class Probe:
    """Feeds sequences through a model.

    Args:
        n_slots: tokens that its sequences hold at once.
    """

    def __init__(self, model: Model, kernels: Kernels, n_slots: int) -> None:
        shape = model.shape
        pool = Pool(shape.n_layers, blocks_for(n_slots), shape.n_kv_heads, shape.head_dim, model.kv_dtype, model.device)
        self._allocator = BlockAllocator(pool.n_blocks)
        self._runner = make_runner(model, attention.select(pool, kernels))

    def sequence(self, tokens: list[int], n_slots: int, *, skip_blocks: int = 0, every_row: bool = False) -> Sequence:
        """A sequence with room for ``n_slots`` tokens and nodes.

        Args:
            skip_blocks: its table does not begin at the pool's next block, but so many further on.
            every_row: ``run`` gives the logits of all its rows.
        """
        held = self._allocator.take(skip_blocks)
        table = BlockTable(self._allocator)
        table.reserve(n_slots)
        self._allocator.drop(held)
        n, params = len(tokens), _EVERY_ROW if every_row else SamplingParams()
        return Sequence(0, tokens, n, params, 0, n_slots, frozenset(), table, History.of(tokens, n), Stats())

    def run(self, *spans: Span) -> list[Tensor]:
        """Logits [rows, V] per span: its pending token's and each node's, after those of its other rows if all are wanted."""
        forward = self._runner.forward(Step(spans))
        return [
            torch.cat([forward.logits[before], forward.logits[rows]])
            for before, rows in zip(forward.prompt_rows, forward.rows, strict=True)
        ]

    def read(self, tokens: list[int], chunk: int) -> Tensor:
        """[V] logits of the last of these tokens, computed from nothing in passes of at most ``chunk`` rows."""
        sequence = self.sequence(tokens, len(tokens))
        for start in range(0, len(tokens), chunk):
            (rows,) = self.run(Span(sequence, start, min(start + chunk, len(tokens))))
        sequence.table.truncate(0)
        return rows[-1]

    def read_all(self, tokens: list[int]) -> Tensor:
        """[n, V] logits of all these tokens, in one pass."""
        sequence = self.sequence(tokens, len(tokens), every_row=True)
        (rows,) = self.run(Span(sequence, 0, len(tokens)))
        sequence.table.truncate(0)
        return rows
