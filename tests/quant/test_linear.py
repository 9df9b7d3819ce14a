"""The matrices that models see: one call whatever the precision, joined parts, biases, tied tables."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import pytest
import torch
from gguf import quants
from torch import Tensor

from specdec.config import Precision
from specdec.kernels import select
from specdec.kernels.portable import PortableKernels
from specdec.quant.blocks import GgufKind
from specdec.quant.linear import BlockLinear, DenseLinear, DeviceLinear, Embedding, Linear, StackedLinear
from specdec.quant.make import make_linear

CPU = torch.device("cpu")
KERNELS = PortableKernels()


@dataclass(frozen=True)
class InFile:
    kind: GgufKind
    raw: Tensor


def floats(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n + k))


def in_file(n: int, k: int, kind: GgufKind) -> tuple[InFile, Tensor]:
    code = gguf.GGMLQuantizationType[kind]
    raw = quants.quantize(floats(n, k).numpy(), code)
    return InFile(kind, torch.from_numpy(raw)), torch.from_numpy(quants.dequantize(raw, code))


def table(linear: Linear) -> Tensor:
    return linear.rows(torch.arange(linear.n))


@pytest.mark.parametrize(("precision", "close"), [("fp32", 1e-6), ("bf16", 5e-3), ("q8", 0.01), ("q4", 0.1), ("auto", 1e-6)])
@pytest.mark.parametrize("n", [16, 37])
def test_every_precision_multiplies(precision: Precision, close: float, n: int) -> None:
    """Within what the precision's rounding allows."""
    w, x = floats(n, 96), floats(3, 96)
    linear = make_linear([w], precision, KERNELS, CPU, None)
    y = x @ w.t()
    assert (linear.n, linear.k) == (n, 96)
    assert (linear(x) - y).norm() / y.norm() < close
    assert (table(linear) - w).norm() / w.norm() < close


def test_auto_takes_weights_as_they_come() -> None:
    """Blocks stay blocks, bfloat16 stays bfloat16, everything else is float32."""
    file, values = in_file(32, 64, "Q4_0")
    blocks = make_linear([file], "auto", KERNELS, CPU, None)
    assert isinstance(blocks, BlockLinear)
    assert torch.equal(table(blocks), values)
    for given, kept in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (torch.float32, torch.float32)):
        dense = make_linear([floats(16, 8).to(given)], "auto", KERNELS, CPU, None)
        assert isinstance(dense, DenseLinear)
        assert dense.weight.data.dtype is kept
        assert torch.equal(table(dense), floats(16, 8).to(given).float())


def test_blocks_refuses_floats() -> None:
    with pytest.raises(ValueError, match="choose auto, q4 or q8"):
        make_linear([floats(16, 64)], "blocks", KERNELS, CPU, None)


@pytest.mark.parametrize(("precision", "kind", "same"), [("q4", "Q4_1", True), ("q8", "Q8_0", True), ("q8", "Q4_1", False)])
def test_blocks_of_the_right_kind_are_not_rounded_again(precision: Precision, kind: GgufKind, same: bool) -> None:
    file, values = in_file(16, 64, kind)
    linear = make_linear([file], precision, KERNELS, CPU, None)
    assert torch.equal(table(linear), values) == same
    assert (table(linear) - values).norm() / values.norm() < 0.01


def test_fp32_reads_blocks_back_exactly() -> None:
    file, values = in_file(20, 64, "Q4_1")
    assert torch.equal(table(make_linear([file], "fp32", KERNELS, CPU, None)), values)


def test_parts_become_one_matrix_where_they_can() -> None:
    """Three calls become one; where encodings differ the parts stay apart, and the result is the same."""
    same = [in_file(32, 64, "Q4_1"), in_file(16, 64, "Q4_0"), in_file(16, 64, "Q4_1")]
    mixed = [in_file(32, 64, "Q4_1"), in_file(16, 64, "Q8_0"), in_file(16, 64, "Q8_0")]
    ragged = [in_file(20, 64, "Q4_1"), in_file(16, 64, "Q4_1")]
    x = floats(5, 64)
    for parts, type_ in ((same, BlockLinear), (mixed, StackedLinear), (ragged, StackedLinear)):
        whole = make_linear([file for file, _ in parts], "auto", KERNELS, CPU, None)
        alone = [make_linear([file], "auto", KERNELS, CPU, None) for file, _ in parts]
        assert isinstance(whole, type_)
        assert torch.equal(whole(x), torch.cat([linear(x) for linear in alone], 1))
        assert torch.equal(table(whole), torch.cat([values for _, values in parts]))
        assert whole.n_bytes == sum(linear.n_bytes for linear in alone)


def test_parts_of_other_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="same width"):
        make_linear([floats(16, 64), floats(16, 32)], "fp32", KERNELS, CPU, None)


def test_a_bias_is_added_last() -> None:
    w, b, x = floats(16, 32), floats(1, 16)[0], floats(2, 32)
    plain = make_linear([w], "fp32", KERNELS, CPU, None)
    biased = make_linear([w], "fp32", KERNELS, CPU, b)
    assert torch.equal(biased(x), plain(x) + b)
    assert torch.equal(table(biased), w)
    with pytest.raises(ValueError, match="bias"):
        make_linear([w], "fp32", KERNELS, CPU, b[:-1])


def test_an_embedding_over_the_output_matrix_takes_no_memory_of_its_own() -> None:
    file, values = in_file(50, 64, "Q8_0")
    head = make_linear([file], "auto", KERNELS, CPU, None)
    embedding = Embedding(head)
    ids = torch.tensor([49, 0, 3])
    assert torch.equal(embedding(ids), values[ids])
    assert embedding.shares(head)
    assert not embedding.shares(make_linear([file], "auto", KERNELS, CPU, None))
    assert embedding.n_bytes == 64 // 32 * 64 * 34  # 50 rows padded to 64


@pytest.mark.parametrize("precision", ["fp32", "q8"])
def test_an_id_outside_the_table_is_an_error(precision: Precision) -> None:
    """Also one that lies in the padding."""
    linear = make_linear([floats(20, 32)], precision, KERNELS, CPU, None)
    for bad in (-1, 20):
        with pytest.raises(IndexError, match="with 20"):
            linear.rows(torch.tensor([bad]))


def test_other_devices_multiply_in_torch() -> None:
    linear = make_linear([floats(16, 32)], "bf16", KERNELS, torch.device("meta"), None)
    assert isinstance(linear, DeviceLinear)
    assert linear(torch.zeros(3, 32, device="meta")).shape == (3, 16)


def every_linear() -> list[Linear]:
    """One of each kind, with channels that do not fill the last block."""
    files = [in_file(32, 64, "Q4_1")[0], in_file(21, 64, "Q8_0")[0]]
    return [
        make_linear([floats(53, 64)], "q4", KERNELS, CPU, None),
        make_linear([floats(53, 64)], "q8", KERNELS, CPU, None),
        make_linear([files[0]], "auto", KERNELS, CPU, None),
        make_linear([floats(53, 64)], "bf16", KERNELS, CPU, None),
        make_linear([floats(53, 64)], "fp32", KERNELS, CPU, None),
        make_linear(files, "auto", KERNELS, CPU, None),
        make_linear([floats(53, 64)], "q8", KERNELS, CPU, floats(1, 53)[0]),
        DeviceLinear(floats(53, 64)),
    ]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("i", range(8))
def test_some_outputs_alone_give_the_same_bits(i: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft vocabulary: neither the order nor the new neighbours of a channel change what it gives."""
    if native:
        monkeypatch.setattr(f"{__name__}.KERNELS", select(CPU))
    linear = every_linear()[i]
    if native and isinstance(linear, DeviceLinear):
        pytest.skip("torch's own product promises no bits")
    x = floats(5, 64)
    for ids in ([31, 0, 17, 5, 18, 30, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 29], [linear.n - 1], [3, 20, linear.n - 1, 2]):
        some = linear.subset(torch.tensor(ids))
        assert type(some) is type(linear) or isinstance(linear, StackedLinear)
        assert (some.n, some.k) == (len(ids), 64)
        if isinstance(linear, DeviceLinear):
            assert torch.allclose(some(x), linear(x)[:, ids], atol=1e-5)
        else:
            assert torch.equal(some(x), linear(x)[:, ids])
        assert torch.equal(table(some), table(linear)[ids])


@pytest.mark.parametrize("i", range(8))
def test_outputs_that_are_not_there_cannot_be_taken(i: int) -> None:
    """Not even those of the padding; and a matrix without outputs is none."""
    linear = every_linear()[i]
    for bad in (-1, linear.n):
        with pytest.raises(IndexError, match=f"with {linear.n}"):
            linear.subset(torch.tensor([0, bad]))
    with pytest.raises(ValueError, match="at least one output"):
        linear.subset(torch.tensor([], dtype=torch.int64))
