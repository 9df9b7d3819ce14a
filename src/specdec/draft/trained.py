"""From the name of a trained drafter to one that runs, whatever kind it is of.

The drafters themselves are imported when they are needed.
"""

from __future__ import annotations

from typing import Any

from specdec.config import AUTO, ConfigError, SpeculationConfig
from specdec.draft.base import Drafter, Target
from specdec.models.decoder import Decoder
from specdec.models.draft_notes import DraftNotes, read_notes
from specdec.models.fingerprint import Fingerprint
from specdec.models.head_files import LoadedHead, is_head, load_head, shipped_head
from specdec.models.load import load_model
from specdec.models.source import Source, resolve_drafter
from specdec.types import Siblings


def trained(config: SpeculationConfig, target: Target, draws: Siblings | None = None) -> Drafter | None:
    """The trained drafter that a configuration names; None where it leaves the choice open and none ships for the model.

    Raises:
        ModelError: it is not there, cannot be read, or was made for another model.
        ConfigError: none ships for the model, or the model is of a kind that has no trained drafters.
    """
    model = target.model
    if not isinstance(model, Decoder):
        if _optional(config):
            return None
        raise ConfigError(f"trained drafters need a model whose weights are known, and a {type(model).__name__} has none")
    fingerprint = Fingerprint.of(model, "this model")
    source = shipped_head(fingerprint) if config.trained in (None, AUTO) else resolve_drafter(str(config.trained))
    if source is None:
        if _optional(config):
            return None
        raise ConfigError(
            "no trained drafter ships for this model: name one (--drafter with a folder, a hub id or a model to draft with), "
            "or leave trained out of --speculation"
        )
    if source.kind == "gguf" or not is_head(source.path):
        return _draft_model(source, config, target, draws)
    return _head(load_head(source.path, fingerprint, name=source.name), config, target, draws)


def _optional(config: SpeculationConfig) -> bool:
    """Was no drafter asked for by name?"""
    return config.trained == AUTO and config.drafters == SpeculationConfig().drafters


def _head(loaded: LoadedHead, config: SpeculationConfig, target: Target, draws: Siblings | None) -> Drafter:
    drafter: Drafter
    if loaded.config.recurrent:
        from specdec.draft.recurrent import RecurrentDrafter

        drafter = RecurrentDrafter(loaded, target, config, draws)
    else:
        from specdec.draft.medusa import MedusaDrafter

        drafter = MedusaDrafter(loaded, target, config, draws)
    made_for = loaded.target.name if loaded.target else loaded.provenance.get("made for")
    drafter.card = _card(
        loaded.name,
        loaded.config.kind,
        drafter,
        parameters=sum(p.numel() for p in loaded.head.parameters()),
        vocabulary=loaded.config.n_outputs,
        provenance={**loaded.provenance, "made for": made_for},
        measured=dict(loaded.measured),
    )
    return drafter


def _draft_model(source: Source, config: SpeculationConfig, target: Target, draws: Siblings | None) -> Drafter:
    from specdec.draft.model import ModelDrafter

    model = load_model(source, config.trained_precision, target.kernels, target.model.device)
    notes = read_notes(source.path, model.shape.vocab_size) if source.kind == "folder" else DraftNotes()
    drafter = ModelDrafter(model, target, config, "draft", notes.vocabulary_ids, draws)
    a = model.architecture
    drafter.card = _card(
        source.name,
        f"{a.family} with {a.n_layers} layers",
        drafter,
        parameters=None,
        vocabulary=a.vocab_size if notes.vocabulary_ids is None else len(notes.vocabulary_ids),
        provenance=dict(notes.provenance),
        measured=dict(notes.measured),
    )
    return drafter


def _card(name: str, kind: str, drafter: Drafter, **facts: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, "bytes": drafter.n_bytes, **facts}
