"""A model in a GGUF file: llama.cpp's metadata keys and tensor names, as an Architecture and Hugging Face names."""

from __future__ import annotations

from typing import Final, cast

import torch
from torch import Tensor

from specdec.models.architecture import Architecture, check_heads
from specdec.models.errors import ModelError
from specdec.models.gguf import GgufFile
from specdec.models.keys import Keys, token_ids
from specdec.models.layers import Rope, RopeKind
from specdec.models.rope import make_rope
from specdec.models.weights import Blocks, Weights
from specdec.quant.blocks import RECORD_BYTES

FAMILIES: Final = ("llama", "qwen2", "qwen3")

_NAMES: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

_REFUSED: Final = {
    "expert_count": "mixtures of experts",
    "attn_logit_softcapping": "soft caps on logits",
    "final_logit_softcapping": "soft caps on logits",
    "logit_scale": "scaled logits",
    "residual_scale": "scaled residuals",
    "embedding_scale": "scaled embeddings",
    "attention.clamp_kqv": "clipped projections",
}

_ROPE_KEYS: Final = {
    "freq_base",
    "dimension_count",
    "scaling.type",
    "scaling.factor",
    "scaling.original_context_length",
    "scaling.attn_factor",
    "scaling.yarn_beta_fast",
    "scaling.yarn_beta_slow",
    "scaling.finetuned",
}
_ROPE_TENSORS: Final = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")

_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")


class GgufWeights(Weights):
    """The weights of a GGUF file under Hugging Face's names and in its order of rows."""

    def __init__(self, file: GgufFile) -> None:
        super().__init__(file.path, read_architecture(file), set(file.tensors))
        self.file = file
        self.used.update(_ROPE_TENSORS)

    def vector(self, name: str, size: int) -> Tensor:
        return self._ordered(name, torch.from_numpy(self.file.values(self._find(name, (size,)))))

    def matrix(self, name: str, rows: int, columns: int) -> Tensor | Blocks:
        theirs = self._find(name, (rows, columns))
        kind = self.file.info(theirs).type
        if kind in RECORD_BYTES:
            raw = torch.from_numpy(self.file.raw(theirs))
            return Blocks(kind, self._ordered(name, raw))
        return self._ordered(name, torch.from_numpy(self.file.values(theirs)))

    def _find(self, name: str, shape: tuple[int, ...]) -> str:
        theirs = _gguf_name(name)
        self.use(theirs, self.file.info(theirs).shape, shape)
        return theirs

    def _ordered(self, name: str, rows: Tensor) -> Tensor:
        """llama.cpp stores llama's query and key rows for a rotation of neighbours; put them back in order for halves."""
        n_heads = {"q": self.architecture.n_heads, "k": self.architecture.n_kv_heads}.get(_projection(name))
        if self.architecture.family != "llama" or n_heads is None:
            return rows
        pairs = rows.view(n_heads, -1, 2, *rows.shape[1:])  # [H, hd / 2, 2, ...]
        return pairs.transpose(1, 2).reshape(rows.shape)


def read_architecture(file: GgufFile) -> Architecture:
    """The description of the model in a GGUF file.

    Raises:
        ModelError: the model is of a kind, or asks for something, that is not supported.
    """
    family = file.metadata.get("general.architecture")
    general = Keys(file.metadata, file.path)
    if family not in FAMILIES:
        raise ModelError(f"{file.path}: architecture {family!r} is not supported in GGUF; supported: {', '.join(FAMILIES)}")
    if general.get("general.type") not in (None, "model"):
        raise general.error("general.type", general.get("general.type"), "model")
    if (general.get("split.count") or 1) != 1:
        raise ModelError(f"{file.path} is one part of a split file; merge the parts first (llama-gguf-split --merge)")
    keys = Keys(file.metadata, file.path, f"{family}.")
    for key, what in _REFUSED.items():
        if keys.get(key):
            raise general.unsupported(f"{family}.{key} = {keys.get(key)}: {what} are not supported")
    hidden, n_heads, context = (
        keys.integer("embedding_length"),
        keys.integer("attention.head_count"),
        keys.integer("context_length"),
    )
    n_kv_heads = keys.integer("attention.head_count_kv", n_heads)
    head_dim = keys.integer("attention.key_length", hidden // n_heads)
    check_heads(keys, n_heads, n_kv_heads, head_dim)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise keys.error(key, keys.get(key), f"the head dimension, {head_dim}")
    n_layers = keys.integer("block_count")
    window = 0 if keys.get("attention.sliding_window") is None else keys.integer("attention.sliding_window")
    if window and family != "llama":
        raise general.unsupported(
            f"{family}.attention.sliding_window does not say which layers it is for, and is not supported"
        )
    return Architecture(
        family=family,
        vocab_size=file.info("token_embd.weight").shape[0],
        hidden_size=hidden,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn_size=keys.integer("feed_forward_length"),
        context=context,
        rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(file, keys, head_dim, context),
        windows=(window,) * n_layers,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=family == "qwen3",
        tied="output.weight" not in file.tensors,
        end_tokens=end_tokens(file),
    )


def end_tokens(file: GgufFile) -> frozenset[int]:
    """The tokens that end a text or a turn."""
    keys = Keys(file.metadata, file.path, "tokenizer.ggml.")
    return frozenset().union(*(token_ids(keys, key) for key in _END_KEYS))


def _rope(file: GgufFile, keys: Keys, head_dim: int, context: int) -> Rope:
    """Rotary settings: metadata, or the divisors that llama.cpp keeps in tensors (Llama 3, LongRoPE)."""
    asked = {key.removeprefix(f"{keys.prefix}rope.") for key in file.metadata if key.startswith(f"{keys.prefix}rope.")}
    if unknown := sorted(asked - _ROPE_KEYS):
        raise ModelError(
            f"{file.path}: {keys.prefix}rope.{unknown[0]} is not supported; known: {', '.join(sorted(_ROPE_KEYS))}"
        )
    theta = keys.number("rope.freq_base", 10_000.0)
    divisors: dict[str, list[float]] = {name: file.values(name).tolist() for name in _ROPE_TENSORS if name in file.tensors}
    kind = keys.get("rope.scaling.type") or "none"
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise keys.error("rope.scaling.type", kind, "none, linear, yarn or longrope")
    if "rope_freqs.weight" in divisors:
        if kind != "none":
            raise ModelError(f"{file.path} holds rope_freqs.weight and asks for {kind} scaling too; only one can be meant")
        return Rope(
            kind="divided",
            dim=head_dim,
            theta=theta,
            context=context,
            short_factor=_divisors(file, divisors, "rope_freqs", head_dim),
        )
    if ("rope_factors_short.weight" in divisors) != (kind == "longrope"):
        raise ModelError(f"{file.path}: rope_factors_short.weight and rope scaling longrope belong together")
    settings = {
        "factor": keys.get("rope.scaling.factor"),
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
        "attention_factor": keys.get("rope.scaling.attn_factor"),
    }
    if kind == "longrope":
        settings |= {
            f"{side}_factor": list(_divisors(file, divisors, f"rope_factors_{side}", head_dim)) for side in ("short", "long")
        }
    if kind == "yarn" and settings["attention_factor"] not in (None, 1.0):
        raise keys.error("rope.scaling.attn_factor", settings["attention_factor"], "1 with yarn scaling")
    if kind == "yarn":
        settings["attention_factor"] = None
    original = keys.integer("rope.scaling.original_context_length", context)
    rope_kind: RopeKind = "default" if kind == "none" else cast("RopeKind", kind)
    return make_rope(
        Keys(settings, file.path), rope_kind, head_dim=head_dim, theta=theta, context=context, original_context=original
    )


def _divisors(file: GgufFile, tensors: dict[str, list[float]], name: str, head_dim: int) -> tuple[float, ...]:
    return Keys(tensors, file.path).numbers(f"{name}.weight", head_dim // 2)


def _gguf_name(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight"""
    module, _, part = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{_NAMES[module]}.{part}"
    layer, _, inner = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[inner]}.{part}"


def _projection(name: str) -> str:
    """``q`` of …self_attn.q_proj.weight or .bias, and so on; empty for anything else."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    return module.removesuffix("_proj") if module.endswith("_proj") else ""
