"""Quantised keys and values for accelerators, in Triton: how rows become codes, and how attention reads them.

csrc/kv.h has the layout of a block and the arithmetic. BITS is 8 or 4, and 0 where the pool holds floats.
"""

import triton
import triton.language as tl


@triton.jit
def block_size(HD: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Elements of a block of one head: floats, or bytes."""
    codes: tl.constexpr = BLOCK * HD * BITS // 8
    return codes + BLOCK * HD // GROUP * 2 if BITS else BLOCK * HD


@triton.jit
def read_keys(
    keys, halves, base, offset, d, inside, HD: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr
):
    """[HD, KEYS] of blocks that begin at ``base`` [KEYS], slots ``offset`` [KEYS]. ``halves``: the same bytes as bfloat16."""
    if BITS == 0:
        entries = tl.load(keys + (base + offset)[None, :] + d[:, None] * BLOCK, mask=inside, other=0.0)
    else:
        row = d // 16 * 8 + d % 8 if BITS == 4 else d
        code = tl.load(keys + (base + offset)[None, :] + row[:, None] * BLOCK, mask=inside, other=0)
        at = (base + BLOCK * HD * BITS // 8) // 2 + offset
        scale = tl.load(halves + at[None, :] + (d // GROUP)[:, None] * BLOCK, mask=inside, other=0.0)
        entries = _numbers(code, (d % 16 // 8)[:, None], BITS) * scale.to(tl.float32)
    return entries


@triton.jit
def read_values(
    values, halves, base, offset, d, inside, HD: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr
):
    """[KEYS, HD], as ``read_keys``."""
    if BITS == 0:
        entries = tl.load(values + (base + offset * HD)[:, None] + d[None, :], mask=inside, other=0.0)
    else:
        byte = d // 16 * 8 + d % 8 if BITS == 4 else d
        code = tl.load(values + (base + offset * (HD * BITS // 8))[:, None] + byte[None, :], mask=inside, other=0)
        at = (base + BLOCK * HD * BITS // 8) // 2 + offset
        scale = tl.load(halves + at[:, None] + (d // GROUP)[None, :] * BLOCK, mask=inside, other=0.0)
        entries = _numbers(code, (d % 16 // 8)[None, :], BITS) * scale.to(tl.float32)
    return entries


@triton.jit
def _numbers(code, upper, BITS: tl.constexpr):
    """Codes as float32; of two in a byte the one that ``upper`` says."""
    number = code.to(tl.int32)
    if BITS == 4:
        number = (((number >> (upper * 4)) & 15) ^ 8) - 8
    return number.to(tl.float32)


@triton.jit(do_not_specialize=["width"])
def store_codes(
    k, k_stride, v, v_stride, keys, values, key_halves, value_halves, tables, width, sequence, slot,
    KV: tl.constexpr, HD: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """k, v [M, KV, HD] f32 to the rows' slots. One program a row and head; a row whose slot is -1 writes nothing.

    GROUPS: at least HD / GROUP, a power of two.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(slot + row)
    offset = place % BLOCK
    block = tl.load(tables + tl.load(sequence + row).to(tl.int64) * width + tl.maximum(place, 0) // BLOCK)
    base = (block.to(tl.int64) * KV + head) * block_size(HD, BLOCK, BITS, GROUP)
    row_bytes: tl.constexpr = HD * BITS // 8
    halves = (base + BLOCK * row_bytes) // 2 + offset
    _store(
        k + row * k_stride + head * HD,
        keys + base + offset,
        BLOCK,
        key_halves + halves,
        place >= 0,
        HD,
        GROUPS,
        BLOCK,
        BITS,
        GROUP,
    )
    at = values + base + offset * row_bytes
    _store(v + row * v_stride + head * HD, at, 1, value_halves + halves, place >= 0, HD, GROUPS, BLOCK, BITS, GROUP)


@triton.jit
def _store(
    x, codes, step, halves, real,
    HD: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One row x [HD]: its bytes ``step`` apart from ``codes`` on, its scales BLOCK apart from ``halves`` on."""
    g = tl.arange(0, GROUPS)
    there = g < tl.where(real, HD // GROUP, 0)
    n_bytes: tl.constexpr = GROUP * BITS // 8
    byte = tl.arange(0, n_bytes)
    entry = byte // 8 * 16 + byte % 8 if BITS == 4 else byte
    low = tl.load(x + g[:, None] * GROUP + entry[None, :], mask=there[:, None], other=0.0)
    size = tl.abs(low)
    if BITS == 4:
        high = tl.load(x + g[:, None] * GROUP + entry[None, :] + 8, mask=there[:, None], other=0.0)
        size = tl.where(tl.abs(high) <= size, size, tl.abs(high))  # the greater one, and a NaN that is either
        size = tl.where(low == low, size, float("nan"))
    broken = tl.max(tl.where(size < float("inf"), 0, 1), 1) > 0  # an infinity or a NaN
    most = tl.max(size, 1)
    usable = (broken == 0) & (most >= 2.0**-120)
    levels: tl.constexpr = 127.0 if BITS == 8 else 7.0
    exact = tl.div_rn(tl.where(usable, most, 1.0), levels)
    scale = ((exact.to(tl.int32, bitcast=True) + 0xFFFF) & -65536).to(tl.float32, bitcast=True)  # up to a bfloat16
    inverse = tl.where(usable, tl.div_rn(1.0, scale), 0.0)
    code = _rounded(low, usable, inverse)
    if BITS == 4:
        code = (code & 15) | (_rounded(high, usable, inverse) << 4)
    tl.store(codes + (g[:, None] * n_bytes + byte[None, :]) * step, code.to(codes.dtype.element_ty), mask=there[:, None])
    kept = tl.where(usable, scale, tl.where(broken, float("nan"), 0.0))
    tl.store(halves + g * BLOCK, kept.to(tl.bfloat16), mask=there)


@triton.jit
def _rounded(x, usable, inverse):
    """Entries [GROUPS, n] over the scales of their groups, as int32; ties go to even."""
    scaled = tl.where(usable[:, None], x, 0.0) * inverse[:, None]
    return ((scaled + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23
