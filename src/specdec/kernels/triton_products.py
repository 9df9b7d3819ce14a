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


@triton.jit(do_not_specialize=["m"])
def blocks(
    x, weight, halves, parts, m, n,
    K: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, Q4: tl.constexpr,
):  # fmt: skip
    """x [m, K] f32 times a weight in groups of 32 -> parts [S, m, n] f32: part s takes STEPS groups in order from s STEPS on.

    ``weight`` (bytes) and ``halves`` (float16) are one packed weight; csrc/blocks.h has its layout and how rows become int8.
    Integer sums of a group are exact in any order.
    """
    groups: tl.constexpr = K // 32
    n_bytes: tl.constexpr = 320 if Q4 else 544  # a group of 16 channels
    n_codes: tl.constexpr = 256 if Q4 else 512
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
    i = tl.arange(0, 32)
    byte = i % 16 if Q4 else i
    at = byte // 4 * 64 + byte % 4
    lane = column % 16
    base = (column // 16).to(tl.int64) * (groups * n_bytes)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(STEPS):
        group = part * STEPS + step
        k = group * 32 + i
        values = tl.load(x + row.to(tl.int64)[:, None] * K + k[None, :], mask=(row < m)[:, None] & (k < K)[None, :], other=0.0)
        size = tl.abs(values)
        broken = tl.max(tl.where(size < float("inf"), 0, 1), 1) > 0  # an infinity or a NaN
        most = tl.max(size, 1)
        usable = (broken == 0) & (most >= 2.0**-120)
        values = (
            tl.where(usable[:, None], values, 0.0)
            * tl.where(usable, tl.div_rn(127.0, tl.where(usable, most, 1.0)), 0.0)[:, None]
        )
        values = (values + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to whole numbers, ties to even
        scale = tl.where(usable, tl.div_rn(most, 127.0), tl.where(broken, float("nan"), 0.0))

        there = (column < n)[None, :] & (k < K)[:, None]
        code = tl.load(weight + (base + group * n_bytes + lane * 4)[None, :] + at[:, None], mask=there, other=0)
        code = ((code >> (i // 16 * 4)[:, None].to(tl.uint8)) & 15).to(tl.int8) if Q4 else code.to(tl.int8, bitcast=True)
        sums = tl.dot(values.to(tl.int8), code, out_dtype=tl.int32).to(tl.float32)
        half = (base + group * n_bytes + n_codes) // 2 + lane
        real = column < tl.where(group < groups, n, 0)
        d = tl.load(halves + half, mask=real, other=0.0).to(tl.float32)
        total += scale[:, None] * d[None, :] * sums
        if Q4:
            offset = tl.load(halves + half + 16, mask=real, other=0.0).to(tl.float32)
            total += (scale * tl.sum(values, 1))[:, None] * offset[None, :]
    to = parts + (part.to(tl.int64) * m + row[:, None]) * n + column[None, :]
    tl.store(to, total, mask=(row < m)[:, None] & (column < n)[None, :])
