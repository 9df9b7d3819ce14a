"""What a model's keys and values take, told without its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.bench.provenance import model_name
from specdec.config import ConfigError
from specdec.kv import codec
from specdec.models import checkpoint
from specdec.models.architecture import Architecture, from_config
from specdec.models.gguf_model import read_architecture
from specdec.models.source import resolve
from specdec.roofline import KV_BYTES, kv_bytes

KV_FORMATS = (*codec.DTYPES, *(name for name in KV_BYTES if name not in codec.DTYPES))
"""Formats of keys and values whose memory can be told: this engine's, then others'."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the keys and values of a model take."""

    model: str
    kv_format: str
    tokens: int
    per_token: int
    """Bytes, all layers together."""
    unshared: float
    """How many times that it would be if query heads did not share key heads."""

    @classmethod
    def of(cls, name: str, kv_format: str, tokens: int | None) -> Memory:
        """Of a model whose weights need not be there: a config.json, its folder, a .gguf file, an alias or a hub id.

        Layers with a sliding window count in full: their pool holds the whole context here.

        Args:
            tokens: of the longest sequence; None takes the model's context.

        Raises:
            ConfigError, ModelError: the format is unknown, or there is no such model.
        """
        if kv_format not in KV_FORMATS:
            raise ConfigError(f"kv format must be one of {', '.join(KV_FORMATS)}, got {kv_format!r}")
        a = _architecture(name)
        if kv_format in codec.DTYPES:
            codec.check_head(codec.DTYPES[kv_format], a.head_dim)
            entry = codec.bytes_of_row(codec.DTYPES[kv_format], a.head_dim) / a.head_dim
        else:
            entry = KV_BYTES[kv_format]
        per_token = kv_bytes(a.n_layers, a.n_kv_heads, a.head_dim, entry)
        n_tokens = a.context if tokens is None else tokens
        return cls(model_name(name), kv_format, n_tokens, per_token, a.n_heads / a.n_kv_heads)

    def as_dict(self, batches: Sequence[int]) -> dict[str, Any]:
        """As plain values, with the bytes of so many sequences."""
        return {**dataclasses.asdict(self), "bytes": {str(n): n * self.tokens * self.per_token for n in batches}}


def _architecture(name: str) -> Architecture:
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".json":
        return from_config(checkpoint.read_json(path), path)
    source = resolve(name)
    if source.kind == "gguf":
        return read_architecture(source.header)
    config = source.path / "config.json"
    return from_config(checkpoint.read_json(config), config)
