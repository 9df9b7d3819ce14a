"""The dense product: float32 and bfloat16 weights, summed over k in order whatever the number of rows."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools

import pytest
import torch
from native import ALL, FAST, NATIVE
from torch import Tensor

from specdec.kernels import set_threads
from specdec.kernels.base import Kernels
from specdec.quant.linear import pack_dense

every = pytest.mark.parametrize("kernels", ALL, ids=lambda kernels: kernels.name)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SHAPES = [(1, 1), (15, 7), (16, 33), (70, 64), (129, 31), (64, 576)]


def pair(rows: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + 10 * n + 100 * k)
    return torch.randn(rows, k, generator=generator), torch.randn(n, k, generator=generator)


@every
@dtypes
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", [1, 4, 5, 6, 11])
def test_equals_the_product_in_float64(kernels: Kernels, dtype: torch.dtype, n: int, k: int, rows: int) -> None:
    x, w = pair(rows, n, k)
    y = kernels.dense_linear(x, pack_dense(w, dtype)).double()
    exact, size = x.double() @ w.to(dtype).double().t(), x.double().abs() @ w.double().abs().t()
    assert ((y - exact).abs() / size).max() < 3e-6


@every
@dtypes
@pytest.mark.parametrize(("n", "k"), [(16, 32), (33, 7), (97, 65)])
def test_a_row_does_not_see_the_rows_beside_it(kernels: Kernels, dtype: torch.dtype, n: int, k: int) -> None:
    """Bitwise, for every number of rows from 1 to 33 and at another place among them."""
    x, w = pair(33, n, k)
    packed = pack_dense(w, dtype)
    alone = torch.cat([kernels.dense_linear(x[i : i + 1], packed) for i in range(33)])
    assert all(torch.equal(kernels.dense_linear(x[:m], packed), alone[:m]) for m in range(1, 34))
    assert torch.equal(kernels.dense_linear(x.flip(0).contiguous(), packed), alone.flip(0))


@pytest.mark.skipif(not NATIVE, reason="the native kernels are not built")
@dtypes
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 40), (70, 9)])
def test_native_sums_in_order_on_every_instruction_set(dtype: torch.dtype, n: int, k: int) -> None:
    """The documented arithmetic, step by step and to the last bit: y = fma(w[k], x[k], y)."""
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.argtypes, fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float
    x, w = pair(2, n, k)
    packed, rounded = pack_dense(w, dtype), w.to(dtype).float().tolist()
    y = [
        [functools.reduce(lambda y, pair: fmaf(*pair, y), zip(row, weights, strict=True), 0.0) for weights in rounded]
        for row in x.tolist()
    ]
    for kernels in NATIVE:
        assert torch.equal(kernels.dense_linear(x, packed), torch.tensor(y))


@pytest.mark.skipif(not NATIVE, reason="the native kernels are not built")
@dtypes
def test_threads_do_not_change_bits(dtype: torch.dtype) -> None:
    x, w = pair(9, 1500, 128)
    packed = pack_dense(w, dtype)
    before = torch.get_num_threads()
    try:
        set_threads(1)
        one = FAST.dense_linear(x, packed)
        set_threads(2)
        two = FAST.dense_linear(x, packed)
    finally:
        set_threads(before)
    assert torch.equal(one, two)


@every
def test_a_broken_row_is_seen_and_breaks_no_other(kernels: Kernels) -> None:
    x, w = pair(7, 40, 24)
    packed = pack_dense(w, torch.float32)
    good = kernels.dense_linear(x, packed)
    x[2, 3] = float("nan")
    y = kernels.dense_linear(x, packed)
    assert y[2].isnan().all()
    others = [0, 1, 3, 4, 5, 6]
    assert torch.equal(y[others], good[others])


@every
def test_rows_of_another_width_are_refused(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match=r"rows \[M, 24\]"):
        kernels.dense_linear(torch.zeros(2, 25), pack_dense(torch.zeros(8, 24), torch.float32))
