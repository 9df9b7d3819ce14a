"""Attention by kernels that read the pool where it lies: native C on the CPU, Triton on an accelerator."""

from __future__ import annotations

from torch import Tensor

from specdec.attention.base import Attention
from specdec.kernels.base import Kernels, Rows
from specdec.kv.pool import Pool


class NativeAttention(Attention):
    """Stores the rows' keys and values, then lets each row walk its own list of slots; nothing is gathered or copied."""

    def __init__(self, pool: Pool, kernels: Kernels) -> None:
        self.native_pool = pool
        self._layers = list(zip(pool.keys.unbind(), pool.values.unbind(), strict=True))
        self._kernels = kernels

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float, window: int) -> Tensor:
        keys, values = self._layers[layer]
        self._kernels.store(k, v, keys, values, rows)
        return self._kernels.attend(q, keys, values, rows, scale, window)
