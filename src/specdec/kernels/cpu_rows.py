"""Attention, the row-wise passes and the sampler, by the native library.

Only what would read or write outside a tensor is checked, once per call; the C sources in csrc/ say what is computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from specdec.kernels.base import WIDTH, Draw, Kernels, Rows
from specdec.kernels.library import DOUBLE, FLOAT, INT, LONG, POINTER, Library
from specdec.kv import codec

MOST_TOP = 32
"""The longest list that ``top`` keeps."""

UNSURE = -2
"""What the native ``race_among`` returns where it does not say."""

BAD_ROW, BAD_BLOCK, NO_MEMORY = 1, 2, 3
ERRORS = {
    BAD_ROW: "a row names a table, a slot or a path outside the tables: check sequence, slot, prefix, path and n_path",
    BAD_BLOCK: "a table names a block outside the pool",
    NO_MEMORY: "there is no memory for the scores",
}


def _check(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` itself, if it is a contiguous CPU tensor of that type."""
    if x.dtype is not dtype or not x.is_contiguous() or not x.is_cpu:
        layout = "contiguous" if x.is_contiguous() else "strided"
        raise ValueError(f"{name} must be a contiguous {dtype} tensor on the CPU, got {layout} {x.dtype} on {x.device}")
    return x


def _row_stride(name: str, x: Tensor) -> int:
    """Elements from one row of [M, H, hd] float32 to the next; the heads of a row must lie side by side."""
    strides = x.stride()
    if x.dtype is not torch.float32 or not x.is_cpu or len(strides) != 3 or strides[2] != 1 or strides[1] != x.shape[2]:
        raise ValueError(
            f"{name} must be [M, heads, head_dim] float32 on the CPU with each row's heads side by side, "
            f"got {x.dtype} {tuple(x.shape)} with strides {strides}"
        )
    return strides[0]


def check_rows(rows: Rows) -> None:
    """Every tensor is contiguous int32 on the CPU, and all agree on the number of rows. (What they hold, the C side checks.)"""
    m, (n_tables, _) = len(rows), rows.tables.shape
    for name in ("tables", "sequence", "slot", "prefix", "path", "n_path"):
        _check(f"rows.{name}", getattr(rows, name), torch.int32)
    if rows.path.dim() != 2 or not m == len(rows.path) == len(rows.sequence) == len(rows.prefix) == len(rows.n_path):
        shapes = ", ".join(
            f"{name} {tuple(getattr(rows, name).shape)}" for name in ("slot", "sequence", "prefix", "path", "n_path")
        )
        raise ValueError(f"rows must agree on their number, got {shapes}")
    if not n_tables and m:
        raise ValueError(f"{m} rows need a block table")


def _check_pool(keys: Tensor, values: Tensor, kv_heads: int, hd: int) -> tuple[int, int]:
    """How many blocks a layer of the pool has, and the kind of what it holds as the native library numbers it."""
    shape, dtype = keys.shape, keys.dtype
    n_blocks, kind = shape[0], codec.KINDS.get(dtype)
    if kind is None:
        raise ValueError(f"the pool must hold one of {', '.join(map(str, codec.KINDS))}, got {dtype}")
    of_keys, of_values = codec.block_shapes(dtype, hd)
    divisor = 16 if codec.quantised(dtype) else 8
    if shape != (n_blocks, kv_heads, *of_keys) or values.shape != (n_blocks, kv_heads, *of_values) or hd % divisor:
        raise ValueError(
            f"a pool of {dtype} for {kv_heads} heads of {hd} (a multiple of {divisor}) needs keys "
            f"{['blocks', kv_heads, *of_keys]} and values {['blocks', kv_heads, *of_values]}, "
            f"got {tuple(shape)} and {tuple(values.shape)}"
        )
    _check("keys", keys, dtype), _check("values", values, dtype)
    return n_blocks, kind


class RowOps(Kernels):
    """Everything of ``Kernels`` but the products."""

    def __init__(self, library: Library) -> None:
        p, n = POINTER, LONG
        self._rms_norm = library.function("rms_norm", p, p, p, n, n, FLOAT)
        self._silu_mul = library.function("silu_mul", p, p, n, n)
        self._rope = library.function("rope", p, n, p, p, n, n, n)
        self._store = library.function("store", p, n, p, n, p, p, INT, n, p, n, n, p, p, n, n, n, returns=INT)
        self._attend = library.function(
            "attend", p, n, p, p, INT, n, p, n, n, p, p, p, n, p, p, n, n, n, n, FLOAT, n, returns=INT
        )
        self._top = library.function("top", p, n, n, n, p, p)
        self._race = {
            dtype: library.function(name, p, n, DOUBLE, n, n, returns=LONG)
            for dtype, name in ((torch.float32, "race_f32"), (torch.float64, "race_f64"))
        }
        self._race_among = {
            dtype: library.function(name, p, n, DOUBLE, n, n, n, DOUBLE, DOUBLE, returns=LONG)
            for dtype, name in ((torch.float32, "race_among_f32"), (torch.float64, "race_among_f64"))
        }
        self._draw_rows = library.function("draw_rows", p, n, n, p, p, p)
        self._candidates = library.function("candidates", p, n, n, n, n, p, p, p, p, p, p)
        self._rows: tuple[Rows | None, tuple[int, ...], tuple[int, ...]] = None, (), ()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        d = x.shape[-1]
        if weight.shape != (d,):
            raise ValueError(f"the norm's weight must be [{d}], got {tuple(weight.shape)}")
        out = torch.empty_like(_check("x", x, torch.float32))
        self._rms_norm(x.data_ptr(), _check("weight", weight, torch.float32).data_ptr(), out.data_ptr(), x.numel() // d, d, eps)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        m, width = _check("gate_up", gate_up, torch.float32).shape
        if width % 2:
            raise ValueError(f"gate_up must be [M, 2 f], got a width of {width}")
        out = torch.empty(m, width // 2)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), m, width // 2)
        return out

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        stride, (m, heads, hd) = _row_stride("x", x), x.shape
        if hd % 2 or cos.shape != (m, hd // 2) or sin.shape != cos.shape:
            raise ValueError(
                f"x [{m}, {heads}, {hd}] needs cos and sin of [{m}, {hd // 2}], got {tuple(cos.shape)}, {tuple(sin.shape)}"
            )
        cos, sin = _check("cos", cos, torch.float32), _check("sin", sin, torch.float32)
        self._rope(x.data_ptr(), stride, cos.data_ptr(), sin.data_ptr(), m, heads, hd // 2)

    def store(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> None:
        k_stride, v_stride = _row_stride("k", k), _row_stride("v", v)
        m, kv_heads, hd = k.shape
        n_blocks, kind = _check_pool(keys, values, kv_heads, hd)
        places, _ = self._pointers(rows)
        if v.shape != k.shape or m != len(rows):
            raise ValueError(f"{len(rows)} rows need as many keys and values, got {tuple(k.shape)} and {tuple(v.shape)}")
        wrong = self._store(
            k.data_ptr(), k_stride, v.data_ptr(), v_stride, keys.data_ptr(), values.data_ptr(), kind, n_blocks, *places,
            m, kv_heads, hd,
        )  # fmt: skip
        if wrong:
            raise IndexError(ERRORS[wrong])

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float, window: int) -> Tensor:
        stride, (m, heads, hd) = _row_stride("q", q), q.shape
        kv_heads = keys.shape[1]
        n_blocks, kind = _check_pool(keys, values, kv_heads, hd)
        _, lists = self._pointers(rows)
        if heads % kv_heads or m != len(rows):
            raise ValueError(f"q {tuple(q.shape)} fits neither {len(rows)} rows nor {kv_heads} key heads")
        out = torch.empty(m, heads * hd)
        wrong = self._attend(
            q.data_ptr(), stride, keys.data_ptr(), values.data_ptr(), kind, n_blocks, *lists, out.data_ptr(),
            m, heads, kv_heads, hd, scale, window,
        )  # fmt: skip
        if wrong:
            raise MemoryError(ERRORS[wrong]) if wrong == NO_MEMORY else IndexError(ERRORS[wrong])
        return out

    def _pointers(self, rows: Rows) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The arguments that stand for ``rows`` in store and in attend; the same rows come once per layer, so they are kept."""
        held, places, lists = self._rows
        if held is not rows:
            check_rows(rows)
            tables = rows.tables.data_ptr(), *rows.tables.shape, rows.sequence.data_ptr()
            places = *tables, rows.slot.data_ptr()
            lists = *tables, rows.prefix.data_ptr(), rows.path.data_ptr(), rows.path.shape[1], rows.n_path.data_ptr()
            self._rows = rows, places, lists
        return places, lists

    def top(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        w, n = _check("logits", logits, torch.float32).shape
        if not 1 <= k <= min(n, MOST_TOP):
            raise ValueError(f"k must be in [1, {min(n, MOST_TOP)}], got {k}")
        values, ids = torch.empty(w, k), torch.empty(w, k, dtype=torch.int64)
        self._top(logits.data_ptr(), w, n, k, values.data_ptr(), ids.data_ptr())
        return values, ids

    def race(self, z: Tensor, seed: int, position: int, temperature: float = 1.0) -> int:
        dtype = torch.float64 if z.dtype is torch.float64 else torch.float32
        return self._race[dtype](_check("z", z, dtype).data_ptr(), z.numel(), temperature, seed, position)

    def race_among(
        self, z: Tensor, seed: int, position: int, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> int | None:
        dtype = torch.float64 if z.dtype is torch.float64 else torch.float32
        pointer = _check("z", z, dtype).data_ptr()
        token = self._race_among[dtype](pointer, z.numel(), temperature, seed, position, top_k, top_p, min_p)
        return None if token == UNSURE else token

    def draw_rows(self, logits: Tensor, draws: Many[Draw]) -> list[int]:
        rows, n = _check("logits", logits, torch.float32).shape
        if not all(0 <= draw[0] < rows for draw in draws):
            raise ValueError(f"draws must name rows of the {rows} that there are, got {[draw.row for draw in draws]}")
        # Arrays of Python's own: numpy's and their addresses take ten times as long when nothing of them is in a cache.
        integers = array("q", [x for draw in draws for x in draw[:4]])
        reals = array("d", [x for draw in draws for x in draw[4:]])
        tokens = array("q", bytes(8 * len(draws)))
        where = integers.buffer_info()[0], reals.buffer_info()[0], tokens.buffer_info()[0]
        self._draw_rows(logits.data_ptr(), n, len(draws), *where)
        return tokens.tolist()

    def candidates(
        self, logits: Tensor, heat: Tensor, seeds: Tensor, positions: Tensor, k: int, names: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        rows, n = _check("logits", logits, torch.float32).shape
        width = min(n, WIDTH)
        if not 1 <= k <= width:
            raise ValueError(f"k must be in [1, {width}], got {k}")
        if not len(heat) == len(seeds) == len(positions) == rows or (names is not None and len(names) != n):
            raise ValueError(f"{rows} rows of {n} need as many temperatures, seeds and positions, and a name for each column")
        tokens, chances = torch.empty(rows, k, dtype=torch.int64), torch.empty(rows, k, dtype=torch.float64)
        self._candidates(
            logits.data_ptr(), rows, n, width, k, _check("heat", heat, torch.float64).data_ptr(),
            _check("seeds", seeds, torch.int64).data_ptr(), _check("positions", positions, torch.int64).data_ptr(),
            None if names is None else _check("names", names, torch.int64).data_ptr(), tokens.data_ptr(), chances.data_ptr(),
        )  # fmt: skip
        return tokens, chances
