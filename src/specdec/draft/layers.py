"""The decoder layers of a recurrent head at work: rows in, states out, keys and values in a paged pool of their own."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specdec import attention
from specdec.kernels.base import Kernels, Rows
from specdec.kv.pool import Pool
from specdec.models.decoder import Decoder
from specdec.models.heads import RecurrentHead
from specdec.models.layers import Rope, RotaryTable
from specdec.types import Sequence


@dataclass(slots=True)
class RowList:
    """Rows of one pass of a module, in plain integers (see ``kernels.base.Rows``)."""

    tokens: list[int] = field(default_factory=list)
    """The token whose embedding a row takes."""
    owners: list[int] = field(default_factory=list)
    """Which of the pass's sequences a row belongs to."""
    slots: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)

    def add(self, token: int, owner: int, slot: int, prefix: int, path: list[int]) -> None:
        self.tokens.append(token)
        self.owners.append(owner)
        self.slots.append(slot)
        self.prefixes.append(prefix)
        self.paths.append(path)

    def add_committed(self, tokens: Many[int], owner: int, first: int) -> None:
        """Rows from ``first`` on, each after all those before it."""
        n = len(tokens)
        self.tokens += tokens
        self.owners += [owner] * n
        self.slots += range(first, first + n)
        self.prefixes += range(first + 1, first + n + 1)
        self.paths += [[]] * n

    def __len__(self) -> int:
        return len(self.tokens)


class Layers:
    """The layers of a head, and the keys and values of their rows.

    Args:
        head: packed, on the model's device.
        model: whose embedding is used, unless the head has one.
        n_blocks: of the model's pool.
    """

    def __init__(self, head: RecurrentHead, model: Decoder, kernels: Kernels, n_blocks: int) -> None:
        c = self._config = head.config
        self.pool = Pool(c.n_modules, n_blocks, c.n_kv_heads, c.head_dim, model.kv_dtype, model.device)
        # Rows that nobody wrote, before the first of a sequence that was observed, are read: they must be numbers.
        self.pool.keys.zero_()
        self.pool.values.zero_()
        self._head = head
        self._embedding = head.embedding or model.embedding
        self._attention = attention.select(self.pool, kernels)
        self._kernels = kernels
        self._device = model.device
        rope = Rope(kind="default", dim=c.head_dim, theta=c.rope_theta, context=model.shape.context)
        self._rotary = RotaryTable(rope, model.device)
        self._scale = c.head_dim**-0.5

    def tables(self, sequences: Many[Sequence]) -> Tensor:
        """int32 [S, B] the block tables of the sequences of a pass."""
        longest = max(len(sequence.table.blocks) for sequence in sequences)
        tables = np.zeros((len(sequences), longest), np.int32)
        for row, sequence in zip(tables, sequences, strict=True):
            row[: len(sequence.table.blocks)] = sequence.table.blocks
        return torch.from_numpy(tables).to(self._device)

    def run(self, module: int, states: Tensor, rows: RowList, tables: Tensor) -> Tensor:
        """One pass of a module: states [M, d] of what lies before each row -> new states [M, d]."""
        n, width = len(rows), max(map(len, rows.paths))
        n_path = [len(path) for path in rows.paths]
        positions = [prefix + n - 1 for prefix, n in zip(rows.prefixes, n_path, strict=True)]
        wide = torch.from_numpy(np.array([rows.tokens, positions], np.int64)).to(self._device)
        entries = [*rows.owners, *rows.slots, *rows.prefixes, *n_path]
        if width:
            for path in rows.paths:
                entries += path
                entries += [-1] * (width - len(path))
        narrow = torch.from_numpy(np.array(entries, np.int32)).to(self._device)
        owners, slots, prefixes, n_paths, paths = torch.split(narrow, [n, n, n, n, n * width])
        cos, sin = self._rotary(wide[1], wide[1])
        packed = Rows(tables=tables, sequence=owners, slot=slots, prefix=prefixes, path=paths.view(n, width), n_path=n_paths)
        n_q, n_qk = self._config.n_heads, self._config.n_heads + self._config.n_kv_heads

        def attend(qkv: Tensor) -> Tensor:
            """[M, (H + 2 KV) * hd] -> [M, H * hd]"""
            heads = qkv.view(n, -1, self._config.head_dim)
            self._kernels.rope(heads[:, :n_qk], cos, sin)  # queries and keys lie side by side
            q, k, v = heads[:, :n_q], heads[:, n_q:n_qk], heads[:, n_qk:]
            return self._attention(module, q, k, v, packed, self._scale, 0)

        new: Tensor = self._head(self._embedding(wide[0]), states, attend, module)
        return new
