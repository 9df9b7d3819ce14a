"""The kernels of accelerators: Triton for all that runs on the device, the host's own kernels for the sampler.

Shapes are checked here, once per call. What rows hold is not, since looking would wait for the device: a slot or a block
outside the pool is the caller's fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import ClassVar

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from specdec.config import BLOCK_SIZE
from specdec.kernels import triton_attention, triton_codes, triton_products, triton_rows
from specdec.kernels.base import GROUP, BlockWeight, DenseWeight, Draw, Kernels, Rows
from specdec.kv import codec

TILE_ROWS, TILE_DEPTH = 16, 64
"""Rows of a tile of a product, and the inputs that it takes in one step."""

ENOUGH_PROGRAMS = 256
"""A product of fewer channels than keep an accelerator busy is cut along its inputs until it has about as many programs."""

TILE_QUERIES = 16

PLAIN = {"enable_fp_fusion": False}
"""Steps in float32 are rounded one by one, as they are written, whatever a version of Triton would make of them."""

BITS: Mapping[torch.dtype, int] = {torch.int8: 8, torch.uint8: 4}
"""Of a code, by the type of the storage."""

PART = 512
"""Entries of a row's list of keys that one program reads; longer lists are cut at multiples of it."""


def plan(n: int, k: int, depth: int) -> tuple[int, int, int]:
    """How a product with a weight [n, k] is cut, whatever the number of rows: channels of a tile, steps of a part, parts.

    A step takes ``depth`` inputs; a part has at least four steps.
    """
    columns = 64 if n >= 64 * ENOUGH_PROGRAMS else 32
    steps = cdiv(k, depth)
    parts = max(1, min(steps // 4, ENOUGH_PROGRAMS // cdiv(n, columns)))
    steps_each = cdiv(steps, parts)
    return columns, steps_each, cdiv(steps, steps_each)


class TritonKernels(Kernels):
    """The contract on an accelerator.

    Args:
        host: the kernels of the CPU, for the sampler, which works on rows that have left the device.
    """

    name = "triton"
    capturable: ClassVar[bool] = True

    def __init__(self, host: Kernels) -> None:
        self._host = host

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        d = x.shape[-1]
        if weight.shape != (d,):
            raise ValueError(f"the norm's weight must be [{d}], got {tuple(weight.shape)}")
        out = torch.empty_like(_check("x", x))
        if x.numel():
            warps = 4 if d <= 4096 else 8
            triton_rows.rms_norm[(x.numel() // d,)](x, weight, out, eps, d, next_power_of_2(d), num_warps=warps, **PLAIN)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        m, width = _check("gate_up", gate_up).shape
        if width % 2:
            raise ValueError(f"gate_up must be [M, 2 f], got a width of {width}")
        out = gate_up.new_empty(m, width // 2)
        if m:
            triton_rows.silu_mul[(m, cdiv(width // 2, 1024))](gate_up, out, width // 2, 1024, **PLAIN)
        return out

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        stride, (m, heads, hd) = _row_stride("x", x), x.shape
        if hd % 2 or cos.shape != (m, hd // 2) or sin.shape != cos.shape:
            raise ValueError(
                f"x [{m}, {heads}, {hd}] needs cos and sin of [{m}, {hd // 2}], got {tuple(cos.shape)}, {tuple(sin.shape)}"
            )
        if m:
            tiles = next_power_of_2(heads), next_power_of_2(hd // 2)
            triton_rows.rope[(m,)](x, stride, _check("cos", cos), _check("sin", sin), heads, hd // 2, *tiles, **PLAIN)

    def block_linear(self, x: Tensor, weight: BlockWeight) -> Tensor:
        m, n, k = _fits(x, weight.k), weight.n, weight.k
        columns, steps, parts = plan(n, k, GROUP)
        sums = x.new_empty(parts, m, n)
        if m:
            triton_products.blocks[(cdiv(m, TILE_ROWS), cdiv(n, columns), parts)](
                x, weight.data, weight.data.view(torch.float16), sums, m, n, k, steps, TILE_ROWS, columns, weight.kind == "q4",
                num_warps=4, num_stages=3, **PLAIN,
            )  # fmt: skip
        return sums[0] if parts == 1 else _add(sums)

    def dense_linear(self, x: Tensor, weight: DenseWeight) -> Tensor:
        m, n, k = _fits(x, weight.k), weight.n, weight.k
        columns, steps, parts = plan(n, k, TILE_DEPTH)
        sums = x.new_empty(parts, m, n)
        if m:
            triton_products.dense[(cdiv(m, TILE_ROWS), cdiv(n, columns), parts)](
                x, weight.data, sums, m, n, k, steps, TILE_ROWS, columns, TILE_DEPTH, num_warps=4, num_stages=4, **PLAIN
            )
        return sums[0] if parts == 1 else _add(sums)

    def store(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> None:
        k_stride, v_stride, (m, kv_heads, hd) = _row_stride("k", k), _row_stride("v", v), k.shape
        _check_pool(keys, values, kv_heads, hd)
        if v.shape != k.shape or m != len(rows):
            raise ValueError(f"{len(rows)} rows need as many keys and values, got {tuple(k.shape)} and {tuple(v.shape)}")
        if m and codec.quantised(keys.dtype):
            bits, group = BITS[keys.dtype], codec.group_of(hd)
            triton_codes.store_codes[(m, kv_heads)](
                k, k_stride, v, v_stride, keys, values, keys.view(torch.bfloat16), values.view(torch.bfloat16), rows.tables,
                rows.tables.shape[1], rows.sequence, rows.slot, kv_heads, hd, next_power_of_2(hd // group), BLOCK_SIZE, bits,
                group, **PLAIN,
            )  # fmt: skip
        elif m:
            triton_rows.store[(m, kv_heads)](
                k, k_stride, v, v_stride, keys, values, rows.tables, rows.tables.shape[1], rows.sequence, rows.slot,
                kv_heads, hd, next_power_of_2(hd), BLOCK_SIZE, **PLAIN,
            )  # fmt: skip

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float, window: int) -> Tensor:
        stride, (m, heads, hd), kv_heads = _row_stride("q", q), q.shape, keys.shape[1]
        _check_pool(keys, values, kv_heads, hd)
        if heads % kv_heads or m != len(rows):
            raise ValueError(f"q {tuple(q.shape)} fits neither {len(rows)} rows nor {kv_heads} key heads")
        out = q.new_empty(m, heads * hd)
        if not m:
            return out
        group, tile = heads // kv_heads, max(16, next_power_of_2(hd))
        n_parts = cdiv(rows.tables.shape[1] * BLOCK_SIZE, PART)  # a list names no slot twice, so the table bounds it
        sums, peaks, masses = out, out, out
        if n_parts > 1:
            sums, peaks = q.new_empty(m, n_parts, heads, hd), q.new_empty(m, n_parts, heads)
            masses = torch.empty_like(peaks)
        bits = BITS.get(keys.dtype, 0)
        halves = (keys.view(torch.bfloat16), values.view(torch.bfloat16)) if bits else (keys, values)
        triton_attention.attend[(m, kv_heads, n_parts)](
            q, stride, keys, values, *halves, rows.tables, rows.tables.shape[1], rows.sequence, rows.prefix, rows.path,
            rows.path.shape[1], rows.n_path, sums, peaks, masses, n_parts, scale * math.log2(math.e), window,
            kv_heads, group, hd, max(TILE_QUERIES, next_power_of_2(group)), tile, BLOCK_SIZE,
            64 if hd <= 128 else 32, PART, n_parts == 1, bits, codec.group_of(hd),
            num_warps=4, num_stages=2, **PLAIN,
        )  # fmt: skip
        if n_parts > 1:
            triton_attention.join[(m,)](
                sums, peaks, masses, rows.prefix, rows.n_path, n_parts, window, out,
                heads, hd, next_power_of_2(heads), tile, PART, **PLAIN,
            )  # fmt: skip
        return out

    def top(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return self._host.top(logits.cpu(), k)

    def race(self, z: Tensor, seed: int, position: int, temperature: float = 1.0) -> int:
        return self._host.race(z.cpu(), seed, position, temperature)

    def race_among(
        self, z: Tensor, seed: int, position: int, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> int | None:
        return self._host.race_among(z.cpu(), seed, position, temperature, top_k, top_p, min_p)

    def draw_rows(self, logits: Tensor, draws: Many[Draw]) -> list[int]:
        return self._host.draw_rows(logits.cpu(), draws)

    def candidates(
        self, logits: Tensor, heat: Tensor, seeds: Tensor, positions: Tensor, k: int, names: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return self._host.candidates(logits.cpu(), heat, seeds, positions, k, names)


def _add(parts: Tensor) -> Tensor:
    """[S, M, N] -> [M, N], added in order."""
    out = torch.empty_like(parts[0])
    if out.numel():
        triton_products.add_parts[(cdiv(out.numel(), 1024),)](parts, out, out.numel(), len(parts), 1024, **PLAIN)
    return out


def _fits(x: Tensor, k: int) -> int:
    """The number of rows of x, which must be [M, k]."""
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"a product needs rows [M, {k}], got {list(x.shape)}")
    return len(_check("x", x))


def _check(name: str, x: Tensor) -> Tensor:
    """``x`` itself, if it is a contiguous float32 tensor."""
    if x.dtype is not torch.float32 or not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous float32, got {x.dtype} {tuple(x.shape)} with strides {x.stride()}")
    return x


def _row_stride(name: str, x: Tensor) -> int:
    """Elements from one row of [M, H, hd] float32 to the next; the heads of a row must lie side by side."""
    strides = x.stride()
    if x.dtype is not torch.float32 or len(strides) != 3 or strides[2] != 1 or strides[1] != x.shape[2]:
        raise ValueError(
            f"{name} must be [M, heads, head_dim] float32 with each row's heads side by side, "
            f"got {x.dtype} {tuple(x.shape)} with strides {strides}"
        )
    return strides[0]


def _check_pool(keys: Tensor, values: Tensor, kv_heads: int, hd: int) -> None:
    of_keys, of_values = codec.block_shapes(keys.dtype, hd)
    if keys.shape != (len(keys), kv_heads, *of_keys) or values.shape != (len(keys), kv_heads, *of_values):
        raise ValueError(
            f"a pool of {keys.dtype} for {kv_heads} heads of {hd} needs keys {['blocks', kv_heads, *of_keys]} and values "
            f"{['blocks', kv_heads, *of_values]}, got {tuple(keys.shape)} and {tuple(values.shape)}"
        )
    if not keys.is_contiguous() or not values.is_contiguous():
        raise ValueError("a layer of the pool must be contiguous")
