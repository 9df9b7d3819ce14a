"""Blocks from GGUF are the file's numbers bit for bit; blocks from floats are close; joins and look-ups are exact."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from torch import Tensor

from specdec.quant.blocks import RECORD_BYTES, GgufKind, dequantize, from_float, from_gguf, join, rows

KINDS: list[GgufKind] = ["Q4_0", "Q4_1", "Q8_0"]
every = pytest.mark.parametrize("kind", KINDS)


def random_floats(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n * k))


def file_tensor(n: int, k: int, kind: GgufKind) -> tuple[Tensor, Tensor]:
    """The raw bytes as a GGUF file holds them, and the numbers that the gguf package reads from them."""
    code = gguf.GGMLQuantizationType[kind]
    raw = quants.quantize(random_floats(n, k).numpy(), code)
    return torch.from_numpy(raw), torch.from_numpy(quants.dequantize(raw, code))


@every
@pytest.mark.parametrize(("n", "k"), [(1, 32), (16, 32), (37, 96), (64, 160)])
def test_gguf_values_survive_packing(kind: GgufKind, n: int, k: int) -> None:
    raw, values = file_tensor(n, k, kind)
    weight = from_gguf(raw, kind)
    assert (weight.n, weight.k) == (n, k)
    assert torch.equal(dequantize(weight), values)


@every
def test_any_bytes_are_read_as_gguf_reads_them(kind: GgufKind) -> None:
    """All codes and all finite scales, not only those that a quantiser writes: subnormal, negative and large ones too."""
    size = RECORD_BYTES[kind]
    raw = torch.randint(0, 256, (40, 3 * size), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    halves = raw.view(40, 3, size)[..., : 4 if kind == "Q4_1" else 2]
    halves[..., 1::2] &= 0xEF if kind == "Q4_0" else 0xFB  # keeps exponents finite, and 8 times a Q4_0 scale within range
    values = torch.from_numpy(quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]))
    got = dequantize(from_gguf(raw, kind))
    finite = values.isfinite()
    assert finite.float().mean() > 0.9
    assert torch.equal(got[finite], values[finite])


@every
def test_rows_can_be_permuted_as_bytes(kind: GgufKind) -> None:
    """Rows are independent byte strings: reordering heads in the file's bytes reorders the weight's rows."""
    raw, values = file_tensor(48, 64, kind)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(3))
    assert torch.equal(dequantize(from_gguf(raw[order], kind)), values[order])


@every
def test_looked_up_rows_are_the_weights_own(kind: GgufKind) -> None:
    """A tied embedding needs no second table."""
    raw, values = file_tensor(37, 96, kind)
    ids = torch.tensor([36, 0, 17, 17, 31])
    weight = from_gguf(raw, kind)
    assert torch.equal(rows(weight, ids), values[ids])
    assert rows(weight, torch.tensor([], dtype=torch.int64)).shape == (0, 96)
    for bad in (-1, 37, 40):  # 40 lies in the padding of the last block of channels
        with pytest.raises(IndexError, match="with 37"):
            rows(weight, torch.tensor([0, bad]))


@pytest.mark.parametrize("first", ["Q4_0", "Q4_1"])
def test_joined_weights_keep_their_values(first: GgufKind) -> None:
    """Query, key and value below one another, even where one came as Q4_0 and another as Q4_1."""
    parts = [file_tensor(32, 64, first), file_tensor(16, 64, "Q4_1"), file_tensor(5, 64, "Q4_1")]
    joined = join([from_gguf(raw, kind) for (raw, _), kind in zip(parts, (first, "Q4_1", "Q4_1"), strict=True)])
    assert joined.n == 53
    assert torch.equal(dequantize(joined), torch.cat([values for _, values in parts]))


def test_weights_that_do_not_fit_are_not_joined() -> None:
    four, eight = from_float(random_floats(16, 64), "q4"), from_float(random_floats(16, 64), "q8")
    with pytest.raises(ValueError, match="one kind"):
        join([four, eight])
    with pytest.raises(ValueError, match="one kind and width"):
        join([four, from_float(random_floats(16, 32), "q4")])
    with pytest.raises(ValueError, match="multiples of 16"):
        join([from_float(random_floats(17, 64), "q4"), four])


def test_eight_bits_agree_with_gguf_and_four_bits_beat_it() -> None:
    """The quantiser from floats: q8 is Q8_0's rule up to ties, q4 loses less than Q4_1's plain range."""
    w = random_floats(64, 256)
    eight = dequantize(from_float(w, "q8"))
    assert (
        (eight - w).abs() <= w.view(64, -1, 32).abs().amax(-1, keepdim=True).expand(-1, -1, 32).reshape(64, 256) / 250
    ).all()
    code = gguf.GGMLQuantizationType.Q4_1
    plain = quants.dequantize(quants.quantize(w.numpy(), code), code)
    four = dequantize(from_float(w, "q4"))
    assert (four - w).norm() < 0.97 * float(np.linalg.norm(plain - w.numpy()))


@pytest.mark.parametrize("kind", ["q4", "q8"])
@pytest.mark.parametrize("value", [0.0, 0.5, -3.0])
def test_constant_groups_are_exact(kind: str, value: float) -> None:
    """A range of zero divides nothing."""
    w = torch.full((3, 32), value)
    assert torch.allclose(dequantize(from_float(w, kind)), w, rtol=1e-3)  # type: ignore[arg-type]


def test_large_weights_are_quantised_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    w = random_floats(50, 64)
    whole = from_float(w, "q4")
    monkeypatch.setattr("specdec.quant.blocks.QUANTISED_AT_A_TIME", 64 * 7)
    assert torch.equal(from_float(w, "q4").data, whole.data)


def test_what_cannot_be_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        from_float(torch.zeros(4, 40), "q4")
    with pytest.raises(ValueError, match="finite"):
        from_float(torch.full((1, 32), float("nan")), "q8")
    with pytest.raises(ValueError, match="finite"):
        from_float(torch.full((1, 32), 1e9), "q4")
    with pytest.raises(ValueError, match="multiple of 18"):
        from_gguf(torch.zeros(4, 20, dtype=torch.uint8), "Q4_0")
    huge = torch.zeros(1, 18, dtype=torch.uint8)
    huge[0, :2] = torch.tensor([9000.0]).half().view(torch.uint8)
    with pytest.raises(ValueError, match="8188"):
        from_gguf(huge, "Q4_0")
