"""Row-wise passes for accelerators, in Triton: norm, gate, rotation, and writing keys and values to the pool.

A program computes one row, or one head of it, in tiles whose size follows from the widths of the model alone.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm(x, weight, out, eps, D: tl.constexpr, TILE: tl.constexpr):
    """x, out [rows, D] f32, weight [D] f32. One program a row."""
    row = tl.program_id(0).to(tl.int64) * D
    d = tl.arange(0, TILE)
    values = tl.load(x + row + d, mask=d < D, other=0.0)
    mean = tl.sum(values * values, 0) / D
    scaled = values * (1.0 / tl.sqrt(mean + eps)) * tl.load(weight + d, mask=d < D, other=0.0)
    tl.store(out + row + d, scaled, mask=d < D)


@triton.jit
def silu_mul(gate_up, out, F: tl.constexpr, TILE: tl.constexpr):
    """gate_up [M, 2 F] f32 -> out [M, F] f32. One program a row and TILE columns."""
    row, f = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate = tl.load(gate_up + row * 2 * F + f, mask=f < F, other=0.0)
    up = tl.load(gate_up + row * 2 * F + F + f, mask=f < F, other=0.0)
    tl.store(out + row * F + f, gate * tl.sigmoid(gate) * up, mask=f < F)


@triton.jit
def rope(x, stride, cos, sin, H: tl.constexpr, HALF: tl.constexpr, H_TILE: tl.constexpr, TILE: tl.constexpr):
    """x [M, H, 2 HALF] f32 in place, rows ``stride`` apart; cos, sin [M, HALF] f32. One program a row."""
    row = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, H_TILE)[:, None], tl.arange(0, TILE)[None, :]
    inside = (h < H) & (d < HALF)
    at = x + row * stride + h * (2 * HALF) + d
    a, b = tl.load(at, mask=inside, other=0.0), tl.load(at + HALF, mask=inside, other=0.0)
    c = tl.load(cos + row * HALF + d, mask=d < HALF, other=0.0)
    s = tl.load(sin + row * HALF + d, mask=d < HALF, other=0.0)
    tl.store(at, a * c - b * s, mask=inside)
    tl.store(at + HALF, b * c + a * s, mask=inside)


@triton.jit(do_not_specialize=["width"])
def store(
    k, k_stride, v, v_stride, keys, values, tables, width, sequence, slot,
    KV: tl.constexpr, HD: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """k, v [M, KV, HD] f32 to the rows' slots. One program a row and head; a row whose slot is -1 writes nothing."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, TILE)
    place = tl.load(slot + row)
    written = d < tl.where(place >= 0, HD, 0)
    block = tl.load(tables + tl.load(sequence + row).to(tl.int64) * width + tl.maximum(place, 0) // BLOCK)
    base = (block.to(tl.int64) * KV + head) * (BLOCK * HD)
    key = tl.load(k + row * k_stride + head * HD + d, mask=written, other=0.0)
    value = tl.load(v + row * v_stride + head * HD + d, mask=written, other=0.0)
    tl.store(keys + base + d * BLOCK + place % BLOCK, key.to(keys.dtype.element_ty), mask=written)
    tl.store(values + base + (place % BLOCK) * HD + d, value.to(values.dtype.element_ty), mask=written)
