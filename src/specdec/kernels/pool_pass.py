"""A decoder's native pass over one pool, for rows that come as plain integers: what stays is checked and looked up once."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from specdec.kernels.base import PlainRows
from specdec.kernels.fused import FusedDecoder
from specdec.kv import codec


class PoolPass:
    """The native pass with the same pool and taps each time. Calls may come from several threads at once.

    Args:
        keys, values: the pool of all layers.
        taps: layers whose output is wanted, of every row.
    """

    def __init__(self, decoder: FusedDecoder, keys: Tensor, values: Tensor, taps: Collection[int]) -> None:
        self._decoder, self._keys, self._values, self._taps = decoder, keys, values, taps
        self._pool = keys.data_ptr(), values.data_ptr(), keys.shape[1], codec.KINDS[keys.dtype]
        self._angles: tuple[Tensor | None, Tensor | None, int, int, int] = None, None, 0, 0, 0

    def __call__(self, rows: PlainRows, cos: Tensor, sin: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """Run the rows.

        Args:
            cos, sin: float32 [A, head_dim / 2] by position; nearly always the same tensors.

        Returns:
            logits [W, V] float32, and for each tap [M, d] float32.

        Raises:
            ValueError: the integers are not as many as the numbers say, or the angles not those of these heads.
            IndexError: a row, block, position or token that does not exist.
            MemoryError: there is none for the activations.
        """
        n, n_wanted, n_tables, table_width = rows.n_rows, rows.n_wanted, rows.n_tables, rows.table_width
        wide, narrow = 3 * n + n_wanted, n * (4 + rows.path_width) + n_tables * table_width
        if (len(rows.wide), len(rows.narrow)) != (wide, narrow):
            raise ValueError(
                f"{n} rows, {n_wanted} wanted, need {wide} wide and {narrow} narrow integers with these tables and paths, "
                f"got {len(rows.wide)} and {len(rows.narrow)}"
            )
        held_cos, held_sin, cos_at, sin_at, n_angles = self._angles
        if cos is not held_cos or sin is not held_sin:
            self._decoder.check_held(cos=cos, sin=sin, keys=self._keys, values=self._values)
            cos_at, sin_at, n_angles = cos.data_ptr(), sin.data_ptr(), len(cos)
            self._angles = cos, sin, cos_at, sin_at, n_angles
        token, sequence = rows.wide.buffer_info()[0], rows.narrow.buffer_info()[0]
        table = sequence + 16 * n
        inputs = (
            token, token + 24 * n, cos_at, sin_at, token + 8 * n, n_angles, n, n_wanted,
            table, sequence, sequence + 4 * n, sequence + 8 * n, table + 4 * n_tables * table_width, sequence + 12 * n,
            n_tables, table_width, rows.path_width, *self._pool,
        )  # fmt: skip
        return self._decoder.run(inputs, n, n_wanted, self._taps)
