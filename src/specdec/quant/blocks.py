"""Weights in groups of 32: taken bit for bit from GGUF's Q4_0, Q4_1 and Q8_0, or made from floats; packed, joined, read back.

A GGUF row of K weights is K / 32 *records*: Q4_0 is a float16 scale and 16 bytes of nibbles, Q4_1 the same with a float16
minimum after the scale, Q8_0 a float16 scale and 32 signed bytes. Packing moves bytes (kernels/csrc/blocks.h has the layout)
and computes nothing, except that Q4_0 gets its minimum written out as -8 times its scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from specdec.kernels.base import GROUP, LANES, BlockWeight

GgufKind = Literal["Q4_0", "Q4_1", "Q8_0"]
RECORD_BYTES: dict[GgufKind, int] = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
QUANTISED_AT_A_TIME = 2**21
"""Weights that are turned from floats into blocks in one go, which bounds the memory that it takes."""


def from_gguf(raw: Tensor, kind: GgufKind) -> BlockWeight:
    """Pack a GGUF tensor as it lies in the file.

    Args:
        raw: uint8 [N, K / 32 * bytes of a record] on the CPU.
        kind: GGUF's name of the encoding.

    Raises:
        ValueError: the width is no whole number of records, or a Q4_0 scale is too large for its minimum to be a float16.
    """
    size = RECORD_BYTES[kind]
    if raw.dtype is not torch.uint8 or raw.dim() != 2 or raw.shape[1] == 0 or raw.shape[1] % size:
        raise ValueError(f"a {kind} tensor is uint8 [N, a multiple of {size}], got {raw.dtype} {list(raw.shape)}")
    n, groups = raw.shape[0], raw.shape[1] // size
    records = raw.view(n, groups, size)
    scale = records[..., :2]  # [N, G, 2] bytes of a float16
    if kind == "Q8_0":
        return _pack(records[..., 2:], [scale], "q8")
    if kind == "Q4_1":
        return _pack(records[..., 4:], [scale, records[..., 2:4]], "q4")
    minimum = scale.contiguous().view(torch.float16).float() * -8
    if bool((minimum.isfinite() & (minimum.abs() > torch.finfo(torch.float16).max)).any()):
        raise ValueError("a Q4_0 scale is above 8188: 8 times it does not fit float16; convert the tensor to Q4_1")
    return _pack(records[..., 2:], [scale, minimum.half().view(torch.uint8)], "q4")


def from_float(weight: Tensor, kind: Literal["q4", "q8"]) -> BlockWeight:
    """Quantise a float weight [N, K].

    ``q8``: d = max|w| / 127. ``q4``: code = round((w - m) / d) with d and m fitted to the group by least squares, starting
    from its range, and kept where that lowers the squared error.

    Raises:
        ValueError: K is no multiple of 32, an entry is not finite, or an entry is beyond float16.
    """
    _check_width(weight)
    step = max(1, QUANTISED_AT_A_TIME // weight.shape[1])
    parts = [_quantise(part, kind) for part in torch.split(weight.detach(), step)]
    codes, *halves = (torch.cat(column) for column in zip(*parts, strict=True))
    return _pack(codes, halves, kind)


def _quantise(weight: Tensor, kind: Literal["q4", "q8"]) -> tuple[Tensor, ...]:
    """Some rows [n, K] -> codes uint8 [n, G, 16 or 32] and the float16s d (and m) as uint8 [n, G, 2]."""
    w = weight.to("cpu", torch.float32).reshape(weight.shape[0], -1, GROUP)  # [n, G, 32]
    if not bool((w.abs() <= torch.finfo(torch.float16).max).all()):
        raise ValueError("a weight to be quantised must be finite and within float16")
    if kind == "q8":
        d = (w.abs().amax(-1, keepdim=True) / 127).half()  # [n, G, 1]
        codes = (w * _inverse(d)).round_().clamp_(-127, 127).to(torch.int8)
        return codes.view(torch.uint8), d.view(torch.uint8)
    d, m, fours = _fit(w)
    nibbles = fours[..., :16] | fours[..., 16:] << 4  # GGUF's pairing: weight i below weight i + 16
    return nibbles, d.view(torch.uint8), m.view(torch.uint8)


def _fit(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Groups [N, G, 32] -> d, m [N, G, 1] float16 and codes [N, G, 32] uint8 of 0..15."""
    low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    d, m = ((high - low) / 15).half(), low.half()
    codes = _codes(w, d, m)
    error = _error(w, d, m, codes)
    for _ in range(3):  # the best d, m for these codes, then the best codes for those
        x = codes - codes.mean(-1, keepdim=True)
        slope = (x * w).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True).clamp(min=1e-30)
        fitted_d = slope.clamp(min=0).half()
        fitted_m = (w.mean(-1, keepdim=True) - fitted_d.float() * codes.mean(-1, keepdim=True)).half()
        fitted = _codes(w, fitted_d, fitted_m)
        fitted_error = _error(w, fitted_d, fitted_m, fitted)
        better = fitted_error < error
        d, m = torch.where(better, fitted_d, d), torch.where(better, fitted_m, m)
        codes, error = torch.where(better, fitted, codes), torch.minimum(fitted_error, error)
    return d, m, codes.to(torch.uint8)


def _inverse(d: Tensor) -> Tensor:
    """1 / d, and 0 for 0."""
    d = d.float()
    return torch.where(d == 0, 0.0, 1 / d)


def _codes(w: Tensor, d: Tensor, m: Tensor) -> Tensor:
    return ((w - m.float()) * _inverse(d)).round_().clamp_(0, 15)


def _error(w: Tensor, d: Tensor, m: Tensor, codes: Tensor) -> Tensor:
    return (d.float() * codes + m.float() - w).square().sum(-1, keepdim=True)


def _check_width(weight: Tensor) -> None:
    if weight.dim() != 2 or weight.shape[1] == 0 or weight.shape[1] % GROUP:
        raise ValueError(
            f"block weights need [N, K] with K a multiple of {GROUP}, got {list(weight.shape)}: use precision bf16 or fp32"
        )


def _pack(codes: Tensor, halves: list[Tensor], kind: Literal["q4", "q8"]) -> BlockWeight:
    """codes uint8 [N, G, 16 or 32], halves: float16s as uint8 [N, G, 2] each -> the interleaved weight."""
    n, groups, width = codes.shape
    blocks = -(-n // LANES)
    data = torch.zeros(blocks, groups, LANES * (width + 2 * len(halves)), dtype=torch.uint8)
    quads = data[..., : LANES * width].view(blocks, groups, width // 4, LANES, 4)
    places = [(quads.permute(0, 3, 1, 2, 4), codes.view(n, groups, width // 4, 4))]  # [blocks, 16, G, quads, 4]
    for i, half in enumerate(halves):
        start = LANES * (width + 2 * i)
        place = data[..., start : start + 2 * LANES].view(blocks, groups, LANES, 2).permute(0, 2, 1, 3)  # [blocks, 16, G, 2]
        places.append((place, half))
    whole = n // LANES * LANES
    for place, source in places:
        place[: whole // LANES] = source[:whole].view(whole // LANES, LANES, *source.shape[1:])
        if whole < n:
            place[-1, : n - whole] = source[whole:]
    return BlockWeight(data, kind, n, groups * GROUP)


def join(weights: Sequence[BlockWeight]) -> BlockWeight:
    """Several weights over the same inputs, one below the other, exactly: [N1 + N2 + ..., K].

    Raises:
        ValueError: kinds or widths differ, or a weight that is not the last has channels that are no multiple of 16.
    """
    first = weights[0]
    if len({(w.kind, w.k) for w in weights}) > 1:
        raise ValueError(f"only weights of one kind and width can be joined, got {[(w.kind, w.k) for w in weights]}")
    if ragged := [w.n for w in weights[:-1] if w.n % LANES]:
        raise ValueError(f"only multiples of {LANES} channels can be joined, got {ragged}")
    return BlockWeight(torch.cat([w.data for w in weights]), first.kind, sum(w.n for w in weights), first.k)


def rows(weight: BlockWeight, ids: Tensor) -> Tensor:
    """The rows ``ids`` [n] of the weight as numbers, [n, K] f32: an embedding is looked up in the output matrix.

    Raises:
        IndexError: an id outside [0, N).
    """
    _check_ids(weight, ids)
    codes, halves = _channels(weight, ids)
    scales = halves.contiguous().view(torch.float16).squeeze(-1).float()  # [n, G, 1 or 2]: d, m
    if weight.kind == "q8":
        values = codes.view(torch.int8).float() * scales[..., :1]
    else:
        values = torch.cat([codes & 15, codes >> 4], -1).float() * scales[..., :1] + scales[..., 1:]
    return values.view(-1, weight.k)


def dequantize(weight: BlockWeight) -> Tensor:
    """The whole weight as numbers, [N, K] f32."""
    return rows(weight, torch.arange(weight.n, device=weight.data.device))


def pick(weight: BlockWeight, ids: Tensor) -> BlockWeight:
    """The channels ``ids`` [n] of a weight as a weight of their own, every byte as it was: [n, K].

    Raises:
        IndexError: an id outside [0, N).
    """
    _check_ids(weight, ids)
    codes, halves = _channels(weight, ids)
    return _pack(codes, [halves[..., i, :] for i in range(halves.shape[2])], weight.kind)


def _check_ids(weight: BlockWeight, ids: Tensor) -> None:
    if ids.is_cpu and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < weight.n:
        raise IndexError(f"rows {int(ids.min())} to {int(ids.max())} were asked of a weight with {weight.n}")


def _channels(weight: BlockWeight, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Channels ids [n] -> their codes uint8 [n, G, 16 or 32] and their float16s d (and m) as uint8 [n, G, 1 or 2, 2]."""
    block, lane = ids // LANES, ids % LANES
    groups, width = weight.k // GROUP, 16 if weight.kind == "q4" else 32
    data = weight.data
    quads = data[..., : LANES * width].view(-1, groups, width // 4, LANES, 4)
    halves = data[..., LANES * width :].view(-1, groups, (data.shape[-1] // LANES - width) // 2, LANES, 2)
    return quads[block, :, :, lane].reshape(-1, groups, width), halves[block, :, :, lane]
