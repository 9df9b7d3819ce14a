"""What attention is to the rest: rows write their keys and values, then each row attends to its own ordered list of slots."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from specdec.kernels.base import Rows
from specdec.kv.pool import Pool


class Attention(ABC):
    """Attention over the paged pool. A row's result depends on its own list of keys and on nothing else."""

    native_pool: Pool | None = None
    """The pool, where native code may store and attend in it by itself."""

    @abstractmethod
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float, window: int) -> Tensor:
        """Store the rows' keys and values, then attend.

        Args:
            layer: which layer of the pool.
            q: [M, H, hd] float32, rotated.
            k, v: [M, KV, hd] float32, k rotated.
            rows: slots and lists of visible slots.
            scale: multiplies the scores.
            window: sliding window in tokens, the row itself included; 0 for none.

        Returns:
            [M, H * hd] float32.
        """
