"""How keys and values are held: errors are bounded entry by entry, and what a row becomes depends on that row alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdec.config import KV_FORMATS, ConfigError
from specdec.kv import codec

CODES = pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=codec.name_of)
MOST = {torch.int8: 127, torch.uint8: 7}


def rows(n: int, hd: int, seed: int = 0) -> Tensor:
    """Rows [n, 3, hd] of very different sizes, some entries far beyond the others."""
    noise = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, hd, generator=noise) * 10 ** (8 * torch.rand(n, 3, 1, generator=noise) - 4)
    return x * torch.where(torch.rand(x.shape, generator=noise) < 0.05, 30, 1)


@CODES
@pytest.mark.parametrize("hd", [16, 48, 64, 80, 128])
def test_an_entry_is_off_by_half_its_scale_at_most(dtype: torch.dtype, hd: int) -> None:
    """And a scale exceeds the largest entry over the largest code by the rounding of a bfloat16 at most."""
    x = rows(200, hd)
    parts = codec.encode(x, dtype)
    scale = parts[1].float().repeat_interleave(codec.group_of(hd), -1)
    assert ((codec.decode(parts) - x).abs() <= scale / 2 * (1 + 2**-20)).all()
    largest = x.unflatten(-1, (-1, codec.group_of(hd))).abs().amax(-1)
    ratio = parts[1].float() * MOST[dtype] / largest
    assert (ratio >= 1 - 2**-20).all()
    assert (ratio <= 1 + 2**-7).all()


@CODES
def test_what_a_row_becomes_depends_on_it_alone(dtype: torch.dtype) -> None:
    """Row by row, head by head, in bulk, or as part of a larger tensor: the same bytes."""
    x = rows(50, 64)
    together = codec.encode(x, dtype)
    for i in (0, 7, 49):
        for h in range(3):
            for part, alone in zip(together, codec.encode(x[i, h].clone(), dtype), strict=True):
                assert torch.equal(part[i, h], alone)
    for part, turned in zip(together, codec.encode(x.flip(0), dtype), strict=True):
        assert torch.equal(part, turned.flip(0))


@CODES
def test_rows_that_are_zero_tiny_or_broken(dtype: torch.dtype) -> None:
    """Zeros stay zeros; what is too small for a scale becomes zero; one NaN or infinity spoils its group and no other."""
    x = torch.ones(5, 64)
    x[0], x[1], x[2, 3], x[3, 40], x[4, 0] = 0, 1e-37, torch.inf, torch.nan, -torch.inf
    got = codec.decode(codec.encode(x, dtype))
    assert not got[:2].any()
    for row, (bad, good) in zip(got[2:], [(slice(0, 32), slice(32, 64)), (slice(32, 64), slice(0, 32))] * 2, strict=False):
        assert row[bad].isnan().all()
        assert torch.allclose(row[good], torch.ones(32), rtol=1e-2)


def test_every_code_of_four_bits_comes_back() -> None:
    """Both halves of each byte, negative ones too."""
    x = torch.arange(-7.0, 9.0).clamp(max=7).repeat(3, 2)  # [3, 32], the scale is 1
    parts = codec.encode(x, torch.uint8)
    assert parts[0].shape == (3, 16)
    assert torch.equal(codec.decode(parts), x)


@CODES
@pytest.mark.parametrize("hd", [16, 64, 80])
def test_parts_of_a_block_cover_each_byte_once(dtype: torch.dtype, hd: int) -> None:
    """Views by slot: codes and scales together are all the bytes of a pool."""
    of_keys, of_values = codec.block_shapes(dtype, hd)
    for shape, split in ((of_keys, codec.key_parts), (of_values, codec.value_parts)):
        blocks = torch.zeros(2, 3, *shape, dtype=dtype)
        assert blocks[0, 0].nbytes == 16 * codec.bytes_of_row(dtype, hd)
        codes, scales = split(blocks, hd)
        assert codes.shape[:3] == scales.shape[:3] == (2, 16, 3)
        codes.fill_(1), scales.view(torch.int16).fill_(0x0101)
        assert (blocks == 1).all()


def test_bytes_of_a_token() -> None:
    """The default model: 30 layers, 3 key heads of 64. int8 takes 0.53 of bf16's, int4 0.28."""
    sizes = {name: 2 * 30 * 3 * codec.bytes_of_row(dtype, 64) for name, dtype in codec.DTYPES.items()}
    assert sizes == {"fp32": 46_080, "bf16": 23_040, "int8": 12_240, "int4": 6_480}


def test_formats_are_those_of_the_settings() -> None:
    assert ("auto", *codec.DTYPES) == KV_FORMATS
    assert [codec.name_of(dtype) for dtype in codec.DTYPES.values()] == list(codec.DTYPES)


@CODES
def test_heads_that_cannot_be_held_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"multiple of 16.*have 24.*choose kv_format bf16"):
        codec.check_head(dtype, 24)
    codec.check_head(dtype, 48)
    codec.check_head(torch.bfloat16, 24)
