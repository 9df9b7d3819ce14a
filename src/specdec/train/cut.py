"""A model cut down to some of its layers, in float modules, to be trained into a draft model.

The embedding and the output matrix stay the target's and are not part of it: they are most of a small draft model's weights,
and learning them would take far more text than there is.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.config import ConfigError
from specdec.models.architecture import Architecture
from specdec.models.decoder import Decoder, Layer
from specdec.models.heads import Norm
from specdec.models.layers import RotaryTable
from specdec.quant.linear import BiasedLinear, Linear


class CutLayer(nn.Module):
    """One layer of a decoder, with the weights that it has there."""

    def __init__(self, layer: Layer, a: Architecture, window: int, device: torch.device) -> None:
        super().__init__()
        self.window = window
        self.heads = a.n_heads, a.n_kv_heads, a.head_dim
        self.attention_norm = _norm(layer.attention_norm, a.rms_eps)
        self.qkv = _linear(layer.qkv, device)
        self.q_norm = None if layer.q_norm is None else _norm(layer.q_norm, a.rms_eps)
        self.k_norm = None if layer.k_norm is None else _norm(layer.k_norm, a.rms_eps)
        self.out = _linear(layer.out, device)
        self.ffn_norm = _norm(layer.ffn_norm, a.rms_eps)
        self.gate_up = _linear(layer.gate_up, device)
        self.down = _linear(layer.down, device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sizes: Many[int]) -> Tensor:
        """x [R, d], the rows of sequences of these sizes one behind the other -> [R, d]; cos, sin [R, hd / 2]."""
        n_heads, n_kv, hd = self.heads
        qkv: Tensor = self.qkv(self.attention_norm(x))
        q, k, v = torch.split(qkv.view(len(x), -1, hd), [n_heads, n_kv, n_kv], 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        parts = zip(*(torch.split(part, [*sizes]) for part in (q, k, v)), strict=True)
        x = x + self.out(torch.cat([self._attend(*part) for part in parts]).flatten(1))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, -1)
        y: Tensor = x + self.down(F.silu(gate) * up)
        return y

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[n, H, hd] and twice [n, KV, hd], of one sequence -> [n, H, hd]"""
        n = len(q)
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        mask = None
        if self.window and self.window < n:
            mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril().triu(1 - self.window)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return y[0].transpose(0, 1)


class CutModel(nn.Module):
    """Some layers of a model, and a last norm of its own.

    Args:
        model: from which it is cut.
        layers: which ones, in increasing order (``check_layers``).
    """

    def __init__(self, model: Decoder, layers: Many[int]) -> None:
        super().__init__()
        a = model.architecture
        windows = tuple(a.windows[i] for i in layers)
        self.source_layers = tuple(layers)
        self.architecture = replace(a, n_layers=len(layers), windows=windows)
        self.layers = nn.ModuleList(
            CutLayer(model.layers[i], a, window, model.device) for i, window in zip(layers, windows, strict=True)
        )
        self.norm = _norm(model.norm, a.rms_eps)
        self._rotary = RotaryTable(a.rope, model.device)

    def forward(self, embedded: Tensor, sizes: Many[int], n_prompt: Many[int]) -> Tensor:
        """Whole sequences, one behind the other: embeddings [R, d] -> what the output matrix multiplies, [R, d]."""
        position = torch.cat([torch.arange(n) for n in sizes])
        lengths = torch.maximum(torch.tensor(n_prompt).repeat_interleave(torch.tensor(sizes)), position + 1)
        cos, sin = self._rotary(position.to(embedded.device), lengths.to(embedded.device))
        x = embedded
        for layer in self.layers:
            x = layer(x, cos, sin, sizes)
        y: Tensor = self.norm(x)
        return y

    def tensors(self) -> dict[str, Tensor]:
        """Its weights by Hugging Face's names."""
        a = self.architecture
        found: dict[str, Tensor] = {"model.norm.weight": self.norm.weight}
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, CutLayer)
            at = f"model.layers.{i}."
            for name, norm in (
                ("input_layernorm", layer.attention_norm),
                ("post_attention_layernorm", layer.ffn_norm),
                ("self_attn.q_norm", layer.q_norm),
                ("self_attn.k_norm", layer.k_norm),
            ):
                if norm is not None:
                    found[f"{at}{name}.weight"] = norm.weight
            for names, module, rows in (
                (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), layer.qkv, [a.q_size, a.kv_size, a.kv_size]),
                (("self_attn.o_proj",), layer.out, [a.hidden_size]),
                (("mlp.gate_proj", "mlp.up_proj"), layer.gate_up, [a.ffn_size, a.ffn_size]),
                (("mlp.down_proj",), layer.down, [a.hidden_size]),
            ):
                for kind, value in (("weight", module.weight), ("bias", module.bias)):
                    if value is not None:
                        found |= {f"{at}{n}.{kind}": part for n, part in zip(names, torch.split(value, rows), strict=True)}
        return found


def default_layers(n_layers: int) -> tuple[int, ...]:
    """The first three: each goes on from what it is used to, while the last layers of a model make nothing of early states."""
    return tuple(range(min(3, n_layers)))


def check_layers(a: Architecture, layers: Many[int]) -> None:
    """Raise ConfigError where these are not layers of the model."""
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= a.n_layers:
        raise ConfigError(
            f"layers must be some of the model's, 0 to {a.n_layers - 1}, in increasing order; got {tuple(layers)}"
        )


def _norm(weight: Tensor, eps: float) -> Norm:
    norm = Norm(len(weight), eps)
    norm.weight = nn.Parameter(weight.detach().float().clone())
    return norm


def _linear(linear: Linear, device: torch.device) -> nn.Linear:
    """A matrix of a model as floats."""
    bias = linear.bias if isinstance(linear, BiasedLinear) else None
    made = nn.Linear(linear.k, linear.n, bias=bias is not None)
    made.weight = nn.Parameter(linear.rows(torch.arange(linear.n, device=device)).detach().clone())
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone())
    return made


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [R, H, hd] turned by halves."""
    a, b = x.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1)
