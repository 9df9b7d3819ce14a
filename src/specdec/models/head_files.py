"""Trained drafters on disk: a folder with config.json and the weights that it names, written whole or not at all.

Weights are written first, under a name made of their hash, and config.json is replaced last: whenever the writer is
interrupted, the folder holds the old drafter or the new one. Drafters that others published are read too (published.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save
from torch import Tensor

from specdec.config import ConfigError, from_dict
from specdec.models import published
from specdec.models.checkpoint import open_shard, read_json
from specdec.models.errors import ModelError
from specdec.models.fingerprint import Fingerprint
from specdec.models.head_config import HeadConfig
from specdec.models.heads import Head, filled, is_vocabulary
from specdec.models.source import Source, shipped_heads

MODEL_TYPE: Final = "specdec_head"
FORMAT: Final = 1
_IDS: Final = "vocabulary_ids"
_KEYS: Final = {"model_type", "format", "head", "target", "weights", "provenance", "measured"}


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A trained head in memory, in float32 modules on the CPU."""

    name: str
    """What it was asked for as."""
    head: Head
    vocabulary_ids: Tensor | None = None
    """int64 [Vd], the target's id of each token that the head can draft; None where it drafts all of them."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Where it comes from: data, command, hours, versions."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """What was measured of it, such as its accuracy by step and rank."""
    target: Fingerprint | None = None
    """The model that it was trained for; None where the file does not say."""
    weights: str = ""
    """The file of its weights, which their digest names; empty for layouts of others."""

    @property
    def config(self) -> HeadConfig:
        return self.head.config


def save_head(
    folder: Path,
    head: Head,
    *,
    target: Fingerprint,
    vocabulary_ids: Tensor | None = None,
    provenance: Mapping[str, Any] | None = None,
    measured: Mapping[str, Any] | None = None,
) -> None:
    """Write a head, in the type that its parameters have; one that is there already is replaced.

    Args:
        folder: made if it is not there.
        head: float32 or bfloat16 modules.
        target: the model that it was trained for.
        vocabulary_ids: int [config.vocabulary], the target's id of each token that the head can draft.
        provenance, measured: what JSON can hold.

    Raises:
        ModelError: the folder cannot be written (the disk is full, say); what it held before is still there.
        ValueError: the head, its vocabulary and its target do not go together.
    """
    _check_sizes(head.config, target)
    tensors = {name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()}
    if odd := {value.dtype for value in tensors.values()} - {torch.float32, torch.bfloat16}:
        raise ValueError(f"heads are saved in float32 or bfloat16, got {odd.pop()}")
    if vocabulary_ids is not None or head.config.vocabulary is not None:
        tensors[_IDS] = _checked_ids(vocabulary_ids, head.config).to(torch.int32)
    weights = save(tensors)
    name = f"model-{hashlib.sha256(weights).hexdigest()[:16]}.safetensors"
    config = {
        "model_type": MODEL_TYPE,
        "format": FORMAT,
        "head": dataclasses.asdict(head.config),
        "target": target.to_json(),
        "weights": name,
        "provenance": dict(provenance or {}),
        "measured": dict(measured or {}),
    }
    text = json.dumps(config, indent=1, allow_nan=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / name, weights)
        replace_file(folder / "config.json", text.encode())
    except OSError as error:
        raise ModelError(
            f"{folder}: the trained drafter could not be written ({error}); what was there is still there"
        ) from error
    for old in folder.glob("model-*.safetensors"):
        if old.name != name:
            old.unlink(missing_ok=True)


def shipped_head(target: Fingerprint) -> Source | None:
    """The trained head that ships for a model, if one does."""
    for name, folder in shipped_heads().items():
        made_for = Fingerprint.from_json(read_json(folder / "config.json")["target"])
        if made_for.difference(target) is None:
            return Source(name, "folder", folder)
    return None


def is_head(folder: Path) -> bool:
    """Does a folder hold a trained head, of ours or published, rather than a model?"""
    values = read_json(folder / "config.json")
    return values.get("model_type") == MODEL_TYPE or published.is_head(folder, values)


def load_head(folder: Path, target: Fingerprint | None = None, *, name: str | None = None) -> LoadedHead:
    """Read a trained head: of our own layout, or one that others published.

    Args:
        folder: where it lies.
        target: the model that it shall draft for. It must be the one that the head was made for. Published layouts need it:
            they leave out which layers of the target they read.
        name: what it was asked for as; the folder, if not given.

    Raises:
        ModelError: a file is missing or damaged, the layout or something in it is not supported, or the head was made for
            another model; the message names the file and the reason.
    """
    values = read_json(folder / "config.json")
    name = name or str(folder)
    if values.get("model_type") != MODEL_TYPE:
        if target is None:
            raise ModelError(f"{folder} is of a published layout, which can only be read for a target")
        return LoadedHead(name, *published.convert(folder, values, target))
    path = folder / "config.json"
    if values.get("format") != FORMAT:
        raise ModelError(f"{path}: format {values.get('format')!r} is not supported by this version, which reads {FORMAT}")
    if odd := sorted(set(values) ^ _KEYS):
        raise ModelError(f"{path} has {odd[0]} too much or too little; its keys are {', '.join(sorted(_KEYS))}")
    try:
        made_for = Fingerprint.from_json(values["target"])
        config = from_dict(HeadConfig, {**values["head"], "taps": tuple(values["head"].get("taps", ()))})
        _check_sizes(config, made_for)
    except (ConfigError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from error
    if target is not None and (difference := made_for.difference(target)):
        raise ModelError(f"{folder} was trained for {made_for.name}, and this model is another: {difference}")
    weights = Path(values["weights"]).name
    head, ids = _read(folder / weights, config)
    return LoadedHead(name, head, ids, values["provenance"], values["measured"], made_for, weights)


def _read(path: Path, config: HeadConfig) -> tuple[Head, Tensor | None]:
    """The head whose weights a file holds, and what it can draft, if that is not everything."""
    with open_shard(path) as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
    ids = tensors.pop(_IDS, None)
    try:
        head = filled(config, tensors)
        return head, None if ids is None and config.vocabulary is None else _checked_ids(ids, config)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error


def _checked_ids(ids: Tensor | None, config: HeadConfig) -> Tensor:
    """The vocabulary of a head as int64, if it is one."""
    if ids is None or config.vocabulary is None:
        raise ValueError("a head has vocabulary ids if, and only if, its config has a vocabulary")
    if ids.shape != (config.vocabulary,):
        raise ValueError(f"a vocabulary of {config.vocabulary} tokens needs as many ids, got {list(ids.shape)}")
    ids = ids.to("cpu", torch.int64)
    if not is_vocabulary(ids, config.vocab_size):
        raise ValueError(f"vocabulary ids must be different tokens below {config.vocab_size}")
    return ids


def _check_sizes(config: HeadConfig, target: Fingerprint) -> None:
    if (config.hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
        raise ValueError(
            f"a head for hidden size {config.hidden_size} and {config.vocab_size} tokens does not fit {target.name}, which has "
            f"{target.hidden_size} and {target.vocab_size}"
        )
    if config.taps[-1] >= target.n_layers:
        raise ValueError(f"the head taps layer {config.taps[-1]} of {target.name}, which has layers 0 to {target.n_layers - 1}")


def replace_file(path: Path, data: bytes) -> None:
    """Write a file under a name of its own and rename it when all of it is on the disk."""
    handle, scratch = tempfile.mkstemp(prefix=".writing-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(scratch).chmod(0o644)
        Path(scratch).replace(path)
    finally:
        Path(scratch).unlink(missing_ok=True)
