"""Checkpoints of trained heads as others lay them out, with random weights, and what the originals compute from them.

The reference functions take the tensors under their published names and compute with torch alone, over a whole text.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

D, V, FFN, HEADS, KV, HD, EPS, THETA = 64, 320, 96, 4, 2, 16, 1e-5, 10_000.0
N_LAYERS = 8

Tensors = dict[str, Tensor]

LAYER = {
    "hidden_size": D,
    "vocab_size": V,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "intermediate_size": FFN,
    "rms_norm_eps": EPS,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
}


def normal(*shape: int, seed: int, scale: float | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(*shape, generator=generator) * (1 / math.sqrt(shape[-1]) if scale is None else scale)


def decoder_layer(at: str, inputs: int) -> Tensors:
    sizes = {"self_attn.q": (HEADS * HD, inputs), "self_attn.k": (KV * HD, inputs), "self_attn.v": (KV * HD, inputs)}
    sizes |= {"self_attn.o": (D, HEADS * HD), "mlp.gate": (FFN, D), "mlp.up": (FFN, D), "mlp.down": (D, FFN)}
    tensors = {f"{at}{name}_proj.weight": normal(*size, seed=i) for i, (name, size) in enumerate(sizes.items())}
    return {**tensors, f"{at}post_attention_layernorm.weight": 1 + normal(D, seed=10, scale=0.1)}


def eagle1(*, bias: bool = True, embedding: bool = True) -> tuple[dict[str, Any], Tensors]:
    tensors = {"fc.weight": normal(D, 2 * D, seed=20), **decoder_layer("layers.0.", D)}
    if bias:
        tensors["fc.bias"] = normal(D, seed=21, scale=0.3)
    if embedding:
        tensors["embed_tokens.weight"] = normal(V, D, seed=22, scale=1.0)
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bias": bias, **LAYER}, tensors


def eagle3(*, drafts: int = 48, taps: int = 3) -> tuple[dict[str, Any], Tensors]:
    """``drafts`` tokens, every sixth of the vocabulary from token 5 on."""
    ids = 5 + 6 * torch.arange(drafts)
    mask = torch.zeros(V, dtype=torch.bool)
    mask[ids] = True
    tensors = {
        "fc.weight": normal(D, taps * D, seed=30),
        **decoder_layer("midlayer.", 2 * D),
        "midlayer.input_layernorm.weight": 1 + normal(D, seed=31, scale=0.1),
        "midlayer.hidden_norm.weight": 1 + normal(D, seed=32, scale=0.1),
        "norm.weight": 1 + normal(D, seed=33, scale=0.1),
        "lm_head.weight": normal(drafts, D, seed=34),
        "d2t": ids - torch.arange(drafts),
        "t2d": mask,
    }
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": drafts, **LAYER}, tensors


def medusa(heads: int = 3, layers: int = 2, prefix: str = "medusa_head.") -> tuple[dict[str, Any], Tensors]:
    tensors = {}
    for k in range(heads):
        for i in range(layers):
            tensors[f"{prefix}{k}.{i}.linear.weight"] = normal(D, D, seed=40 + 10 * k + i)
            tensors[f"{prefix}{k}.{i}.linear.bias"] = normal(D, seed=50 + 10 * k + i, scale=0.3)
        tensors[f"{prefix}{k}.{layers}.weight"] = normal(V, D, seed=60 + 10 * k)
    return {"medusa_num_heads": heads, "medusa_num_layers": layers, "base_model_name_or_path": "some/model"}, tensors


def speculators(kind: str, **settings: Any) -> tuple[dict[str, Any], Tensors]:
    """What the speculators library writes for the same heads."""
    if kind == "eagle":
        _, old = eagle1(bias=settings.get("fusion_bias", False), embedding=False)
        tensors = {name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): x for name, x in old.items()}
        settings = {
            "transformer_layer_architecture": "LlamaDecoderLayer",
            "layernorms": False,
            "fusion_bias": False,
            **settings,
        }
    else:
        config, old = eagle3()
        tensors = {name.replace("midlayer.", "layers.0."): x for name, x in old.items()}
        tensors["embed_tokens.weight"] = normal(V, D, seed=22, scale=1.0)
        settings = {"draft_vocab_size": config["draft_vocab_size"], "norm_before_residual": True, **settings}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "architectures": ["Eagle3Speculator" if kind == "eagle3" else "EagleSpeculator"],
        "transformer_layer_config": {"model_type": "llama", "head_dim": HD, **LAYER},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": "some/model", "architectures": ["LlamaForCausalLM"]},
        },
        **settings,
    }, tensors


def write(folder: Path, config: dict[str, Any], tensors: Tensors, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x: Tensor) -> Tensor:
    """x [T, heads, hd], position t in row t"""
    angles = torch.arange(len(x))[:, None] * THETA ** (-torch.arange(0, HD, 2) / HD)  # [T, hd / 2]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., : HD // 2], x[..., HD // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over a text: q [T, H * hd], k and v [T, KV * hd] -> [T, H * hd]"""
    t = len(q)
    q, k, v = rotate(q.view(t, HEADS, HD)), rotate(k.view(t, KV, HD)), v.view(t, KV, HD)
    k, v = (x.repeat_interleave(HEADS // KV, 1).transpose(0, 1) for x in (k, v))  # [H, T, hd]
    return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True).transpose(0, 1).reshape(t, -1)


def layer_reference(w: Tensors, at: str, stream: Tensor, inputs: Tensor) -> Tensor:
    q, k, v = (inputs @ w[f"{at}self_attn.{name}_proj.weight"].t() for name in "qkv")
    x = stream + attend(q, k, v) @ w[f"{at}self_attn.o_proj.weight"].t()
    y = rms_norm(x, w[f"{at}post_attention_layernorm.weight"])
    gate, up = (y @ w[f"{at}mlp.{name}_proj.weight"].t() for name in ("gate", "up"))
    return x + (F.silu(gate) * up) @ w[f"{at}mlp.down_proj.weight"].t()


def eagle1_reference(w: Tensors, features: Tensor, embedded: Tensor) -> Tensor:
    """features, embedded [T, d] -> the state [T, d], which goes into the target's output matrix as it is"""
    fc = next(name for name in w if name.endswith("fc.weight"))
    at = "transformer." if fc.startswith("fusion") else "layers.0."
    x = F.linear(torch.cat([embedded, features], -1), w[fc], w.get(fc.replace("weight", "bias")))
    return layer_reference(w, at, x, x)


def eagle3_layer(w: Tensors, stream: Tensor, embedded: Tensor, *, normed: bool) -> Tensor:
    """What starts a step (fused features, or states of the step before) and embeddings, both [T, d] -> states [T, d]"""
    at = "midlayer." if "midlayer.hidden_norm.weight" in w else "layers.0."
    hidden = rms_norm(stream, w[f"{at}hidden_norm.weight"])
    inputs = torch.cat([rms_norm(embedded, w[f"{at}input_layernorm.weight"]), hidden], -1)
    return layer_reference(w, at, hidden if normed else stream, inputs)


def eagle3_reference(
    w: Tensors, features: Tensor, embedded: Tensor, *, normed: bool, fuse: bool = True
) -> tuple[Tensor, Tensor]:
    """features [T, taps * d], embedded [T, d] -> the state [T, d] and logits over the draft vocabulary"""
    state = eagle3_layer(w, features @ w["fc.weight"].t() if fuse else features, embedded, normed=normed)
    return state, rms_norm(state, w["norm.weight"]) @ w["lm_head.weight"].t()


def medusa_reference(w: Tensors, k: int, layers: int, feature: Tensor, prefix: str = "medusa_head.") -> Tensor:
    """Logits of head k"""
    for i in range(layers):
        at = f"{prefix}{k}.{i}.linear."
        feature = feature + F.silu(F.linear(feature, w[f"{at}weight"], w[f"{at}bias"]))
    return feature @ w[f"{prefix}{k}.{layers}.weight"].t()
