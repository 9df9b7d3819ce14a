"""Trained heads that others published, as ours: the layouts of EAGLE-1, -2 and -3, of Medusa, and of the speculators library.

A head is recognised by its config.json and the names of its tensors. It becomes a HeadConfig and the weights of our modules
that compute the same; what they cannot compute is refused with its reason.

Two conventions of these layouts are easy to get wrong. The draft-to-target table ``d2t`` holds offsets: draft token i is
token i + d2t[i]. And the three layers that EAGLE-3 reads are named by what goes *into* them, 2, L // 2 and L - 3; our taps
are outputs of layers, so they are one less.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from specdec.config import ConfigError
from specdec.models.errors import ModelError
from specdec.models.fingerprint import Fingerprint
from specdec.models.head_config import HeadConfig, HeadKind
from specdec.models.heads import Head, filled, is_vocabulary
from specdec.models.keys import Keys
from specdec.models.rope import rope_from_config
from specdec.models.tensor_folder import TensorFolder

SPECULATORS: Final[tuple[HeadKind, ...]] = ("eagle", "eagle3")
"""Kinds of heads of the speculators library that are supported."""

# What a key means that config.json leaves out.
_RMS_EPS: Final = 1e-6
_CONTEXT: Final = 2048

_REFUSED: Final = {
    "norm_before_fc": "a norm before the features are joined",
    "fc_norm": "a norm before the features are joined",
    "norm_output": "states that are normed before they are fed back",
    "layernorms": "norms around the product that joins embedding and feature",
    "attention_bias": "biases in attention",
    "qkv_bias": "biases in attention",
    "mlp_bias": "biases in the feed-forward part",
    "quantization_config": "weights that another library has quantised",
    "logit_scale": "scaled logits",
    "parallel_drafting": "parallel drafting",
    "num_experts": "mixtures of experts",
    "num_local_experts": "mixtures of experts",
    "n_routed_experts": "mixtures of experts",
}
_UNUSED: Final = re.compile(r"(.*\.)?rotary_emb\.inv_freq|verifier_norm\.weight|verifier_lm_head\.weight")
"""Tensors that some files hold beside the head: frequencies, which the config gives, and parts of the target for training."""

_MEDUSA: Final = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
_FUSION: Final = ("fc.weight", "fusion_fc.weight", "midlayer.self_attn.q_proj.weight")

Converted = tuple[Head, Tensor | None, dict[str, Any]]
"""The head, its vocabulary (int64 [Vd], target ids) if that is not the target's, and what is known of its origin."""


def is_head(folder: Path, values: Mapping[str, Any]) -> bool:
    """Is a folder with this config.json a published head?"""
    return "speculators_model_type" in values or "medusa_num_heads" in values or _is_eagle(TensorFolder(folder))


def convert(folder: Path, values: Mapping[str, Any], target: Fingerprint) -> Converted:
    """Read a published head for a target.

    Args:
        folder: where it lies.
        values: its parsed config.json.
        target: the model that it shall draft for, whose layers and sizes the layouts take as known.

    Raises:
        ModelError: the layout, or something in it, is not supported or does not fit the target.
    """
    path, tensors = folder / "config.json", _Tensors(TensorFolder(folder))
    named = values.get("speculators_model_type")
    if named is not None:
        kind = next((kind for kind in SPECULATORS if kind == named), None)
        if kind is None:
            raise ModelError(f"{path}: speculators_model_type {named!r} is not supported; {' and '.join(SPECULATORS)} are")
        inner = values.get("transformer_layer_config")
        if not isinstance(inner, Mapping):
            raise Keys(values, path).error("transformer_layer_config", inner, "an object")
        verifier = (values.get("speculators_config") or {}).get("verifier") or {}
        origin = {"layout": f"speculators {kind}", "made for": verifier.get("name_or_path")}
        return _eagle(Keys({**inner, **_outer(values)}, path), tensors, kind, target, origin)
    if "medusa_num_heads" in values:
        origin = {"layout": "Medusa", "made for": values.get("base_model_name_or_path")}
        return _medusa(Keys(values, path), tensors, target, origin)
    if not _is_eagle(tensors.folder):
        raise ModelError(f"{folder} is no trained head of a known layout: EAGLE, Medusa, speculators or specdec's own")
    kind = "eagle3" if tensors.has("midlayer.hidden_norm.weight") or tensors.has("layers.0.hidden_norm.weight") else "eagle"
    return _eagle(Keys(values, path), tensors, kind, target, {"layout": "EAGLE-3" if kind == "eagle3" else "EAGLE"})


def _is_eagle(folder: TensorFolder) -> bool:
    return any(name.removeprefix("model.") in _FUSION for name in folder.names)


def _outer(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a speculators config beside those of its layer."""
    outside = ("transformer_layer_config", "architectures", "model_type")
    return {key: value for key, value in values.items() if key not in outside and value is not None}


class _Tensors:
    """Tensors under the names of the layout, without a ``model.`` before them; it remembers which were taken."""

    def __init__(self, folder: TensorFolder) -> None:
        self.folder = folder
        self._names = {name.removeprefix("model."): name for name in folder.names}
        self._left = set(self._names)

    def __iter__(self) -> Any:
        return iter(self._names)

    def has(self, name: str) -> bool:
        return name in self._names

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape."""
        if not self.has(name):
            raise ModelError(f"{self.folder.path}: tensor {name} is missing")
        value = self.folder[self._names[name]]
        if value.shape != shape:
            raise ModelError(f"{self.folder.path}: tensor {name} has shape {list(value.shape)}, the head needs {list(shape)}")
        self._left.discard(name)
        return value

    def check_all_used(self) -> None:
        """Raise where there is a tensor that was not taken: it would be something that is not computed."""
        if left := sorted(name for name in self._left if not _UNUSED.fullmatch(name)):
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelError(
                f"{self.folder.path} holds tensor {left[0]}{more}, for which a head of this layout has no place: "
                "it is a variant that is not supported"
            )


def _eagle(keys: Keys, tensors: _Tensors, kind: HeadKind, target: Fingerprint, origin: dict[str, Any]) -> Converted:
    """EAGLE-1 and -2 (``eagle``) or EAGLE-3."""
    _refuse(keys)
    _check_fits(keys, target)
    d, n_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    n_kv, head_dim = keys.integer("num_key_value_heads", n_heads), keys.integer("head_dim", d // n_heads)
    ffn = keys.integer("intermediate_size")
    rope = rope_from_config(keys, head_dim, keys.integer("max_position_embeddings", _CONTEXT))
    if rope.kind != "default":
        raise keys.unsupported(f"rotary positions of kind {rope.kind} are not supported in a trained head")
    fc = "fusion_fc" if tensors.has("fusion_fc.weight") else "fc"
    at = next(
        (p for p in ("midlayer.", "layers.0.", "transformer.") if tensors.has(f"{p}self_attn.q_proj.weight")), "layers.0."
    )
    three = kind == "eagle3"
    taps, width = (_taps(keys, target.n_layers), 2 * d) if three else ((target.n_layers - 1,), d)
    parts: dict[str, Tensor] = {}
    if three:
        parts["fuse.weight"] = tensors.take(f"{fc}.weight", d, len(taps) * d)
        parts["embedding_norms.0.weight"] = tensors.take(f"{at}input_layernorm.weight", d)
        parts["state_norms.0.weight"] = tensors.take(f"{at}hidden_norm.weight", d)
        parts["norms.0.weight"] = tensors.take("norm.weight", d)
    else:
        parts["joins.0.weight"] = tensors.take(f"{fc}.weight", d, 2 * d)
    bias = tensors.has(f"{fc}.bias")
    if bias:
        parts["fuse.bias" if three else "joins.0.bias"] = tensors.take(f"{fc}.bias", d)

    def stack(module: str, sizes: Mapping[str, int], columns: int) -> Tensor:
        return torch.cat([tensors.take(f"{at}{module}.{name}_proj.weight", n, columns).float() for name, n in sizes.items()])

    parts["layers.0.qkv.weight"] = stack(
        "self_attn", {"q": n_heads * head_dim, "k": n_kv * head_dim, "v": n_kv * head_dim}, width
    )
    parts["layers.0.out.weight"] = stack("self_attn", {"o": d}, n_heads * head_dim)
    parts["layers.0.ffn_norm.weight"] = tensors.take(f"{at}post_attention_layernorm.weight", d)
    parts["layers.0.gate_up.weight"] = stack("mlp", {"gate": ffn, "up": ffn}, d)
    parts["layers.0.down.weight"] = stack("mlp", {"down": d}, ffn)
    ids = _vocabulary(keys, tensors, target.vocab_size)
    if tensors.has("lm_head.weight"):
        rows = target.vocab_size if ids is None else len(ids)
        parts["outputs.0.weight"] = tensors.take("lm_head.weight", rows, d)
    if tensors.has("embed_tokens.weight"):
        parts["embedding.weight"] = tensors.take("embed_tokens.weight", target.vocab_size, d)
    config = _config(
        keys,
        kind=kind,
        taps=taps,
        normed=not three,
        hidden_size=d,
        vocab_size=target.vocab_size,
        vocabulary=None if ids is None else len(ids),
        own_output="outputs.0.weight" in parts,
        own_embedding="embedding.weight" in parts,
        rms_eps=keys.number("rms_norm_eps", _RMS_EPS),
        n_heads=n_heads,
        n_kv_heads=n_kv,
        head_dim=head_dim,
        ffn_size=ffn,
        rope_theta=rope.theta,
        fc_bias=bias,
        normed_residual=three and keys.flag("norm_before_residual", False),
    )
    return _made(config, parts, tensors), ids, origin


def _medusa(keys: Keys, tensors: _Tensors, target: Fingerprint, origin: dict[str, Any]) -> Converted:
    """Heads with an output matrix each, over the state that the target's own output matrix multiplies."""
    found = {match.groups() for match in map(_MEDUSA.fullmatch, tensors) if match}
    depth = 1 + max((int(k) for k, _, _ in found), default=-1)
    blocks = keys.integer("medusa_num_layers")
    if depth < keys.integer("medusa_num_heads"):
        raise keys.error("medusa_num_heads", keys.get("medusa_num_heads"), f"{depth}, the heads that the weights hold")
    d, v, parts = target.hidden_size, target.vocab_size, {}
    prefix = next((p for p in ("medusa_head.", "medusa_heads.") if any(name.startswith(p) for name in tensors)), "")
    for k in range(depth):
        for i in range(blocks):
            for name, shape in (("weight", (d, d)), ("bias", (d,))):
                parts[f"heads.{k}.{i}.linear.{name}"] = tensors.take(f"{prefix}{k}.{i}.linear.{name}", *shape)
        parts[f"outputs.{k}.weight"] = tensors.take(f"{prefix}{k}.{blocks}.weight", v, d)
    config = _config(
        keys,
        kind="medusa",
        taps=(target.n_layers - 1,),
        normed=True,
        hidden_size=d,
        vocab_size=v,
        own_output=True,
        depth=depth,
        blocks=blocks,
    )
    return _made(config, parts, tensors), None, origin


def _made(config: HeadConfig, parts: Mapping[str, Tensor], tensors: _Tensors) -> Head:
    tensors.check_all_used()
    try:
        return filled(config, parts)
    except ValueError as error:
        raise ModelError(f"{tensors.folder.path}: {error}") from error


def _config(keys: Keys, **settings: Any) -> HeadConfig:
    try:
        return HeadConfig(**settings)
    except ConfigError as error:
        raise keys.unsupported(str(error)) from error


def _refuse(keys: Keys) -> None:
    """Raise where a config asks for something that no module of ours computes."""
    for key, what in _REFUSED.items():
        value = keys.get(key)
        if value and not (key == "logit_scale" and value == 1):
            raise keys.unsupported(f"{key} = {value!r}: {what} are not supported in a trained head")
    if (activation := keys.get("hidden_act") or "silu") not in ("silu", "swish"):
        raise keys.unsupported(f"hidden_act {activation!r} is not supported; silu is")
    if (n := keys.integer("num_hidden_layers", 1)) != 1:
        raise keys.unsupported(f"num_hidden_layers is {n}, and a trained head of one layer is supported")


def _check_fits(keys: Keys, target: Fingerprint) -> None:
    """Raise where a head was made for a model of other sizes."""
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "target_hidden_size": target.hidden_size}
    for key, size in sizes.items():
        given = keys.integer(key, size if key == "target_hidden_size" else None)
        if given != size:
            raise keys.unsupported(f"{key} is {given:,}, and this model has {size:,}: the head was made for another model")


def _taps(keys: Keys, n_layers: int) -> tuple[int, ...]:
    """The layers whose outputs an EAGLE-3 head reads.

    Layers may be named at the top of a config, by what goes into them, or in its ``eagle_config``, where programs that read
    them disagree whether 2 means what goes into layer 2 or what comes out of it; there only the usual three are clear.
    """
    inputs = [2, n_layers // 2, n_layers - 3]
    usual = [layer - 1 for layer in inputs]
    inner = keys.get("eagle_config") or {}
    name = "eagle_aux_hidden_state_layer_ids"
    if inner.get("use_aux_hidden_state") is False:
        raise keys.unsupported("an EAGLE-3 head without features of inner layers (use_aux_hidden_state) is not supported")
    outer, nested = keys.get(name), inner.get(name)
    for given in (outer, nested):
        if given is not None and not (isinstance(given, list) and all(type(layer) is int for layer in given)):
            raise keys.error(name, given, "a list of layers")
    if nested is not None and nested not in (inputs, usual):
        raise keys.unsupported(
            f"eagle_config names layers {nested}, and programs disagree whether their inputs or outputs are meant; "
            f"{inputs} and {usual} are clear"
        )
    taps = usual if outer is None or outer in (inputs, usual) else [layer - 1 for layer in outer]
    if taps[0] < 0 or taps[-1] >= n_layers or sorted(set(taps)) != taps:
        raise keys.unsupported(f"the head reads the outputs of layers {taps}, and the model has layers 0 to {n_layers - 1}")
    return tuple(taps)


def _vocabulary(keys: Keys, tensors: _Tensors, vocab_size: int) -> Tensor | None:
    """The target's id of each token that a head can draft, int64 [Vd]; None where it drafts all of them in order."""
    size = keys.integer("draft_vocab_size", vocab_size)
    if not tensors.has("d2t"):
        if size != vocab_size:
            raise ModelError(
                f"{tensors.folder.path}: tensor d2t is missing, which gives the {size} tokens of the head their ids"
            )
        return None
    ids = torch.arange(size) + tensors.take("d2t", size).long()
    if not is_vocabulary(ids, vocab_size):
        raise ModelError(f"{tensors.folder.path}: d2t must lead to {size} different tokens below {vocab_size}")
    if tensors.has("t2d"):
        mask = tensors.take("t2d", vocab_size).bool()
        if int(mask.sum()) != size or not bool(mask[ids].all()):
            raise ModelError(f"{tensors.folder.path}: t2d and d2t name different tokens")
    return None if size == vocab_size and torch.equal(ids, torch.arange(size)) else ids
