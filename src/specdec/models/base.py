"""What a model is to the engine: rows of tokens in, logits of the wanted rows out."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Self, TypeAlias

import torch
from torch import Tensor

from specdec.attention.base import Attention
from specdec.config import Precision
from specdec.kernels.base import PlainRows, Rows

Result: TypeAlias = tuple[Tensor, dict[int, Tensor]]
"""Logits [W, V] float32 of the wanted rows, and for each tapped layer its states [M, d] of every row."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one pass, flattened over sequences."""

    tokens: Tensor
    """int64 [M]"""
    positions: Tensor
    """int64 [M] absolute positions"""
    lengths: Tensor
    """int64 [M] max(prompt length, position + 1): the context length that length-dependent rope scalings go by"""
    rows: Rows
    wanted: Tensor
    """int64 [W] rows whose logits are wanted, increasing"""
    longest: int | None = None
    """The largest of ``lengths``, where the host knows it without asking the device"""

    @classmethod
    def of(cls, rows: PlainRows, device: torch.device) -> Batch:
        """The same as tensors, by one copy to the device for each width of integer."""
        n, s = rows.n_rows, rows.n_tables
        sizes = [n, n, n, n, s * rows.table_width, n * rows.path_width]
        narrow = torch.frombuffer(rows.narrow, dtype=torch.int32).to(device)
        sequence, slot, prefix, n_path, tables, path = torch.split(narrow, sizes)
        wide = torch.frombuffer(rows.wide, dtype=torch.int64).to(device)
        tokens, positions, lengths, wanted = torch.split(wide, [n, n, n, rows.n_wanted])
        tables, path = tables.view(s, rows.table_width), path.view(n, rows.path_width)
        return cls(tokens, positions, lengths, Rows(tables, sequence, slot, prefix, path, n_path), wanted, rows.longest)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the cache and the engine must know of a model."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context: int
    """Longest sequence the model was made for, in tokens."""


class Model(ABC):
    """A causal language model."""

    shape: Shape
    kv_dtype: torch.dtype
    """Of the storage of its keys and values, as ``kv.codec.DTYPES`` has it for each format."""
    device: torch.device
    precision: Precision
    """What the weights are held in; never ``auto``."""

    @property
    def capturable(self) -> bool:
        """May a pass be recorded and replayed with other rows of the same number? (See ``Kernels.capturable``.)"""
        return False

    @property
    def n_bytes(self) -> int:
        """Memory of the weights; 0 where a model has none or does not say."""
        return 0

    def holding(self, kv_dtype: torch.dtype) -> Self:
        """The same model, its weights shared, with its keys and values held in another type of storage."""
        other = copy.copy(self)
        other.kv_dtype = kv_dtype
        return other

    def bind(self, attention: Attention, taps: Collection[int] = ()) -> Callable[[PlainRows], Result]:
        """``forward`` over one attention, with the same taps each time, for rows as plain integers.

        The logits that it gives last until the next call.
        """

        @torch.inference_mode()
        def run(rows: PlainRows) -> Result:
            return self.forward(Batch.of(rows, self.device), attention, taps)

        return run

    @abstractmethod
    def forward(self, batch: Batch, attention: Attention, taps: Collection[int] = ()) -> Result:
        """Run the rows.

        Returns:
            logits [W, V] float32 of the wanted rows, and for each layer in ``taps`` the hidden states [M, d] that it
            gives for every row, before the final norm.
        """
