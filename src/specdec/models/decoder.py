"""One decoder for the whole family, driven by its Architecture. It knows nothing of quantisation, batching or drafting."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.attention.base import Attention
from specdec.config import Precision
from specdec.kernels.base import Kernels, PlainRows
from specdec.kernels.fused import DecoderWeights, LayerWeights
from specdec.kernels.pool_pass import PoolPass
from specdec.models.architecture import Architecture
from specdec.models.base import Batch, Model, Result, Shape
from specdec.models.layers import RotaryTable
from specdec.quant.linear import Embedding, Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The weights of one layer. Query, key and value are one product, gate and up another."""

    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder(Model):
    """Embedding, layers of attention and gated feed-forward around a float32 residual stream, norm, output matrix."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        embedding: Embedding,
        layers: Collection[Layer],
        norm: Tensor,
        head: Linear,
        kernels: Kernels,
        precision: Precision,
        kv_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        a = self.architecture = architecture
        self.shape = Shape(a.n_layers, a.n_kv_heads, a.head_dim, a.vocab_size, a.context)
        self.precision = precision
        self.kv_dtype = kv_dtype
        self.device = device
        self.kernels = kernels
        self.embedding = embedding
        self.layers = tuple(layers)
        self.norm = norm
        self.head = head
        self._rotary = RotaryTable(a.rope, device)
        self._scale = a.head_dim**-0.5
        weights = self._weights()
        self._fused = weights and kernels.fuse(weights)

    def with_outputs(self, ids: Tensor) -> Decoder:
        """The same model, its weights shared, that gives the logits of the tokens ids [n] int64 alone, in that order."""
        return Decoder(
            self.architecture,
            embedding=self.embedding,
            layers=self.layers,
            norm=self.norm,
            head=self.head.subset(ids),
            kernels=self.kernels,
            precision=self.precision,
            kv_dtype=self.kv_dtype,
            device=self.device,
        )

    @property
    def capturable(self) -> bool:
        return self.kernels.capturable and self._rotary.capturable

    @property
    def n_bytes(self) -> int:
        """Memory of the weights."""
        products = [m for layer in self.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return sum(m.n_bytes for m in {*products, self.head, self.embedding.weight})  # a tied head counts once

    def bind(self, attention: Attention, taps: Collection[int] = ()) -> Callable[[PlainRows], Result]:
        general, pool = super().bind(attention, taps), attention.native_pool
        if not (self._fused and pool):
            return general
        self._check_taps(taps)
        run, rotary = PoolPass(self._fused, pool.keys, pool.values, taps), self._rotary

        def native(rows: PlainRows) -> Result:
            """Without a tensor where the pass allows it: each costs as much as listing the rows did."""
            angles = rotary.whole(rows.longest)
            return general(rows) if angles is None else run(rows, *angles)

        return native

    def forward(self, batch: Batch, attention: Attention, taps: Collection[int] = ()) -> Result:
        a, rms_norm = self.architecture, self.kernels.rms_norm
        self._check_taps(taps)
        if self._fused and (pool := attention.native_pool):
            tables = self._rotary.tables(batch.positions, batch.lengths, batch.longest)
            return self._fused(batch.tokens, *tables, batch.rows, batch.wanted, pool.keys, pool.values, taps)
        angles = self._rotary(batch.positions, batch.lengths)
        n_rows, last, tapped = len(batch.tokens), a.n_layers - 1, {}
        x = self.embedding(batch.tokens)  # [M, d]
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(rms_norm(x, layer.attention_norm, a.rms_eps))
            q, k, v = self._heads(layer, qkv.view(n_rows, -1, a.head_dim), *angles)
            attended = attention(i, q, k, v, batch.rows, self._scale, a.windows[i])  # [M, H * hd]
            if i == last and last not in taps:  # every key and value is stored: from here on only the wanted rows matter
                x, attended = x[batch.wanted], attended[batch.wanted]
                if not len(x):
                    break
            x += layer.out(attended)
            gate_up = layer.gate_up(rms_norm(x, layer.ffn_norm, a.rms_eps))
            x += layer.down(self.kernels.silu_mul(gate_up))
            if i in taps:
                tapped[i] = x.clone()  # [M, d]: the stream goes on in place
        if last in taps:
            x = x[batch.wanted]
        if not len(x):
            return x.new_empty(0, a.vocab_size), tapped
        return self.head(rms_norm(x, self.norm, a.rms_eps)), tapped

    def _check_taps(self, taps: Collection[int]) -> None:
        n = self.architecture.n_layers
        if unknown := set(taps) - set(range(n)):
            raise ValueError(f"taps {sorted(unknown)} are not layers of this model, which has layers 0 to {n - 1}")

    def _heads(self, layer: Layer, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [M, H + 2 KV, hd] -> rotated q [M, H, hd], rotated k and v [M, KV, hd]."""
        a, kernels = self.architecture, self.kernels
        n_q, n_qk = a.n_heads, a.n_heads + a.n_kv_heads
        q, k, v = qkv[:, :n_q], qkv[:, n_q:n_qk], qkv[:, n_qk:]
        if layer.q_norm is None or layer.k_norm is None:
            kernels.rope(qkv[:, :n_qk], cos, sin)  # queries and keys lie side by side: one call turns both
            return q, k, v
        q = kernels.rms_norm(q.contiguous(), layer.q_norm, a.rms_eps)
        k = kernels.rms_norm(k.contiguous(), layer.k_norm, a.rms_eps)
        kernels.rope(q, cos, sin)
        kernels.rope(k, cos, sin)
        return q, k, v

    def _weights(self) -> DecoderWeights | None:
        """What a fused pass takes; None where a matrix is not packed for the CPU."""
        a = self.architecture
        layers = []
        for layer, window in zip(self.layers, a.windows, strict=True):
            qkv, out, gate_up, down = (m.matrix() for m in (layer.qkv, layer.out, layer.gate_up, layer.down))
            if not (qkv and out and gate_up and down):
                return None
            layers.append(
                LayerWeights(
                    attention_norm=layer.attention_norm,
                    qkv=qkv,
                    q_norm=layer.q_norm,
                    k_norm=layer.k_norm,
                    out=out,
                    ffn_norm=layer.ffn_norm,
                    gate_up=gate_up,
                    down=down,
                    window=window,
                )
            )
        head, embedding = self.head.matrix(), self.embedding.weight.matrix()
        if not (head and embedding):
            return None
        return DecoderWeights(
            layers=layers,
            heads=a.n_heads,
            kv_heads=a.n_kv_heads,
            head_dim=a.head_dim,
            eps=a.rms_eps,
            scale=self._scale,
            norm=self.norm,
            head=head,
            embedding=embedding,
        )
