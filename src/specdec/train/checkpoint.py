"""A training run on disk: everything needed to go on as if it had never stopped, written wholly or not at all."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch

from specdec.config import ConfigError
from specdec.train.features import write
from specdec.train.settings import FREE, TrainConfig

FILE, SETTINGS = "checkpoint.pt", "settings.json"


def save(folder: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint of a run.

    Raises:
        ConfigError: it cannot be written; the one before is unharmed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write(folder / FILE, buffer.getvalue())


def load(folder: Path) -> dict[str, Any] | None:
    """The checkpoint of a run; None where there is none yet.

    Raises:
        ConfigError: it is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception as error:
        raise ConfigError(f"{path} is damaged ({error}): delete it to start anew") from error
    return state


def agree(folder: Path, config: TrainConfig, **about: Any) -> None:
    """Note the settings of a new run, or check that a run that is taken up again has the same ones.

    Args:
        about: what else must stay the same, such as the model.

    Raises:
        ConfigError: some differ; the message names them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SETTINGS
    now = json.loads(json.dumps({**config.as_dict(), **about}))
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is damaged ({error}): choose another folder") from error
        other = sorted(key for key in now.keys() | before.keys() if key not in FREE and now.get(key) != before.get(key))
        if other:
            changes = ", ".join(f"{key} was {before.get(key)!r} and is now {now.get(key)!r}" for key in other)
            raise ConfigError(
                f"{folder} holds a run with other settings: {changes}. Choose another folder, or the same settings"
            )
    write(path, json.dumps(now, indent=1).encode())
