"""Attention, the row-wise passes and the sampler in torch, on any device: slow and simple, for tests and odd machines.

A tensor library may sum, and even exponentiate, in another order when a tensor has another shape. So each row is computed by
itself, in a shape that depends on that row alone, and sums run in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from specdec.config import BLOCK_SIZE
from specdec.kernels.base import WIDTH, Kernels, Rows, gumbel
from specdec.kv import codec


def _each_row(function: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
    """[M, width] from x [M, d]; the copy gives every row the same alignment."""
    return torch.stack([function(row.clone()) for row in x]) if len(x) else x.new_empty(0, width)


def store_rows(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> None:
    """Write k, v [M, KV, hd] to the rows' slots of one layer of the pool."""
    real = rows.slot >= 0  # the others are padding
    slot, k, v = rows.slot[real].long(), k[real], v[real]
    blocks, offset = rows.tables.long()[rows.sequence[real].long(), slot // BLOCK_SIZE], slot % BLOCK_SIZE
    for x, part in zip(codec.encode(k, keys.dtype), codec.key_parts(keys, k.shape[-1]), strict=True):
        part[blocks, offset] = x
    for x, part in zip(codec.encode(v, values.dtype), codec.value_parts(values, v.shape[-1]), strict=True):
        part[blocks, offset] = x


def attend_rows(q: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float, window: int) -> Tensor:
    """q [M, H, hd] -> [M, H * hd]: each row gathers the keys of its own list and takes their softmax in float64."""
    m, heads, hd = q.shape
    kv_heads = keys.shape[1]
    key_parts, value_parts = codec.key_parts(keys, hd), codec.value_parts(values, hd)
    out = q.new_empty(m, heads * hd)
    for i in range(m):
        prefix, n_path = int(rows.prefix[i]), int(rows.n_path[i])
        if not prefix + n_path:  # padding
            out[i] = 0
            continue
        start = max(0, prefix + n_path - window) if window > 0 else 0
        slots = torch.cat([torch.arange(prefix, device=q.device), rows.path[i, :n_path].long()])[start:]
        blocks, offset = rows.tables[rows.sequence[i]].long()[slots // BLOCK_SIZE], slots % BLOCK_SIZE
        k = codec.decode(tuple(part[blocks, offset] for part in key_parts)).transpose(0, 1).double()  # [KV, n, hd]
        v = codec.decode(tuple(part[blocks, offset] for part in value_parts)).transpose(0, 1).double()
        grouped = q[i].double().view(kv_heads, heads // kv_heads, 1, hd)
        scores = scale * (grouped * k[:, None]).sum(-1)  # [KV, H / KV, n]
        p = torch.exp(scores - scores.amax(-1, keepdim=True))
        o = (p[..., None] * v[:, None]).sum(-2) / p.sum(-1, keepdim=True)  # [KV, H / KV, hd]
        out[i] = o.reshape(-1)
    return out


class PortableRowOps(Kernels):
    """Everything of ``Kernels`` but the products."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        def norm(row: Tensor) -> Tensor:
            wide = row.double()
            return (wide * torch.rsqrt(wide.square().mean() + eps)).float() * weight

        return _each_row(norm, x.reshape(-1, x.shape[-1]), x.shape[-1]).view(x.shape)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        def gated(row: Tensor) -> Tensor:
            gate, up = row.double().chunk(2)
            return (gate * torch.sigmoid(gate) * up).float()

        return _each_row(gated, gate_up, gate_up.shape[1] // 2)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        for row, c, s in zip(x, cos, sin, strict=True):
            a, b = row.double().chunk(2, dim=-1)  # [H, hd / 2]
            row.copy_(torch.cat([a * c - b * s, b * c + a * s], dim=-1))

    def store(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> None:
        store_rows(k, v, keys, values, rows)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float, window: int) -> Tensor:
        return attend_rows(q, keys, values, rows, scale, window)

    def top(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if not 1 <= k <= logits.shape[1]:
            raise ValueError(f"k must be in [1, {logits.shape[1]}], got {k}")
        values = logits.new_empty(len(logits), k)
        ids = torch.empty(len(logits), k, dtype=torch.int64, device=logits.device)
        for i, row in enumerate(logits):
            known = torch.where(row.isnan(), -torch.inf, row)
            held = torch.nonzero(known >= torch.topk(known, k).values[-1]).flatten()  # topk alone leaves ties in any order
            ids[i] = held[torch.sort(known[held], descending=True, stable=True).indices[:k]]
            values[i] = row[ids[i]]
            if row.isnan().any():
                values[i, 0] = torch.nan
        return values, ids

    def race(self, z: Tensor, seed: int, position: int, temperature: float = 1.0) -> int:
        alive = torch.nonzero(z > -torch.inf).flatten()
        if z.isnan().any() or not len(alive) or z.max() == torch.inf:
            return -1
        z = z[alive].double()
        scores = (z - z.max()) / temperature + gumbel(seed, position, alive)
        return int(alive[torch.nonzero(scores == scores.max())[0, 0]])

    def candidates(
        self, logits: Tensor, heat: Tensor, seeds: Tensor, positions: Tensor, k: int, names: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        _, best = self.top(logits, min(WIDTH, logits.shape[1]))
        found: list[tuple[Tensor, Tensor]] = []
        for row, ids, temperature, seed, position in zip(
            logits, best, heat.tolist(), seeds.tolist(), positions.tolist(), strict=True
        ):
            if temperature == 0:
                ids = ids[:k]
            tokens = ids if names is None else names[ids]
            logp = row.double().log_softmax(0)[ids]
            scores, order = torch.sort(logp + temperature * gumbel(seed, position, tokens), descending=True, stable=True)
            rest = torch.log((1 - logp.exp().sum()).clamp(min=1e-9)) + math.log1p(4 * temperature**2)
            whole = torch.logaddexp(scores.logsumexp(0), rest + max(0.0, temperature - 1) * math.log(1000))
            found.append((tokens[order[:k]], (scores[:k] - whole).exp()))
        return torch.stack([tokens for tokens, _ in found]), torch.stack([chances for _, chances in found])
