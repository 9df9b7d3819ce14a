"""Trained drafters on disk, and what is known of one besides its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from specdec.models.heads import Head, HeadConfig


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A trained head in memory, in float modules on the CPU."""

    name: str
    """What it was asked for as."""
    head: Head
    vocabulary_ids: Tensor | None = None
    """int64 [Vd], the target's id of each token that the head can draft; None where it drafts all of them."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Where it comes from: data, command, hours, versions."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """What was measured of it, such as its accuracy by step and rank."""

    @property
    def config(self) -> HeadConfig:
        return self.head.config
