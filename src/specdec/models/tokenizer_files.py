"""What lies beside tokenizer.json in a Hugging Face folder: settings, special tokens and chat templates."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from specdec.models.errors import ModelError

NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
"""The special tokens that have a role of their own."""


def prefix_ids(backend: Backend, adds_bos: object, bos: str | None) -> tuple[int, ...]:
    """What the tokenizer puts before a text; an explicit ``add_bos_token`` setting overrides its post-processor.

    What it would put after the text is left out: the text is to be continued.
    """
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    start = next(i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare)
    prefix = tuple(full[:start])
    bos_id = None if bos is None else backend.token_to_id(bos)
    if adds_bos is True and bos_id is not None and bos_id not in prefix:
        return (bos_id, *prefix)
    if adds_bos is False:
        return tuple(i for i in prefix if i != bos_id)
    return prefix


def register_special(backend: Backend, settings: Mapping[str, Any], named: Iterable[str]) -> None:
    """Make sure that the special tokens which the settings list are found in text and left out of decoded text."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed = settings.get("added_tokens_decoder", {}).values()
    wanted = {token["content"]: bool(token.get("special")) for token in listed} | dict.fromkeys(named, True)
    for text, special in wanted.items():
        if backend.token_to_id(text) is None or (text in known and known[text].special >= special):
            continue
        token = AddedToken(text, special=special, normalized=False)
        (backend.add_special_tokens if special else backend.add_tokens)([token])


def read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: from files of their own, else from the settings."""
    templates: dict[str, str] = {}
    source = read_settings(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(source, str):
        templates["default"] = source
    elif isinstance(source, list):
        templates.update({entry["name"]: entry["template"] for entry in source})
    if (file := folder / "chat_template.jinja").is_file():
        templates["default"] = _read_template(file)
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_template(file)
    if templates and "default" not in templates:
        raise ModelError(f"{folder} has the chat templates {', '.join(templates)} but none called default")
    return templates


def read_settings(path: Path) -> dict[str, Any]:
    """A file of settings, or none where there is no such file.

    Raises:
        ModelError: it is no JSON object, or a setting that is used here is not of its form; the message names both.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate, which JSON can spell, is no text
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    for key, (fits, form) in _FORMS.items():
        if key in value and not fits(value[key]):
            raise ModelError(f"{path}: {key} must be {form}, got {reprlib.repr(value[key])}")
    return value


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text: {error}") from error


def token_text(value: object) -> str | None:
    """A special token in a settings file is its text or an object around it."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _are_added_tokens(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(t, dict) and isinstance(t.get("content"), str) for t in value.values())


def _are_templates(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(t, dict) and all(isinstance(t.get(key), str) for key in ("name", "template")) for t in value)
    return value is None or isinstance(value, str)


_FORMS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(NAMED, (lambda v: v is None or token_text(v) is not None, "a token's text, or an object with its content")),
    "added_tokens_decoder": (_are_added_tokens, "an object of objects, each with a token's content"),
    "add_bos_token": (lambda v: v is None or isinstance(v, bool), "true or false"),
    "chat_template": (_are_templates, "text, or a list of objects, each with a name and a template"),
}
"""The settings that are used here and what each may look like."""
