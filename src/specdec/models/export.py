"""A model as a folder in Hugging Face's layout, which this engine and others load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from safetensors.torch import save
from torch import Tensor

from specdec.models.architecture import Architecture
from specdec.models.errors import ModelError
from specdec.models.head_files import replace_file
from specdec.models.layers import Rope
from specdec.models.tokenizer import Tokenizer

_CLASSES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_ROPE_KEYS: Final = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    "longrope": ("attention_factor", "short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def save_model(folder: Path, architecture: Architecture, tensors: Mapping[str, Tensor], tokenizer: Tokenizer) -> None:
    """Write a model. config.json comes last: an interrupted folder is no model, or still the one it was.

    Args:
        folder: made if it is not there.
        tensors: by Hugging Face's names, in the type that they are to have.

    Raises:
        ModelError: the folder cannot be written, or the layout has no place for something in the architecture.
    """
    config = to_config(architecture)
    config["torch_dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    weights = save({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, metadata={"format": "pt"})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in tokenizer.files().items():
            replace_file(folder / name, text.encode())
        replace_file(folder / "model.safetensors", weights)
        replace_file(folder / "config.json", json.dumps(config, indent=1).encode())
    except OSError as error:
        raise ModelError(f"{folder}: the model could not be written ({error})") from error


def to_config(a: Architecture) -> dict[str, Any]:
    """The config.json that ``architecture.from_config`` reads as the same architecture.

    Raises:
        ModelError: there is none.
    """
    sliding = {window for window in a.windows if window}
    family = "mistral" if a.family == "llama" and sliding else a.family
    if len(sliding) > 1 or (family == "mistral" and 0 in a.windows and sliding):
        raise ModelError(f"a {family} model in Hugging Face's layout cannot have the sliding windows {a.windows}")
    if a.qkv_bias != (a.out_bias or family == "qwen2"):
        raise ModelError(f"a {family} model in Hugging Face's layout has biases in all projections of attention or in none")
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": [_CLASSES[family]],
        "vocab_size": a.vocab_size,
        "hidden_size": a.hidden_size,
        "num_hidden_layers": a.n_layers,
        "num_attention_heads": a.n_heads,
        "num_key_value_heads": a.n_kv_heads,
        "head_dim": a.head_dim,
        "intermediate_size": a.ffn_size,
        "max_position_embeddings": a.context,
        "rms_norm_eps": a.rms_eps,
        "rope_theta": a.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": a.tied,
        "eos_token_id": sorted(a.end_tokens) or None,
    }
    if a.out_bias:
        config["attention_bias"] = True
    if a.mlp_bias:
        config["mlp_bias"] = True
    if family == "mistral":
        config["sliding_window"] = max(sliding, default=None)
    if family in ("qwen2", "qwen3") and sliding:
        config |= {"use_sliding_window": True, "sliding_window": max(sliding)}
        config["layer_types"] = ["sliding_attention" if window else "full_attention" for window in a.windows]
    if a.rope.kind != "default":
        config["rope_scaling"] = _rope_scaling(a.rope)
    return config


def _rope_scaling(rope: Rope) -> dict[str, Any]:
    if rope.kind == "divided":
        # Divisors that hold for every length are LongRoPE's with no border between short and long.
        factors = list(rope.short_factor)
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": rope.context,
        }
    values = {key: getattr(rope, key) for key in _ROPE_KEYS[rope.kind]}
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    scaling |= {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    if rope.original_context:
        scaling["original_max_position_embeddings"] = rope.original_context
    return scaling
