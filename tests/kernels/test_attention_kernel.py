"""Attention kernels: right by the definition, and a row's bits decided by its own list of keys alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from native import ALL, FAST, NATIVE, Emulated
from paged import Paged, Row, burst
from torch import Tensor

from specdec.kernels import set_threads
from specdec.kernels.base import Kernels, Rows
from specdec.kernels.cpu import NativeKernels
from specdec.kernels.portable import PortableKernels
from specdec.kv.codec import KINDS, decode, encode, name_of, quantised

Check = Callable[[Kernels, torch.dtype], None]

every = pytest.mark.parametrize("kernels", ALL, ids=lambda kernels: kernels.name)
native = pytest.mark.parametrize("kernels", NATIVE, ids=lambda kernels: kernels.name)


def same(a: Tensor, b: Tensor) -> None:
    assert not a.isnan().any(), "a slot that holds no key was read"
    assert torch.equal(a, b), f"{(a != b).sum()} of {a.numel()} entries differ, by up to {(a - b).abs().max():.1e}"


SHAPES = [
    (1, 1, 8),
    (2, 2, 16),
    (4, 2, 32),
    (3, 1, 64),
    (9, 3, 64),
    (4, 1, 24),
    (5, 1, 80),
    (7, 1, 96),
    (16, 2, 128),
    (2, 1, 256),
]

DTYPES = list(KINDS)
EACH_SHAPE = pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "hd"),
    [(dtype, *shape) for dtype in DTYPES for shape in SHAPES if not quantised(dtype) or shape[2] % 16 == 0],
    ids=lambda value: name_of(value) if isinstance(value, torch.dtype) else None,
)
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)


@every
@EACH_SHAPE
def test_agrees_with_the_definition(kernels: Kernels, dtype: torch.dtype, heads: int, kv_heads: int, hd: int) -> None:
    """Every head width, group of heads and storage type, over bursts, trees and more than one sequence."""
    paged = Paged(kernels, [150, 20], heads=heads, kv_heads=kv_heads, hd=hd, dtype=dtype)
    rows = [
        *burst(0, 126, 131),
        Row(0, 131, (131, 133, 149)),
        Row(0, 3, (3,)),
        *burst(1, 0, 2),
        Row(1, 17, (18,)),
        Row(0, 0, (5,)),
    ]
    q = paged.queries(len(rows))
    np.testing.assert_allclose(paged.attend(q, rows).numpy(), paged.expected(q, rows), rtol=2e-5, atol=3e-6)


@every
@pytest.mark.parametrize("window", [1, 5, 16, 17, 40, 1000])
@pytest.mark.parametrize(("dtype", "hd"), [(torch.bfloat16, 24), (torch.int8, 48), (torch.uint8, 32)])
def test_window_counts_positions(kernels: Kernels, window: int, dtype: torch.dtype, hd: int) -> None:
    """Keys of the prefix and of the path fall out of the window by position, also where it is smaller than the burst."""
    paged = Paged(kernels, [90], heads=6, kv_heads=2, hd=hd, dtype=dtype)
    rows = [
        *burst(0, 50, 66),
        *(Row(0, 60, tuple(range(60, 61 + i, 1))) for i in range(12)),
        Row(0, 66, (66, 68, 71, 72, 80, 89)),
    ]
    q = paged.queries(len(rows))
    got = paged.attend(q, rows, window)
    np.testing.assert_allclose(got.numpy(), paged.expected(q, rows, window), rtol=2e-5, atol=3e-6)
    same(got, paged.alone(q, rows, window))


def check_bursts(kernels: Kernels, dtype: torch.dtype) -> None:
    paged = Paged(kernels, [80], heads=6, kv_heads=2, hd=32, dtype=dtype)
    rows = burst(0, 37, 70)
    q = paged.queries(len(rows))
    alone = paged.alone(q, rows)
    for m in range(2, 34):
        same(paged.attend(q[:m].clone(), rows[:m]), alone[:m])
    same(paged.attend(q.flip(0).contiguous(), rows[::-1]).flip(0), alone)


def check_trees(kernels: Kernels, dtype: torch.dtype) -> None:
    prefix, n, chance = 45, 24, random.Random(3)
    parents = [chance.randrange(-1, node) for node in range(n)]
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), prefix + node))
    tree = Paged(kernels, [prefix + n], heads=6, kv_heads=2, hd=32, dtype=dtype)
    rows = [Row(0, prefix, path) for path in paths]
    q = tree.queries(n)
    together = tree.attend(q, rows)
    for node, path in enumerate(paths):
        line = Paged(kernels, [prefix + len(path)], heads=6, kv_heads=2, hd=32, layout=node, dtype=dtype)
        slots = [*range(prefix), *path]
        everywhere = line.rows([Row(0, slot) for slot in range(len(slots))])
        kernels.store(tree.k[0][slots], tree.v[0][slots], line.keys, line.values, everywhere)
        same(together[node : node + 1], line.attend(q[node : node + 1].clone(), [Row(0, len(slots))]))


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.uint8], ids=name_of)
@pytest.mark.parametrize("check", [check_bursts, check_trees])
def test_company_and_place_change_no_bit(kernels: Kernels, dtype: torch.dtype, check: Check) -> None:
    """A row alone equals itself in bursts of 2 to 33; a tree node with scattered ancestors equals them laid out in line."""
    check(kernels, dtype)


class BurstSums(PortableKernels):
    """Wrong on purpose: sums the keys in pieces whose size follows the number of rows."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float, window: int) -> Tensor:
        return super().attend(q, keys, values, rows, scale * (1 + len(rows) * 2**-23), window)


class WrongAncestor(PortableKernels):
    """Wrong on purpose: takes the slot before the last ancestor's."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float, window: int) -> Tensor:
        path = rows.path.clone()
        for i in range(len(rows)):
            if n := int(rows.n_path[i]):
                path[i, n - 1] -= 1
        moved = Rows(rows.tables, rows.sequence, rows.slot, rows.prefix, path, rows.n_path)
        return super().attend(q, keys, values, moved, scale, window)


@pytest.mark.parametrize(
    ("check", "wrong"), [(check_bursts, BurstSums()), (check_trees, BurstSums()), (check_trees, WrongAncestor())]
)
def test_the_checks_notice_a_wrong_kernel(check: Check, wrong: Kernels) -> None:
    """The two checks above fail for a kernel that rounds by the size of the burst, or whose ancestors are off by one."""
    with pytest.raises(AssertionError, match="entries differ"):
        check(wrong, torch.bfloat16)


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=name_of)
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_of_a_prompt_change_no_bit(kernels: Kernels, chunk: int, dtype: torch.dtype) -> None:
    paged = Paged(kernels, [130], heads=3, kv_heads=1, hd=16, dtype=dtype)
    rows = burst(0, 0, 130)
    q = paged.queries(len(rows))
    pieces = [paged.attend(q[i : i + chunk].clone(), rows[i : i + chunk]) for i in range(0, len(rows), chunk)]
    same(torch.cat(pieces), paged.attend(q, rows))


@every
@EACH_DTYPE
def test_other_sequences_and_blocks_change_no_bit(kernels: Kernels, dtype: torch.dtype) -> None:
    """Five sequences in one call equal each by itself, and the same tokens in other blocks."""
    lengths = [40, 1, 130, 16, 77]
    paged, elsewhere = (Paged(kernels, lengths, dtype=dtype, layout=layout) for layout in (0, 1))
    assert not torch.equal(paged.tables, elsewhere.tables)
    rows = [row for s, n in enumerate(lengths) for row in burst(s, max(0, n - 5), n)]
    random.Random(0).shuffle(rows)
    q = paged.queries(len(rows))
    together = paged.attend(q, rows)
    same(together, paged.alone(q, rows))
    same(together, elsewhere.attend(q, rows))


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.uint8], ids=name_of)
@pytest.mark.parametrize("window", [0, 20])
def test_unseen_slots_change_no_bit(kernels: Kernels, window: int, dtype: torch.dtype) -> None:
    """With NaN in every slot that one row does not see, its result keeps its bits, though its neighbours' become NaN."""
    rows = [
        *burst(0, 40, 46),
        Row(0, 46, (46,)),
        Row(0, 46, (47, 49)),
        Row(0, 46, (46, 48)),
        Row(0, 46, (46, 48, 50)),
        Row(0, 20),
    ]
    clean = Paged(kernels, [52], heads=3, kv_heads=1, hd=32, dtype=dtype)
    q = clean.queries(len(rows))
    right = clean.attend(q, rows, window)
    for i, row in enumerate(rows):
        paged = Paged(kernels, [52], heads=3, kv_heads=1, hd=32, dtype=dtype)
        for slot in set(range(64)) - set(row.slots[-window:]):
            block = int(paged.tables[0, slot // 16])
            for part in paged.parts:
                part[block, slot % 16] = torch.nan if part.is_floating_point() else 99
        same(paged.attend(q, rows, window)[i], right[i])


MANY = [*burst(0, 280, 300), *burst(1, 245, 260)]
FEW = [Row(0, 2190, (2190, 2192, 2199)), Row(0, 2201)]


@native
@pytest.mark.parametrize(
    ("rows", "kv_heads", "hd", "window", "dtype"),
    [
        *((rows, kv_heads, 64, window, dtype) for dtype in (torch.bfloat16, torch.int8, torch.uint8)
          for rows, kv_heads, window in ((MANY, 3, 0), (FEW, 3, 0), (FEW[:1], 1, 2100))),
        (FEW[:1], 1, 72, 0, torch.bfloat16),
    ],
)  # fmt: skip
def test_threads_change_no_bit(
    kernels: Kernels, rows: list[Row], kv_heads: int, hd: int, window: int, dtype: torch.dtype
) -> None:
    """More work than one thread is given, by tiles of rows and heads; by keys and entries where heads are too few."""
    paged = Paged(kernels, [2202, 260], heads=6, kv_heads=kv_heads, hd=hd, dtype=dtype)
    q, before, results = paged.queries(len(rows)), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 6):
            set_threads(threads)
            results.append(paged.attend(q, rows, window))
    finally:
        set_threads(before)
    same(results[1], results[0])
    same(results[2], results[0])
    same(results[0][-1:], paged.alone(q[-1:], rows[-1:], window))


@EACH_SHAPE
def test_instruction_sets_agree_in_every_bit(dtype: torch.dtype, heads: int, kv_heads: int, hd: int) -> None:
    results = []
    for kernels in NATIVE:
        paged = Paged(kernels, [100], heads=heads, kv_heads=kv_heads, hd=hd, dtype=dtype)
        rows = [*burst(0, 80, 87), Row(0, 87, (87, 89, 99))]
        results.append(paged.attend(paged.queries(len(rows)), rows, 50))
    for result in results[1:]:
        same(result, results[0])


@pytest.mark.slow
def test_avx512_agrees_in_every_bit_where_it_can_only_be_emulated(emulated: Callable[[str], Emulated]) -> None:
    """Rows written and attended to in each format."""
    wide = NativeKernels(emulated("amx"))  # has AVX-512's attention
    for dtype in DTYPES:
        for heads, kv_heads, hd in ((9, 3, 64), (5, 1, 80), (2, 1, 32)):
            results = []
            for kernels in (wide, FAST):
                paged = Paged(kernels, [100], heads=heads, kv_heads=kv_heads, hd=hd, dtype=dtype)
                rows = [*burst(0, 80, 87), Row(0, 87, (87, 89, 99))]
                results.append(paged.attend(paged.queries(len(rows)), rows, 50))
            same(*results)


def test_long_contexts_are_cut_to_fit_the_scratch() -> None:
    """20,000 keys and a burst of nine: fewer rows share a tile, and nothing else changes."""
    paged = Paged(FAST, [20_000], heads=3, kv_heads=1, hd=16)
    rows = burst(0, 19_991, 20_000)
    q = paged.queries(len(rows))
    got = paged.attend(q, rows)
    same(got[4:5], paged.attend(q[4:5].clone(), rows[4:5]))
    np.testing.assert_allclose(got.numpy(), paged.expected(q, rows), rtol=1e-4, atol=1e-5)


def test_strided_queries() -> None:
    """Queries may be a slice of a wider tensor, as a fused projection gives them."""
    paged = Paged(FAST, [30])
    rows = burst(0, 20, 25)
    q = paged.queries(len(rows))
    wide = torch.full((5, 4 * 16 + 7), torch.nan)
    wide[:, 3 : 3 + 64] = q.flatten(1)
    same(paged.attend(wide[:, 3 : 3 + 64].unflatten(1, (4, 16)), rows), paged.attend(q, rows))


@native
@pytest.mark.parametrize("row", [Row(2, 4), Row(-1, 4), Row(0, 33), Row(0, -1), Row(0, 4, (32,)), Row(0, 4, (-1,))])
def test_rows_outside_their_table_are_refused(kernels: Kernels, row: Row) -> None:
    paged = Paged(kernels, [30, 5])
    with pytest.raises(IndexError, match="outside the tables"):
        paged.attend(paged.queries(1), [row])


@native
@pytest.mark.parametrize("block", [-1, 7])
def test_blocks_outside_the_pool_are_refused(kernels: Kernels, block: int) -> None:
    paged = Paged(kernels, [30, 5])
    paged.tables[1, 0] = block
    with pytest.raises(IndexError, match="outside the pool"):
        paged.attend(paged.queries(1), [Row(1, 4)])
    with pytest.raises(IndexError, match="outside the pool"):
        kernels.store(paged.k[1], paged.v[1], paged.keys, paged.values, paged.rows([Row(1, s) for s in range(5)]))


@native
def test_tensors_that_do_not_fit_are_refused(kernels: Kernels) -> None:
    paged = Paged(kernels, [30])
    q, rows = paged.queries(1), paged.rows([Row(0, 3)])
    wrong = [
        (q.double(), paged.keys, paged.values, rows),
        (q.transpose(1, 2), paged.keys, paged.values, rows),
        (q.expand(2, -1, -1), paged.keys, paged.values, rows),
        (q[:, :3], paged.keys, paged.values, rows),
        (q, paged.keys.half(), paged.values.half(), rows),
        (q, paged.keys, paged.values.float(), rows),
        (q, paged.keys, paged.values[:-1], rows),
        (q, paged.keys, paged.values, Rows(rows.tables.long(), rows.sequence, rows.slot, rows.prefix, rows.path, rows.n_path)),
        (q, paged.keys, paged.values, Rows(rows.tables, rows.sequence, rows.slot, rows.prefix.long(), rows.path, rows.n_path)),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match=r"must|needs|fits"):
            kernels.attend(*arguments, paged.scale, 0)


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hd", [8, 24, 64])
def test_store_rounds_to_nearest_even_and_writes_nothing_else(kernels: Kernels, dtype: torch.dtype, hd: int) -> None:
    paged = Paged(kernels, [1], kv_heads=3, heads=3, hd=hd, dtype=dtype)
    paged.tables = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    paged.keys.fill_(7), paged.values.fill_(7)
    keys, values = paged.keys.clone(), paged.values.clone()
    wide = torch.randn(4, 2, 3, hd, generator=torch.Generator().manual_seed(5))
    wide[0, :, 0, :6] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, torch.inf, torch.nan])
    places = [(0, 0, 2), (0, 31, 0), (1, 7, 1), (1, 16, 3)]
    kernels.store(wide[:, 0], wide[:, 1], paged.keys, paged.values, paged.rows([Row(s, slot) for s, slot, _ in places]))
    for i, (_, slot, block) in enumerate(places):
        keys[block, :, :, slot % 16] = wide[i, 0].to(dtype)
        values[block, :, slot % 16] = wide[i, 1].to(dtype)
    assert torch.equal(paged.keys.nan_to_num(99), keys.nan_to_num(99))
    assert torch.equal(paged.values.nan_to_num(99), values.nan_to_num(99))


@every
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=name_of)
@pytest.mark.parametrize("hd", [16, 48, 64])
def test_store_writes_the_codes_of_a_row_and_nothing_else(kernels: Kernels, dtype: torch.dtype, hd: int) -> None:
    """Bit for bit what ``kv.codec`` says, whatever the row holds; every byte of another slot stays."""
    paged = Paged(kernels, [1], kv_heads=3, heads=3, hd=hd, dtype=dtype)
    paged.tables = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    before = torch.randint(-128, 128, paged.keys.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    paged.keys.copy_(before), paged.values.copy_(before)
    wide = torch.randn(4, 2, 3, hd, generator=torch.Generator().manual_seed(5))
    wide[0, :, 0, :6] = torch.tensor([3.4e38, torch.inf, 1, 2, -3, 0])
    wide[0, :, 1, 0], wide[0, :, 2] = torch.nan, 0
    wide[1, :, 0], wide[1, :, 1], wide[1, :, 2, 1] = 1e-37, 1e-35 * wide[1, :, 1], 3.4e38
    wide[2, :, 0] = torch.arange(-hd // 2, hd // 2) / 2  # ties
    places = [(0, 0, 2), (0, 31, 0), (1, 7, 1), (1, 16, 3)]
    kernels.store(wide[:, 0], wide[:, 1], paged.keys, paged.values, paged.rows([Row(s, slot) for s, slot, _ in places]))
    untouched = torch.ones(4, 16, dtype=torch.bool)
    for i, (_, slot, block) in enumerate(places):
        held = [*encode(wide[i, 0], dtype), *encode(wide[i, 1], dtype)]
        for part, expected in zip(paged.parts, held, strict=True):
            torch.testing.assert_close(part[block, slot % 16], expected, rtol=0, atol=0, equal_nan=True)
        untouched[block, slot % 16] = False
    fresh = Paged(kernels, [1], kv_heads=3, heads=3, hd=hd, dtype=dtype)
    fresh.keys.copy_(before), fresh.values.copy_(before)
    for part, was in zip(paged.parts, fresh.parts, strict=True):
        torch.testing.assert_close(part[untouched], was[untouched], rtol=0, atol=0, equal_nan=True)


@every
@EACH_DTYPE
def test_rows_written_one_by_one_or_in_bulk_leave_the_same_bytes(kernels: Kernels, dtype: torch.dtype) -> None:
    """In order, from the last to the first, or all at once: what a slot holds does not depend on the call that wrote it."""
    bulk = Paged(kernels, [40], heads=6, kv_heads=3, hd=64, dtype=dtype)
    for slots in (range(40), range(39, -1, -1)):
        single = Paged(kernels, [40], heads=6, kv_heads=3, hd=64, dtype=dtype)
        single.keys.fill_(0), single.values.fill_(0)
        for slot in slots:
            k, v = single.k[0][slot : slot + 1], single.v[0][slot : slot + 1]
            kernels.store(k, v, single.keys, single.values, single.rows([Row(0, slot)]))
        for ours, theirs in zip(single.parts, bulk.parts, strict=True):
            for slot in range(40):
                block = int(bulk.tables[0, slot // 16])
                assert torch.equal(ours[block, slot % 16], theirs[block, slot % 16])


@every
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=name_of)
def test_codes_stand_for_floats_that_a_float_pool_attends_to_alike(kernels: Kernels, dtype: torch.dtype) -> None:
    """Attention over codes is attention over what they stand for, up to the rounding of its sums."""
    codes = Paged(kernels, [100], heads=6, kv_heads=2, hd=64, dtype=dtype)
    floats = Paged(kernels, [100], heads=6, kv_heads=2, hd=64, dtype=torch.float32)
    held = [decode(encode(x, dtype)) for x in (codes.k[0], codes.v[0])]
    kernels.store(*held, floats.keys, floats.values, floats.rows([Row(0, slot) for slot in range(100)]))
    rows = [*burst(0, 90, 97), Row(0, 97, (97, 99))]
    q = codes.queries(len(rows))
    torch.testing.assert_close(codes.attend(q, rows), floats.attend(q, rows), rtol=2e-5, atol=2e-6)
