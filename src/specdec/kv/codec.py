"""How rows of keys and values are held: as floats, or as small integers in groups that share a scale.

A quantised row is made from that row of one head alone, so what the pool holds depends neither on the rows that were computed
beside it nor on when it was written: bursts, chunks, trees and preemption leave the same bytes. Groups have 32 entries, 16
where a head is no multiple of 32. With M = 127 (int8) or 7 (int4), in float32:

    scale = max|x| / M, rounded up to bfloat16       code = round(x / scale)       entry = scale * code

An entry is off by at most half the scale. A group whose largest entry is below 2^-120 counts as zero; one that holds an
infinity or a NaN has scale NaN. kernels/csrc/kv.h has the layout of a block, and the native form of this.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specdec.config import BLOCK_SIZE, ConfigError

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "int4": torch.uint8,
}
"""What the storage of a format is made of; int4 keeps two codes in a byte."""

KINDS: Mapping[torch.dtype, int] = {dtype: number for number, dtype in enumerate(DTYPES.values())}
"""As kernels/csrc/kv.h numbers them."""

_LARGEST: Mapping[torch.dtype, int] = {torch.int8: 127, torch.uint8: 7}
_HALF = BLOCK_SIZE // 2
_LEAST = 2.0**-120


def name_of(dtype: torch.dtype) -> str:
    """The format whose storage has this type."""
    return next(name for name, own in DTYPES.items() if own is dtype)


def quantised(dtype: torch.dtype) -> bool:
    return dtype in _LARGEST


def group_of(head_dim: int) -> int:
    """Entries of a head that share a scale."""
    return 16 if head_dim % 32 else 32


def check_head(dtype: torch.dtype, head_dim: int) -> None:
    """Raise ConfigError where rows of such heads cannot be held so."""
    if quantised(dtype) and head_dim % 16:
        raise ConfigError(
            f"kv_format {name_of(dtype)} takes heads of a multiple of 16 entries, and this model's have {head_dim}: "
            "choose kv_format bf16 or fp32"
        )


def block_shapes(dtype: torch.dtype, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of a block of one head's keys, and of its values. That of codes is a number of bytes."""
    if not quantised(dtype):
        return (head_dim, BLOCK_SIZE), (BLOCK_SIZE, head_dim)
    n_bytes = BLOCK_SIZE * bytes_of_row(dtype, head_dim)
    return (n_bytes,), (n_bytes,)


def bytes_of_row(dtype: torch.dtype, head_dim: int) -> int:
    """Of one head's key or value of one token, its scales included."""
    if not quantised(dtype):
        return head_dim * dtype.itemsize
    return _code_bytes(dtype, head_dim) + 2 * (head_dim // group_of(head_dim))


def key_parts(keys: Tensor, head_dim: int) -> tuple[Tensor, ...]:
    """Views of blocks [..., blocks, KV, block] of keys by slot, each [..., blocks, 16, KV, x]: floats, or codes and scales."""
    if not quantised(keys.dtype):
        return (keys.movedim(-1, -3),)
    codes, scales = _split(keys, head_dim)
    return codes.view(*codes.shape[:-1], -1, BLOCK_SIZE).movedim(-1, -3), scales


def value_parts(values: Tensor, head_dim: int) -> tuple[Tensor, ...]:
    """The same of blocks of values."""
    if not quantised(values.dtype):
        return (values.movedim(-2, -3),)
    codes, scales = _split(values, head_dim)
    return codes.view(*codes.shape[:-1], BLOCK_SIZE, -1).movedim(-2, -3), scales


def encode(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows x [..., hd] float32 in the parts that are held of them: floats, or codes [..., bytes] and scales [..., groups]."""
    if not quantised(dtype):
        return (x.to(dtype),)
    most = _LARGEST[dtype]
    grouped = x.view(*x.shape[:-1], -1, group_of(x.shape[-1]))  # [..., groups, group]
    largest = grouped.abs().amax(-1)  # a NaN is the largest of all
    finite = largest < torch.inf
    usable = finite & (largest >= _LEAST)
    bits = (torch.where(usable, largest / most, 0).view(torch.int32) + 0xFFFF) & ~0xFFFF
    scale = bits.view(torch.float32)  # [..., groups], of bfloat16's values
    inverse = torch.where(usable, 1 / scale, 0)
    codes = torch.where(usable[..., None], torch.round(grouped * inverse[..., None]), 0).to(torch.int8).flatten(-2)
    scales = torch.where(finite, scale, torch.nan).to(torch.bfloat16)
    return (_pack(codes) if dtype is torch.uint8 else codes), scales


def decode(parts: tuple[Tensor, ...]) -> Tensor:
    """The entries [..., hd] float32 that parts stand for; exact, since a scale has 8 bits and a code 7."""
    if len(parts) == 1:
        return parts[0].float()
    codes, scales = parts
    if codes.dtype is torch.uint8:
        codes = _unpack(codes)
    grouped = codes.float().view(*scales.shape, -1)  # [..., groups, group]
    return (grouped * scales.float()[..., None]).flatten(-2)


def _code_bytes(dtype: torch.dtype, head_dim: int) -> int:
    """Of the codes of a row."""
    return head_dim if dtype is torch.int8 else head_dim // 2


def _split(blocks: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Codes [..., blocks, KV, bytes] of blocks, and their scales by slot, [..., blocks, 16, KV, groups]."""
    n_codes = BLOCK_SIZE * _code_bytes(blocks.dtype, head_dim)
    scales = blocks[..., n_codes:].view(torch.bfloat16)  # [..., KV, groups * 16]
    return blocks[..., :n_codes], scales.view(*scales.shape[:-1], -1, BLOCK_SIZE).movedim(-1, -3)


def _pack(codes: Tensor) -> Tensor:
    """int8 [..., hd] -> uint8 [..., hd / 2]: byte 8 i + j has entry 16 i + j in its low half, 16 i + 8 + j in its high half."""
    pairs = codes.view(*codes.shape[:-1], -1, 2, _HALF)
    return ((pairs[..., 0, :] & 15) | (pairs[..., 1, :] << 4)).view(torch.uint8).flatten(-2)


def _unpack(packed: Tensor) -> Tensor:
    """The inverse of ``_pack``."""
    signed = packed.view(torch.int8).view(*packed.shape[:-1], -1, _HALF)
    return torch.stack([(signed << 4) >> 4, signed >> 4], -2).flatten(-3)
