"""v(M): what a pass of M rows costs over a pass of one row."""

from __future__ import annotations

import math
import time

from specdec import attention
from specdec.config import SamplingParams
from specdec.kernels.base import Kernels
from specdec.kv.blocks import BlockAllocator, BlockTable, blocks_for
from specdec.kv.pool import Pool
from specdec.metrics.stats import Stats
from specdec.models.base import Model
from specdec.runner.runner import Runner
from specdec.sampling import History
from specdec.tree import chain
from specdec.types import Draft, Sequence, Span, Step

CONTEXT = 128
"""Cached tokens that a measured pass attends to, where the model's context allows."""
ROWS = (1, 2, 4, 8, 16, 32)
ROUNDS = 12


def relative_costs(model: Model, kernels: Kernels) -> dict[int, float]:
    """v(M) by M: the fastest of the passes of each size over that of one row; other programs only make a pass slower."""
    shape = model.shape
    sizes = [rows for rows in ROWS if rows < shape.context]
    cached = min(CONTEXT, shape.context - sizes[-1])
    tokens = [(7919 * (i + 1)) % shape.vocab_size for i in range(cached + sizes[-1])]
    pool = Pool(shape.n_layers, blocks_for(len(tokens)), shape.n_kv_heads, shape.head_dim, model.kv_dtype, model.device)
    table = BlockTable(BlockAllocator(pool.n_blocks))
    table.reserve(len(tokens))
    prompt = tokens[:cached]
    sequence = Sequence(
        0, prompt, cached, SamplingParams(), 0, len(tokens), frozenset(), table, History.of(prompt, cached), Stats()
    )
    runner = Runner(model, attention.select(pool, kernels))
    runner.forward(Step((Span(sequence, 0, cached, Draft()),)))
    steps = {}
    for rows in sizes:
        tree = chain(tokens[cached : cached + rows - 1])
        steps[rows] = Step((Span(sequence, cached - 1, cached, Draft(tree, ("cost",) * len(tree))),))

    best = dict.fromkeys(sizes, math.inf)
    for _ in range(ROUNDS):
        for rows, step in steps.items():
            began = time.perf_counter()
            runner.forward(step)
            best[rows] = min(best[rows], time.perf_counter() - began)
    return {rows: seconds / best[1] for rows, seconds in best.items()}
