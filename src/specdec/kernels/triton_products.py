"""Products for accelerators, in Triton.

A row of a result is the same bits whatever rows run beside it: a tile always has 16 rows, of which the missing are zero, the
sum over k runs in steps of one size, and where it is cut into parts the cuts follow from the weight's shape and the parts are
added in order. A library's product chooses all three by the number of rows.
"""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, total):
    """total + a b with a [m, k] f32 and b [k, n] bfloat16 or float32, in float32.

    Tensor cores want bfloat16 on both sides, and rounding ``a`` to it would cost five decimal digits to two: so it goes in as
    the sum of two such numbers, which keeps 16 bits. Reading ``b`` is what a decoding step waits for, not the second product.
    """
    if b.dtype == tl.bfloat16:
        high = a.to(tl.bfloat16)
        low = (a - high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(high, b, total)
        total = tl.dot(low, b, total)
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["m"])
def dense(
    x, weight, parts, m, n, K: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """x [m, K] f32, weight [n / 16, K, 16] -> parts [S, m, n] f32: part s sums k from s STEPS DEPTH on.

    One program ROWS rows, COLUMNS channels and one part; K must be a multiple of 16.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
    k = part * (STEPS * DEPTH) + tl.arange(0, DEPTH)
    from_x = x + row.to(tl.int64)[:, None] * K
    from_weight = weight + (column // 16).to(tl.int64)[None, :] * (K * 16) + column[None, :] % 16
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in range(STEPS):
        a = tl.load(from_x + k[None, :], mask=(row < m)[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(from_weight + k[:, None] * 16, mask=(k < K)[:, None] & (column < n)[None, :], other=0.0)
        total = dot(a, b, total)
        k += DEPTH
    to = parts + (part.to(tl.int64) * m + row[:, None]) * n + column[None, :]
    tl.store(to, total, mask=(row < m)[:, None] & (column < n)[None, :])


@triton.jit(do_not_specialize=["size"])
def add_parts(parts, out, size, S: tl.constexpr, TILE: tl.constexpr):
    """parts [S, size] f32 -> out [size] f32, added in order."""
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    total = tl.load(parts + i, mask=i < size, other=0.0)
    for s in tl.static_range(1, S):
        total += tl.load(parts + s * size + i, mask=i < size, other=0.0)
    tl.store(out + i, total, mask=i < size)
