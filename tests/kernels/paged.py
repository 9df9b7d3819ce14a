"""Sequences of random keys and values in a paged pool, and what attention over them must give, for the attention tests."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.base import Kernels, Rows
from specdec.kv.codec import decode, encode
from specdec.kv.pool import Pool


@dataclass(frozen=True)
class Row:
    """One query: which sequence, how long a prefix it sees, and which slots after that."""

    sequence: int
    prefix: int
    path: tuple[int, ...] = ()

    @property
    def slots(self) -> list[int]:
        return [*range(self.prefix), *self.path]


def burst(sequence: int, start: int, stop: int) -> list[Row]:
    """Rows of consecutive tokens, each of which sees all before it and itself."""
    return [Row(sequence, position + 1) for position in range(start, stop)]


class Paged:
    """One layer of a pool with some sequences in it, all other slots NaN."""

    def __init__(
        self,
        kernels: Kernels,
        lengths: Many[int],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        hd: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        layout: int = 0,
    ) -> None:
        """``seed`` decides keys and values, ``layout`` which blocks hold them."""
        self.kernels, self.heads, self.scale = kernels, heads, hd**-0.5
        noise = torch.Generator().manual_seed(seed)
        self.k = [torch.randn(n, kv_heads, hd, generator=noise) * 2 for n in lengths]
        self.v = [torch.randn(n, kv_heads, hd, generator=noise) for n in lengths]
        width = max(-(-n // 16) for n in lengths)
        n_blocks = width * len(lengths) + 3
        order = torch.randperm(n_blocks, generator=torch.Generator().manual_seed(layout))
        self.tables = order[: width * len(lengths)].reshape(len(lengths), width).int()
        pool = Pool(1, n_blocks, kv_heads, hd, dtype, torch.device("cpu"))
        pool.poison(range(n_blocks))
        self.keys, self.values, self.dtype = pool.keys[0], pool.values[0], dtype
        self.parts = [part[0] for part in (*pool.key_parts, *pool.value_parts)]
        """Each [blocks, 16, KV, x]."""
        for sequence, n in enumerate(lengths):
            kernels.store(
                self.k[sequence], self.v[sequence], self.keys, self.values, self.rows([Row(sequence, s) for s in range(n)])
            )

    def rows(self, rows: Many[Row]) -> Rows:
        """A row's slot is the one after its prefix, which only ``store`` looks at."""
        width = max((len(row.path) for row in rows), default=0)
        path = [list(row.path) + [-1] * (width - len(row.path)) for row in rows]
        return Rows(
            tables=self.tables,
            sequence=torch.tensor([row.sequence for row in rows], dtype=torch.int32),
            slot=torch.tensor([row.prefix for row in rows], dtype=torch.int32),
            prefix=torch.tensor([row.prefix for row in rows], dtype=torch.int32),
            path=torch.tensor(path, dtype=torch.int32).reshape(len(rows), width),
            n_path=torch.tensor([len(row.path) for row in rows], dtype=torch.int32),
        )

    def queries(self, m: int, seed: int = 1) -> Tensor:
        return torch.randn(m, self.heads, self.k[0].shape[2], generator=torch.Generator().manual_seed(seed))

    def attend(self, q: Tensor, rows: Many[Row], window: int = 0) -> Tensor:
        return self.kernels.attend(q, self.keys, self.values, self.rows(rows), self.scale, window)

    def alone(self, q: Tensor, rows: Many[Row], window: int = 0) -> Tensor:
        """The same rows, each in a call of its own."""
        return torch.cat([self.attend(q[i : i + 1].clone(), [row], window) for i, row in enumerate(rows)])

    def expected(self, q: Tensor, rows: Many[Row], window: int = 0) -> np.ndarray:
        """[M, H * hd] by the definition, in float64, from the keys and values as they are held, before they were paged."""
        result = []
        for query, row in zip(q.double().numpy(), rows, strict=True):
            slots = row.slots[-window:] if window else row.slots
            k, v = (
                decode(encode(x[row.sequence][slots], self.dtype)).double().numpy() for x in (self.k, self.v)
            )  # [n, KV, hd]
            for head, one in enumerate(query):
                group = head * k.shape[1] // self.heads
                scores = self.scale * (k[:, group] @ one)
                p = np.exp(scores - scores.max())
                result.append(p @ v[:, group] / p.sum())
        return np.stack(result).reshape(len(rows), -1)
