"""What bounds a pass: the bytes it must read, the arithmetic it must do, and a machine's rates of both.

A pass takes at least as long as reading its bytes and at least as long as its operations (Williams, Waterman, Patterson,
*Roofline*, CACM 2009). Operations per byte are its *intensity*; the machine's *ridge* is the intensity from which arithmetic
is what bounds. One row of decoding lies far below the ridge: it reads every weight for two operations each. More rows raise
the intensity at no cost in bytes, which is all that speculation uses. Pure arithmetic over sizes: no model, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

KV_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of one entry of a key or value, in formats without scales. ``kv.codec`` knows those with them."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a pass must do."""

    operations: float
    """A multiplication and an addition are two."""
    n_bytes: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.n_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """Two rates, measured."""

    bytes_per_second: float
    operations_per_second: float

    @property
    def ridge(self) -> float:
        """Operations per byte from which on the arithmetic bounds."""
        return self.operations_per_second / self.bytes_per_second

    def roof(self, intensity: float) -> float:
        """Most operations a second at that intensity."""
        return min(self.operations_per_second, intensity * self.bytes_per_second)

    def seconds(self, work: Work) -> float:
        """The least that a pass can take."""
        return max(work.operations / self.operations_per_second, work.n_bytes / self.bytes_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A decoder in numbers."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    layer_weights: int
    """Weights of the products of all layers together: so many multiplications for each row."""
    head_weights: int
    """The same of the output matrix: only rows whose logits are wanted."""
    weight_bytes: int
    """Of all these, as they lie in memory."""
    kv_entry_bytes: float
    """With its share of a scale, where it has one."""

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token."""
        return kv_bytes(self.n_layers, self.n_kv_heads, self.head_dim, self.kv_entry_bytes)

    def work(self, rows: int, cached: int, wanted: int) -> Work:
        """A pass of one sequence: ``rows`` consecutive tokens behind ``cached`` ones, with the logits of ``wanted`` rows.

        Weights, and cached keys and values, are read once for all rows; what rows pass on to each other stays in the caches
        of the processor and is not counted. Rows whose logits are not wanted count through the whole last layer.
        """
        keys = rows * cached + rows * (rows + 1) // 2  # a row attends to all before it and to itself
        products = self.layer_weights * rows + self.head_weights * wanted
        attention = 2 * self.n_layers * self.n_heads * self.head_dim * keys  # scores, and sums of values
        return Work(2.0 * (products + attention), float(self.weight_bytes + self.kv_bytes * (cached + rows)))


def kv_bytes(n_layers: int, n_kv_heads: int, head_dim: int, entry_bytes: float, tokens: int = 1) -> int:
    """Memory of the keys and values of so many tokens. Query heads that share a key head share its memory."""
    return round(2 * n_layers * n_kv_heads * head_dim * entry_bytes) * tokens


def widest_within(machine: Machine, sizes: Sizes, cached: int, rows: int) -> int:
    """The most rows, up to ``rows``, whose pass is bound by bytes and not by arithmetic; 0 where even one row is not."""
    return max((n for n in range(1, rows + 1) if sizes.work(n, cached, n).intensity <= machine.ridge), default=0)
