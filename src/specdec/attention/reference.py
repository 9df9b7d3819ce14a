"""Attention in torch, on any device: slow, simple, with float64 sums. It serves where no native kernel runs."""

from __future__ import annotations

from torch import Tensor

from specdec.attention.base import Attention
from specdec.kernels.base import Rows
from specdec.kernels.portable_rows import attend_rows, store_rows
from specdec.kv.pool import Pool


class ReferenceAttention(Attention):
    """Each row gathers the keys of its own list and is computed by itself."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float, window: int) -> Tensor:
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        store_rows(k, v, keys, values, rows)
        return attend_rows(q, keys, values, rows, scale, window)
