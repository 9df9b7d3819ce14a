"""Attention over the paged pool for accelerators, in Triton.

Each row walks its own list of keys in tiles that begin at fixed indices of that list, and long lists are cut at fixed indices
into parts that run side by side and are joined in order. Neither the rows beside it nor the place of a key in the pool
enters the arithmetic.
"""

import triton
import triton.language as tl

from specdec.kernels.triton_codes import block_size, read_keys, read_values
from specdec.kernels.triton_products import dot


@triton.jit(do_not_specialize=["width", "path_width", "n_parts", "window"])
def attend(
    q, q_stride, keys, values, key_halves, value_halves, tables, width, sequence, prefix, path, path_width, n_path, sums,
    peaks, masses, n_parts, scale, window,
    KV: tl.constexpr, G: tl.constexpr, HD: tl.constexpr, G_TILE: tl.constexpr, HD_TILE: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr, PART: tl.constexpr, WHOLE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program a row, a key head with its G query heads, and PART entries of the row's list.

    Args:
        q: [M, KV G, HD] f32, rows ``q_stride`` apart.
        sums: [M, n_parts, KV G, HD] f32, values weighted by 2^(score - peak); if WHOLE, [M, KV G, HD], divided by the mass.
        peaks, masses: [M, n_parts, KV G] f32, the largest score of a part and the sum of its weights; unused if WHOLE.
        key_halves, value_halves: the bytes of keys and values as bfloat16, for the scales of codes.
        scale: of the scores, times log2(e).
        BITS, GROUP: of codes; 0 bits are floats.
    """
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    before = tl.load(prefix + row)
    count = before + tl.load(n_path + row)
    first = tl.where(window > 0, tl.maximum(count - window, 0), 0)
    start, stop = tl.maximum(part * PART, first // KEYS * KEYS), tl.minimum((part + 1) * PART, count)
    table = tables + tl.load(sequence + row).to(tl.int64) * width
    g, d, key = tl.arange(0, G_TILE), tl.arange(0, HD_TILE), tl.arange(0, KEYS)
    real = (g < G)[:, None] & (d < HD)[None, :]
    query = tl.load(q + row * q_stride + (head * G + g)[:, None] * HD + d[None, :], mask=real, other=0.0) * scale

    peak = tl.full([G_TILE], float("-inf"), tl.float32)
    mass = tl.zeros([G_TILE], tl.float32)
    total = tl.zeros([G_TILE, HD_TILE], tl.float32)
    for at in range(start, stop, KEYS):
        j = at + key
        seen = (j >= first) & (j < count)
        slot = tl.where(j < before, j, tl.load(path + row * path_width + (j - before), mask=seen & (j >= before), other=0))
        block = tl.load(table + slot // BLOCK, mask=seen, other=0).to(tl.int64)
        base = (block * KV + head) * block_size(HD, BLOCK, BITS, GROUP)
        inside = seen[None, :] & (d < HD)[:, None]
        k = read_keys(keys, key_halves, base, slot % BLOCK, d, inside, HD, BLOCK, BITS, GROUP)  # [HD, KEYS]
        scores = dot(query, k, tl.zeros([G_TILE, KEYS], tl.float32))
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(peak - higher)
        mass = mass * fade + tl.sum(weights, 1)
        inside = seen[:, None] & (d < HD)[None, :]
        v = read_values(values, value_halves, base, slot % BLOCK, d, inside, HD, BLOCK, BITS, GROUP)  # [KEYS, HD]
        total = dot(weights, v, total * fade[:, None])
        peak = higher

    if WHOLE:
        to = row * KV * G + head * G + g
        total = total / tl.where(mass > 0, mass, 1.0)[:, None]
    else:
        to = (row * n_parts + part) * (KV * G) + head * G + g
        tl.store(peaks + to, peak, mask=g < G)
        tl.store(masses + to, mass, mask=g < G)
    tl.store(sums + to[:, None] * HD + d[None, :], total, mask=real)


@triton.jit(do_not_specialize=["n_parts", "window"])
def join(
    sums, peaks, masses, prefix, n_path, n_parts, window, out,
    HEADS: tl.constexpr, HD: tl.constexpr, HEADS_TILE: tl.constexpr, HD_TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The parts of each row, in order -> out [M, HEADS, HD] f32. One program a row.

    A row that has one part gets the bits that ``attend`` gives it where no row has more: 0 + 1 x is x.
    """
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(prefix + row) + tl.load(n_path + row)
    first = tl.where(window > 0, tl.maximum(count - window, 0), 0)
    h, d = tl.arange(0, HEADS_TILE), tl.arange(0, HD_TILE)
    real = (h < HEADS)[:, None] & (d < HD)[None, :]
    peak = tl.full([HEADS_TILE], float("-inf"), tl.float32)
    mass = tl.zeros([HEADS_TILE], tl.float32)
    total = tl.zeros([HEADS_TILE, HD_TILE], tl.float32)
    for part in range(first // PART, tl.cdiv(count, PART)):
        at = (row * n_parts + part) * HEADS + h
        part_peak = tl.load(peaks + at, mask=h < HEADS, other=0.0)
        higher = tl.maximum(peak, part_peak)
        fade, share = tl.exp2(peak - higher), tl.exp2(part_peak - higher)
        mass = mass * fade + tl.load(masses + at, mask=h < HEADS, other=1.0) * share
        part_total = tl.load(sums + at[:, None] * HD + d[None, :], mask=real, other=0.0)
        total = total * fade[:, None] + part_total * share[:, None]
        peak = higher
    total = total / tl.where(mass > 0, mass, 1.0)[:, None]
    tl.store(out + (row * HEADS + h)[:, None] * HD + d[None, :], total, mask=real)
