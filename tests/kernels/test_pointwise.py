"""The row-wise passes: right by their definitions at every width, and blind to the rows beside a row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from native import ALL, NATIVE
from torch import Tensor

from specdec.kernels import set_threads
from specdec.kernels.base import Kernels

every = pytest.mark.parametrize("kernels", ALL, ids=lambda kernels: kernels.name)

WIDTHS = [1, 7, 16, 24, 40, 576, 1000]


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def norm(kernels: Kernels, x: Tensor) -> Tensor:
    return kernels.rms_norm(x, noise(x.shape[-1], seed=1), 1e-5)


def gated(kernels: Kernels, x: Tensor) -> Tensor:
    return kernels.silu_mul(torch.cat([x, x.flip(1)], 1))


def rotated(kernels: Kernels, x: Tensor) -> Tensor:
    heads = torch.cat([x, -x, 2 * x, 3 * x], 1).view(len(x), 2, -1)
    kernels.rope(heads, x, x.flip(1))  # any numbers do for cos and sin here
    return heads


@every
@pytest.mark.parametrize("d", WIDTHS)
def test_rms_norm(kernels: Kernels, d: int) -> None:
    x, weight = noise(5, d, scale=3), noise(d, seed=1)
    wide = x.double()
    expected = wide / torch.sqrt(wide.square().mean(1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), expected.float(), rtol=2e-6, atol=1e-7)


@every
def test_rms_norm_of_heads_is_that_of_rows(kernels: Kernels) -> None:
    x, weight = noise(3, 4, 24), noise(24, seed=1)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-6), kernels.rms_norm(x.view(12, 24), weight, 1e-6).view(3, 4, 24))


@every
@pytest.mark.parametrize("f", WIDTHS)
def test_silu_mul(kernels: Kernels, f: int) -> None:
    gate, up = noise(3, f, scale=8), noise(3, f, seed=1)
    expected = (torch.nn.functional.silu(gate.double()) * up).float()
    torch.testing.assert_close(kernels.silu_mul(torch.cat([gate, up], 1)), expected, rtol=1e-6, atol=1e-30)


@every
def test_silu_mul_at_the_edges(kernels: Kernels) -> None:
    """Nothing overflows up to 1e4, in either tail, and NaN stays NaN instead of becoming a number."""
    gate = torch.tensor([[1e4, -1e4, 100, -100, 88.4, -88.4, -87.2, 0.0, -0.0, torch.nan, 1e-30, torch.inf]])
    got = kernels.silu_mul(torch.cat([gate, torch.ones_like(gate)], 1))
    expected = torch.nn.functional.silu(gate.double()).float()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-30, equal_nan=True)
    up = torch.full_like(gate, torch.nan)
    assert kernels.silu_mul(torch.cat([torch.ones_like(gate), up], 1)).isnan().all()


@every
@pytest.mark.parametrize("hd", [2, 8, 24, 64, 80, 256])
def test_rope(kernels: Kernels, hd: int) -> None:
    """The two halves turn by the angle, as a complex product says; rows may be slices of something wider."""
    x, angles = noise(5, 3, hd), noise(5, hd // 2, seed=1, scale=10)
    z = torch.view_as_complex(torch.stack(x.double().chunk(2, -1), -1)) * torch.exp(1j * angles.double())[:, None]
    expected = torch.cat([z.real, z.imag], -1).float()
    wide = noise(5, 3 * hd + 5, seed=2)
    wide[:, 2 : 2 + 3 * hd] = x.flatten(1)
    before = wide.clone()
    kernels.rope(wide[:, 2 : 2 + 3 * hd].unflatten(1, (3, hd)), angles.cos(), angles.sin())
    torch.testing.assert_close(wide[:, 2 : 2 + 3 * hd], expected.flatten(1), rtol=1e-5, atol=1e-6)
    assert torch.equal(wide[:, :2], before[:, :2])
    assert torch.equal(wide[:, 2 + 3 * hd :], before[:, 2 + 3 * hd :])


@every
@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("operation", [norm, gated, rotated])
def test_company_changes_no_bit(kernels: Kernels, operation: Callable[[Kernels, Tensor], Tensor], d: int) -> None:
    """Each of up to 17 rows equals itself alone, wherever it stands."""
    x = noise(17, d)
    alone = torch.cat([operation(kernels, row[None].clone()) for row in x])
    for m in (1, 2, 3, 8, 16, 17):
        assert torch.equal(operation(kernels, x[:m].clone()), alone[:m]), f"{m} rows"
    assert torch.equal(operation(kernels, x.flip(0).contiguous()).flip(0), alone)


@pytest.mark.parametrize("operation", [norm, gated, rotated])
def test_threads_and_instruction_sets_change_no_bit(operation: Callable[[Kernels, Tensor], Tensor]) -> None:
    x, before, results = noise(400, 1000), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            set_threads(threads)
            results += [operation(kernels, x) for kernels in NATIVE]
    finally:
        set_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("kernels", NATIVE, ids=lambda kernels: kernels.name)
def test_tensors_that_do_not_fit_are_refused(kernels: Kernels) -> None:
    x = noise(4, 16)
    wrong: list[Callable[[], object]] = [
        lambda: kernels.rms_norm(x.double(), noise(16), 1e-5),
        lambda: kernels.rms_norm(x.t(), noise(4), 1e-5),
        lambda: kernels.rms_norm(x, noise(15), 1e-5),
        lambda: kernels.silu_mul(x[:, ::2]),
        lambda: kernels.silu_mul(noise(2, 7)),
        lambda: kernels.rope(x.view(4, 2, 8), noise(4, 8), noise(4, 8)),
        lambda: kernels.rope(x.view(4, 2, 8), noise(3, 4), noise(3, 4)),
        lambda: kernels.rope(x.view(4, 8, 2).transpose(1, 2), noise(4, 4), noise(4, 4)),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match=r"must|needs"):
            call()
