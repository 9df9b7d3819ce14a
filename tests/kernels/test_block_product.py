"""The block product: right by the dequantised weights, and each row's bits its own affair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from native import ALL, FAST, NATIVE, Emulated
from torch import Tensor

from specdec.kernels import build, set_threads
from specdec.kernels.base import BlockWeight, Kernels
from specdec.kernels.cpu import NativeKernels
from specdec.kernels.portable import PortableKernels, quantise
from specdec.quant.blocks import dequantize, from_float

every = pytest.mark.parametrize("kernels", ALL, ids=lambda kernels: kernels.name)
kinds = pytest.mark.parametrize("kind", ["q4", "q8"])
Kind = Literal["q4", "q8"]
SHAPES = [(1, 32), (15, 64), (16, 32), (17, 96), (48, 576), (130, 160)]


def weight(n: int, k: int, kind: Kind) -> BlockWeight:
    return from_float(torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)), kind)


def inputs(rows: int, k: int) -> Tensor:
    """Rows of very different sizes, so that a scale which leaks from one row to another shows."""
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows * k))
    return x * torch.logspace(-3, 3, rows)[:, None] if rows > 1 else x


def expected(x: Tensor, w: BlockWeight) -> tuple[Tensor, Tensor]:
    """The product of the quantised rows and weights in float64, and the sum of the sizes of its terms."""
    q, scale, _ = quantise(x)
    rows = (q.double() * scale.double()[..., None]).view(x.shape)
    codes = dequantize(w).double()
    return rows @ codes.t(), rows.abs() @ codes.abs().t()


def extreme(n: int, k: int, kind: Kind, code: int) -> BlockWeight:
    """Every code the same, every scale 1 and every offset 0: integer sums at the end of their range."""
    width, halves = (256, 32) if kind == "q4" else (512, 16)
    data = torch.zeros(-(-n // 16), k // 32, width + 2 * halves, dtype=torch.uint8)
    data[..., :width] = code * 17 if kind == "q4" else code % 256
    data.view(torch.float16)[..., width // 2 : width // 2 + 16] = 1.0
    return BlockWeight(data, kind, n, k)


@every
@kinds
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 8, 13])
def test_equals_the_dequantised_product(kernels: Kernels, kind: Kind, n: int, k: int, rows: int) -> None:
    """Up to float32 rounding of the group sums; odd sizes included."""
    w, x = weight(n, k, kind), inputs(rows, k)
    y, size = expected(x, w)
    error = (kernels.block_linear(x, w).double() - y).abs() / size
    assert error.max() < 1e-6


@every
@kinds
def test_quantised_rows_stay_close(kernels: Kernels, kind: Kind) -> None:
    """Rows rounded to 8 bits in groups of 32 cost about half a percent of a product's size."""
    w, x = weight(48, 576, kind), torch.randn(5, 576, generator=torch.Generator().manual_seed(1))
    y = x @ dequantize(w).t()
    assert (kernels.block_linear(x, w) - y).norm() / y.norm() < 0.01


def companions(product: Callable[[Tensor, BlockWeight], Tensor], w: BlockWeight, most: int) -> bool:
    """Is every row's result the same bits alone, beside 1 .. most - 1 others, and at another place among them?"""
    x = inputs(most, w.k)
    alone = torch.cat([product(x[i : i + 1].contiguous(), w) for i in range(most)])
    counts = all(torch.equal(product(x[:m].contiguous(), w), alone[:m]) for m in range(1, most + 1))
    return counts and torch.equal(product(x.flip(0).contiguous(), w), alone.flip(0))


@every
@kinds
@pytest.mark.parametrize(("n", "k"), [(48, 64), (33, 160), (16, 2080)])
def test_a_row_does_not_see_the_rows_beside_it(kernels: Kernels, kind: Kind, n: int, k: int) -> None:
    """What makes a verified burst equal to plain decoding: bitwise, for every number of rows from 1 to 40."""
    assert companions(kernels.block_linear, weight(n, k, kind), 40)


def test_the_invariance_test_bites() -> None:
    """One scale for the whole batch, as some fast int8 libraries have it, must be caught."""
    per_row = PortableKernels().block_linear

    def per_batch(x: Tensor, w: BlockWeight) -> Tensor:
        step = x.abs().max() / 127
        return per_row((x / step).round() * step, w)

    w = weight(48, 64, "q8")
    assert companions(per_row, w, 6)
    assert not companions(per_batch, w, 6)


@pytest.mark.skipif(not NATIVE, reason="the native kernels are not built")
@kinds
@pytest.mark.parametrize("rows", [1, 9, 64])
def test_threads_do_not_change_bits(kind: Kind, rows: int) -> None:
    """A product large enough to be split is the same on one thread and on two."""
    w, x = weight(3072, 576, kind), inputs(rows, 576)
    before = torch.get_num_threads()
    try:
        set_threads(1)
        one = FAST.block_linear(x, w)
        set_threads(2)
        two = FAST.block_linear(x, w)
    finally:
        set_threads(before)
    assert torch.equal(one, two)


@kinds
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_instruction_sets_agree_bitwise(kind: Kind, n: int, k: int) -> None:
    """A session recorded on one machine can be checked on another."""
    w = weight(n, k, kind)
    for rows in (1, 2, 3, 5, 8, 21, 39):
        x = inputs(rows, k)
        results = [kernels.block_linear(x, w) for kernels in NATIVE]
        assert all(torch.equal(results[0], y) for y in results[1:])


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["avx512", "amx"])
def test_wide_instruction_sets_agree_bitwise_where_they_can_only_be_emulated(
    isa: str, emulated: Callable[[str], Emulated]
) -> None:
    """The sources of every kernel, intrinsics emulated: products, attention's exponential and the row passes."""
    library = emulated(isa)
    wide = NativeKernels(library)
    for kind in ("q4", "q8"):
        for n, k in SHAPES:
            for rows in (1, 2, 3, 8, 13, 16, 35):
                w, x = weight(n, k, kind), inputs(rows, k)
                assert torch.equal(wide.block_linear(x, w), FAST.block_linear(x, w)), (kind, n, k, rows)
    for kind, code in (("q4", 15), ("q8", -128), ("q8", 127)):
        x, w = torch.where(inputs(19, 64) > 0, 127.0, -127.0), extreme(20, 64, kind, code)
        assert torch.equal(wide.block_linear(x, w), FAST.block_linear(x, w))
    assert (library.counter("products") > 0) == (isa == "amx")
    x = inputs(7, 96)
    assert torch.equal(wide.rms_norm(x, x[3], 1e-5), FAST.rms_norm(x, x[3], 1e-5))
    assert torch.equal(wide.silu_mul(x), FAST.silu_mul(x))


def test_only_block_products_know_of_tiles() -> None:
    """So AVX-512 and AMX have all else in common, and it is emulated once."""
    found = {
        source.name for source in build.SOURCES.glob("*.[ch]") if "SPECDEC_TILES" in source.read_text().replace("_TILES_H", "")
    }
    assert found == {"simd.h", "blocks.c"}


@pytest.mark.slow
def test_every_thread_configures_its_tiles_and_gives_them_back(emulated: Callable[[str], Emulated]) -> None:
    """A tile used without its thread's own configuration faults; one that is kept makes each switch of threads dearer."""
    w, x, amx = weight(3072, 576, "q4"), inputs(64, 576), emulated("amx")
    amx.set_threads(2)
    before = amx.counter("products")
    y = NativeKernels(amx).block_linear(x, w)
    assert amx.counter("products") - before == 64 // 16 * 3072 // 16 * 576 // 32
    assert amx.counter("holders") == 0
    assert torch.equal(y, FAST.block_linear(x, w))


@every
@pytest.mark.parametrize(("kind", "code"), [("q4", 15), ("q8", 127), ("q8", -127), ("q8", -128)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_integer_sums_do_not_overflow(kernels: Kernels, kind: Kind, code: int, sign: float) -> None:
    """The largest codes against the largest rows: 16-bit steps in between must hold them."""
    x = torch.full((3, 64), 127.0 * sign)
    y = kernels.block_linear(x, extreme(17, 64, kind, code))
    assert torch.equal(y, torch.full((3, 17), code * 127.0 * sign * 64))


@every
@kinds
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_row_is_seen_and_breaks_no_other(kernels: Kernels, kind: Kind, bad: float) -> None:
    """A NaN or an infinity must not come out as an ordinary number, nor touch the row beside it."""
    w, x = weight(33, 96, kind), inputs(11, 96)
    good = kernels.block_linear(x, w)
    x[4, 70] = bad
    y = kernels.block_linear(x, w)
    assert not y[4].isfinite().any()
    others = [i for i in range(11) if i != 4]
    assert torch.equal(y[others], good[others])


@every
def test_zero_and_tiny_rows(kernels: Kernels) -> None:
    """Nothing is divided by zero, and entries too small for a reciprocal count as zero."""
    w = weight(16, 64, "q8")
    x = torch.zeros(3, 64)
    x[1, 5], x[2, 5] = 1e-40, 1e-30
    y = kernels.block_linear(x, w)
    assert torch.equal(y[:2], torch.zeros(2, 16))
    assert y[2].isfinite().all()
    assert y[2].abs().max() > 0


@every
def test_rows_of_another_width_or_type_are_refused(kernels: Kernels) -> None:
    w = weight(16, 64, "q4")
    for x in (torch.zeros(2, 32), torch.zeros(2, 64, dtype=torch.float64), torch.zeros(64)):
        with pytest.raises(ValueError, match=r"rows \[M, 64\]"):
            kernels.block_linear(x, w)


@pytest.mark.skipif(not NATIVE, reason="the native kernels are not built")
def test_strided_rows_are_refused() -> None:
    """They would be read as if they were not."""
    with pytest.raises(ValueError, match="strided"):
        FAST.block_linear(torch.zeros(64, 2).t(), weight(16, 64, "q4"))


@every
def test_no_rows(kernels: Kernels) -> None:
    assert kernels.block_linear(torch.zeros(0, 64), weight(20, 64, "q4")).shape == (0, 20)
