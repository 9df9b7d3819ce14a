"""A whole prompt through a model, outside the engine: one sequence's rows, over a pool of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec import attention, kernels
from specdec.attention.base import Attention
from specdec.config import BLOCK_SIZE
from specdec.kernels.base import Rows
from specdec.kv.pool import Pool
from specdec.models.base import Batch, Model

N_BLOCKS = 32
"""Blocks of a pool, which one sequence takes from the last to the first."""


def attention_of(model: Model) -> Attention:
    """An empty cache for one sequence of at most 512 tokens."""
    s = model.shape
    pool = Pool(s.n_layers, N_BLOCKS, s.n_kv_heads, s.head_dim, model.kv_dtype, model.device)
    pool.poison(range(N_BLOCKS))
    return attention.select(pool, kernels.select(model.device))


def batch_of(tokens: list[int], start: int = 0, prompt_length: int | None = None, wanted: list[int] | None = None) -> Batch:
    """Consecutive rows of one sequence from position ``start``; every row wanted unless said otherwise."""
    n, end = len(tokens), start + len(tokens)
    positions = torch.arange(start, end)
    rows = Rows(
        tables=torch.arange(N_BLOCKS - 1, -1, -1, dtype=torch.int32)[None, : -(-end // BLOCK_SIZE)].contiguous(),
        sequence=torch.zeros(n, dtype=torch.int32),
        slot=positions.int(),
        prefix=positions.int() + 1,
        path=torch.empty(n, 0, dtype=torch.int32),
        n_path=torch.zeros(n, dtype=torch.int32),
    )
    return Batch(
        tokens=torch.tensor(tokens),
        positions=positions,
        lengths=torch.clamp(positions + 1, min=end if prompt_length is None else prompt_length),
        rows=rows,
        wanted=torch.arange(n) if wanted is None else torch.tensor(wanted, dtype=torch.int64),
    )


def logits_of(model: Model, tokens: list[int]) -> Tensor:
    """[M, V] float32: the logits after each token of a prompt, in one pass."""
    logits, _ = model.forward(batch_of(tokens), attention_of(model))
    return logits


def greedy(model: Model, prompt: list[int], n: int) -> tuple[list[int], Tensor]:
    """n greedy tokens after a prompt, one row a step, and the logits [n, V] that each was chosen from."""
    cache = attention_of(model)
    logits, _ = model.forward(batch_of(prompt, wanted=[len(prompt) - 1]), cache)
    tokens, rows = [int(logits[-1].argmax())], [logits[-1]]
    while len(tokens) < n:
        start = len(prompt) + len(tokens) - 1
        logits, _ = model.forward(batch_of(tokens[-1:], start, len(prompt)), cache)
        tokens.append(int(logits[-1].argmax()))
        rows.append(logits[-1])
    return tokens, torch.stack(rows)
