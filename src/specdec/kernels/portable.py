"""Every operation in torch: for other devices, for machines without a compiler, and as a second opinion in tests."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.base import GROUP, LANES, BlockWeight, DenseWeight
from specdec.kernels.portable_rows import PortableRowOps

MOST_SUMS = 2**23
"""Group sums held at a time (32 MiB)."""

for _dtype in (torch.float32, torch.float64):
    # torch's vector library chooses the code of a function when it is first called. Of several threads that call it first at
    # the same time, one may get less exact code, for that call: so one thread calls each before.
    torch.ones(1, dtype=_dtype).exp().log()


class PortableKernels(PortableRowOps):
    """The contract in torch. Rows are independent of their company; results agree with the native ones to rounding."""

    name = "torch"

    def block_linear(self, x: Tensor, weight: BlockWeight) -> Tensor:
        if x.dtype is not torch.float32 or x.dim() != 2 or x.shape[1] != weight.k:
            raise ValueError(f"a product needs float32 rows [M, {weight.k}], got {x.dtype} {list(x.shape)}")
        rows, groups, blocks = x.shape[0], weight.k // GROUP, weight.data.shape[0]
        q, scale, offset = quantise(x)  # [M, G, 32], [M, G], [M, G]
        q = q.transpose(0, 1).contiguous()  # [G, M, 32]
        step = max(1, MOST_SUMS // max(1, groups * rows * LANES))
        parts = []
        for start in range(0, blocks, step):
            codes, d, m = unpack(weight.data[start : start + step], weight.kind)  # [n, G, 32], [n, G], [n, G]
            sums = torch.bmm(q, codes.permute(1, 2, 0))  # [G, M, n]: integers below 2^24, so exact in any order
            y = torch.zeros(rows, codes.shape[0], device=x.device)
            for g in range(groups):  # elementwise steps only: an entry never depends on the shape around it
                y += (scale[:, g, None] * d[:, g]) * sums[g]
                if m is not None:
                    y += offset[:, g, None] * m[:, g]
            parts.append(y)
        return torch.cat(parts, 1)[:, : weight.n].contiguous()

    def dense_linear(self, x: Tensor, weight: DenseWeight) -> Tensor:
        if x.dtype is not torch.float32 or x.dim() != 2 or x.shape[1] != weight.k:
            raise ValueError(f"a product needs float32 rows [M, {weight.k}], got {x.dtype} {list(x.shape)}")
        data = weight.data.float()  # [blocks, K, 16]
        y = torch.empty(x.shape[0], weight.n, device=x.device)
        for i, row in enumerate(x):  # one row in one shape, wherever it stands: a matrix product may sum otherwise for others
            y[i] = torch.matmul(row.clone(), data).flatten()[: weight.n]
        return y


def quantise(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [M, K] f32 -> q [M, G, 32] (whole numbers, f32), scale [M, G], scale * sum(q) [M, G]; csrc/blocks.h has the rule."""
    x = x.view(x.shape[0], x.shape[1] // GROUP, GROUP)
    amax = x.abs().amax(-1, keepdim=True)  # NaN where a NaN is
    finite, usable = amax.isfinite(), amax.isfinite() & (amax >= 2.0**-120)
    inverse = torch.where(usable, 127 / amax, 0)
    q = (torch.where(usable, x, 0) * inverse).round()  # to even
    scale = torch.where(usable, amax / 127, torch.where(finite, 0.0, torch.nan)).squeeze(-1)
    return q, scale, scale * q.sum(-1)


def unpack(data: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Packed blocks [B, G, bytes] -> codes [16 B, G, 32] f32, d [16 B, G] f32, and for q4 m [16 B, G] f32."""
    blocks, groups, _ = data.shape
    width = 16 if kind == "q4" else 32  # bytes of a channel's codes
    codes = data[..., : LANES * width].view(blocks, groups, width // 4, LANES, 4).permute(0, 3, 1, 2, 4)
    codes = codes.reshape(blocks * LANES, groups, width)
    halves = data[..., LANES * width :].contiguous().view(torch.float16).view(blocks, groups, -1, LANES)
    d, *rest = halves.permute(2, 0, 3, 1).reshape(-1, blocks * LANES, groups).float()
    if kind == "q8":
        return codes.view(torch.int8).float(), d, None
    return torch.cat([codes & 15, codes >> 4], -1).float(), d, rest[0]
