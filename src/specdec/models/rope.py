"""Rotary settings out of the files that hold them, under every name they have had."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from specdec.models.errors import ModelError
from specdec.models.keys import Keys
from specdec.models.layers import Rope, RopeKind

# What a scaling means by a key that it leaves out.
_THETA: Final = 10_000.0
_BETA_FAST: Final = 32.0
_BETA_SLOW: Final = 1.0

_ROPE_KEYS: Final[dict[RopeKind, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ROPE_COMMON: Final = (
    "type",
    "rope_type",
    "rope_theta",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "finetuned",
)


def rope_from_config(keys: Keys, head_dim: int, context: int) -> Rope:
    """Rotary settings, under the old names (rope_theta, rope_scaling with type or rope_type) or the new rope_parameters."""
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    values = keys.get(name) or {}
    if not isinstance(values, Mapping):
        raise keys.error(name, values, "an object")
    rope = Keys(values, keys.path)
    kind: RopeKind = values.get("rope_type") or values.get("type") or "default"
    if kind not in _ROPE_KEYS:
        raise keys.unsupported(f"{name} of type {kind!r} is not supported; known types: {', '.join(_ROPE_KEYS)}")
    unknown = {key for key in values if values[key] is not None} - {*_ROPE_KEYS[kind], *_ROPE_COMMON}
    if unknown:
        known = ", ".join(("rope_theta", "original_max_position_embeddings", *_ROPE_KEYS[kind]))
        raise ModelError(f"{keys.path}: {name} of type {kind} has unknown keys {', '.join(sorted(unknown))}; known: {known}")
    if keys.number("partial_rotary_factor", 1.0) != 1 or rope.number("partial_rotary_factor", 1.0) != 1:
        raise keys.unsupported("partial_rotary_factor other than 1 is not supported")
    named = "original_max_position_embeddings"  # some files keep it beside the scaling, which then counts
    original = (rope if keys.get(named) is None else keys).integer(named, context)
    theta = rope.number("rope_theta", keys.number("rope_theta", _THETA))
    return make_rope(rope, kind, head_dim=head_dim, theta=theta, context=context, original_context=original)


def make_rope(rope: Keys, kind: RopeKind, *, head_dim: int, theta: float, context: int, original_context: int) -> Rope:
    """A Rope from the scaling's own keys, checked for its kind."""
    settings: dict[str, Any] = {"kind": kind, "dim": head_dim, "theta": theta, "context": context}
    if kind in ("linear", "dynamic", "llama3"):
        settings["factor"] = rope.number("factor")
    if kind in ("yarn", "longrope", "llama3"):
        settings["original_context"] = original_context
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", high, f"above low_freq_factor ({low})")
        settings |= {"low_freq_factor": low, "high_freq_factor": high}
    if kind == "longrope":
        settings |= {key: rope.numbers(key, head_dim // 2) for key in ("short_factor", "long_factor")}
        factor = rope.number("factor", context / original_context)
        default = math.sqrt(1 + math.log(factor) / math.log(original_context)) if factor > 1 else 1.0
        settings["attention_factor"] = rope.number("attention_factor", default)
    if kind == "yarn":
        factor = rope.number("factor", context / original_context)
        settings |= {"factor": factor, "attention_factor": rope.number("attention_factor", _yarn_attention(rope, factor))}
        settings |= {"beta_fast": rope.number("beta_fast", _BETA_FAST), "beta_slow": rope.number("beta_slow", _BETA_SLOW)}
        settings["truncate"] = rope.flag("truncate", True)
    return Rope(**settings)


def _yarn_attention(rope: Keys, factor: float) -> float:
    """YaRN's temperature, 0.1 ln(factor) + 1, or the ratio of two of them where both mscale keys are given."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)
