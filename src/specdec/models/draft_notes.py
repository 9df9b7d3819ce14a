"""What the folder of a trained draft model says beside the model: which tokens it drafts, where it comes from, how good it is.

The folder is a model like any other; this file is for drafting alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from specdec.models.checkpoint import read_json
from specdec.models.errors import ModelError
from specdec.models.head_files import replace_file

FILE: Final = "draft.json"


@dataclass(frozen=True, slots=True)
class DraftNotes:
    """Notes on a draft model."""

    vocabulary_ids: Tensor | None = None
    """int64 [n], increasing: the tokens that it was trained to draft; None for all."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)


def save_notes(folder: Path, notes: DraftNotes) -> None:
    """Write notes into the folder of a model.

    Raises:
        ModelError: they cannot be written.
    """
    ids = None if notes.vocabulary_ids is None else notes.vocabulary_ids.tolist()
    values = {"vocabulary_ids": ids, "provenance": dict(notes.provenance), "measured": dict(notes.measured)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / FILE, json.dumps(values).encode())
    except OSError as error:
        raise ModelError(f"{folder / FILE} could not be written ({error})") from error


def read_notes(folder: Path, vocab_size: int) -> DraftNotes:
    """The notes in the folder of a model; empty ones where there are none.

    Raises:
        ModelError: they are damaged, or name tokens that the model has not.
    """
    path = folder / FILE
    if not path.exists():
        return DraftNotes()
    values = read_json(path)
    ids, facts = values.get("vocabulary_ids"), [values.get(key, {}) for key in ("provenance", "measured")]
    if not all(isinstance(fact, dict) for fact in facts):
        raise ModelError(f"{path}: provenance and measured must be objects")
    if ids is None:
        return DraftNotes(None, *facts)
    right = isinstance(ids, list) and ids and all(type(i) is int for i in ids)
    if not right or ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < vocab_size:
        raise ModelError(f"{path}: vocabulary_ids must be different tokens of the model, 0 to {vocab_size - 1}, in order")
    return DraftNotes(torch.tensor(ids, dtype=torch.int64), *facts)
