"""What a model is made of: one frozen description, whichever file it was read from.

Whatever a file asks for is either done or refused with an error; nothing that would change a logit is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from specdec.models.errors import ModelError
from specdec.models.keys import Keys, token_ids
from specdec.models.layers import Rope
from specdec.models.rope import rope_from_config

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")

# Hugging Face's meaning of a key that config.json leaves out.
_RMS_EPS: Final = 1e-6
_MISTRAL_WINDOW: Final = 4096
_QWEN_WINDOW: Final = 4096
_QWEN_WINDOW_LAYERS: Final = 28

_REFUSED: Final = {
    "num_experts": "mixtures of experts",
    "num_local_experts": "mixtures of experts",
    "n_routed_experts": "mixtures of experts",
    "attn_logit_softcapping": "soft caps on logits",
    "final_logit_softcapping": "soft caps on logits",
    "quantization_config": "weights that another library has quantised (GGUF files of the same model work)",
    "auto_map": "code that comes with a checkpoint",
    "clip_qkv": "clipped projections",
    "no_rope_layers": "layers without rotary positions",
    "embedding_multiplier": "scaled embeddings",
    "residual_multiplier": "scaled residuals",
    "logit_scale": "scaled logits",
    "logits_scaling": "scaled logits",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder of the Llama family and its relatives."""

    family: str
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    context: int
    rms_eps: float
    rope: Rope
    windows: tuple[int, ...]
    """For each layer its sliding window in tokens, the row itself included; 0 for none."""
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Queries and keys are normalised per head (qwen3)."""
    tied: bool
    """The output matrix is the embedding."""
    end_tokens: frozenset[int]

    @property
    def q_size(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.n_kv_heads * self.head_dim


def from_config(values: Mapping[str, Any], path: Path) -> Architecture:
    """Read a Hugging Face config.json.

    Args:
        values: the parsed file.
        path: its place, for errors.

    Raises:
        ModelError: the model is of a kind, or asks for something, that is not supported; or a value is missing or wrong.
    """
    keys = Keys(values, path)
    family = values.get("model_type")
    if family not in FAMILIES:
        raise keys.unsupported(f"model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    _refuse(keys, family)
    hidden, n_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    if keys.get("head_dim") is None and hidden % n_heads:
        raise keys.error("hidden_size", hidden, f"a multiple of num_attention_heads ({n_heads}) where head_dim is not given")
    head_dim = keys.integer("head_dim", None if family == "qwen3" else hidden // n_heads)
    n_kv_heads = keys.integer("num_key_value_heads", n_heads if family == "llama" else None)
    check_heads(keys, n_heads, n_kv_heads, head_dim)
    bias = keys.flag("attention_bias", False)
    n_layers, context = keys.integer("num_hidden_layers"), keys.integer("max_position_embeddings")
    return Architecture(
        family=family,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn_size=keys.integer("intermediate_size"),
        context=context,
        rms_eps=keys.number("rms_norm_eps", _RMS_EPS),
        rope=rope_from_config(keys, head_dim, context),
        windows=_windows(keys, family, n_layers),
        qkv_bias=bias or family == "qwen2",
        out_bias=bias,
        mlp_bias=keys.flag("mlp_bias", False),
        qk_norm=family == "qwen3",
        tied=keys.flag("tie_word_embeddings", False),
        end_tokens=token_ids(keys, "eos_token_id"),
    )


def check_heads(keys: Keys, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
    """Raise where heads cannot share keys evenly or be rotated in pairs."""
    if n_heads % n_kv_heads:
        raise ModelError(f"{keys.path}: {n_heads} query heads cannot share {n_kv_heads} key heads evenly")
    if head_dim % 2:
        raise ModelError(f"{keys.path}: rotary positions need an even head dimension, got {head_dim}")


def _refuse(keys: Keys, family: str) -> None:
    """Raise where a config asks for something that would change the logits and that no code here does."""
    for key, what in _REFUSED.items():
        if keys.get(key):
            raise keys.unsupported(f"{key} = {keys.get(key)!r}: {what} are not supported")
    activation = keys.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise keys.unsupported(f"hidden_act {activation!r} is not supported; silu is")
    architectures = keys.get("architectures") or []
    if not isinstance(architectures, list):
        raise keys.error("architectures", architectures, "a list of names")
    for name in architectures:
        if not str(name).endswith("ForCausalLM"):
            raise keys.unsupported(f"architecture {name!r} is not a causal language model (…ForCausalLM)")
    if keys.get("attention_bias") and family in ("mistral", "qwen2"):
        raise keys.unsupported(f"attention_bias is not a setting of {family}")
    if keys.get("mlp_bias") and family != "llama":
        raise keys.unsupported(f"mlp_bias is not a setting of {family}")


def _windows(keys: Keys, family: str, n_layers: int) -> tuple[int, ...]:
    """The sliding window of each layer."""
    types = keys.get("layer_types")
    kinds = ("full_attention", "sliding_attention")
    if types is not None and not (isinstance(types, list) and len(types) == n_layers and all(t in kinds for t in types)):
        raise keys.error("layer_types", types, f"a list of {n_layers} times full_attention or sliding_attention")
    if family in ("qwen2", "qwen3"):
        window = keys.integer("sliding_window", _QWEN_WINDOW) if keys.flag("use_sliding_window", False) else 0
        first = keys.get("max_window_layers")
        first = _QWEN_WINDOW_LAYERS if first is None else first
        if not isinstance(first, int) or first < 0:
            raise keys.error("max_window_layers", first, "a whole number")
        sliding = [i >= first for i in range(n_layers)] if types is None else [t == "sliding_attention" for t in types]
        if types is not None and any(sliding) and not window:
            raise keys.error("use_sliding_window", False, "true where layer_types names sliding_attention")
        return tuple(window if slides else 0 for slides in sliding)
    if family == "llama" and keys.get("sliding_window") is not None:
        raise keys.unsupported("sliding_window is not a setting of llama")
    absent = family == "mistral" and "sliding_window" not in keys.values
    window = _MISTRAL_WINDOW if absent else 0 if keys.get("sliding_window") is None else keys.integer("sliding_window")
    expected = "sliding_attention" if window else "full_attention"
    if types is not None and set(types) != {expected}:
        raise keys.error("layer_types", types, f"{expected} in every layer of a {family} model with this sliding_window")
    return (window,) * n_layers
