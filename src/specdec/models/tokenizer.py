"""Text to token ids and back, from a Hugging Face folder or from the metadata of a GGUF file.

Text that spells a control token is encoded as plain characters unless the caller says otherwise: only a chat template may
write control tokens.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Many
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from specdec.models.chat_template import ChatTemplate, ChatTemplateError, TemplateVariableError, has_control, strings
from specdec.models.errors import ModelError, TextError
from specdec.models.pieces import PieceRules
from specdec.models.tokenizer_files import NAMED, prefix_ids, read_settings, read_templates, register_special, token_text
from specdec.models.tokenizer_gguf import backend_from_gguf, setting, splitting

__all__ = ["ChatTemplateError", "TemplateVariableError", "Tokenizer"]

_MARKER = re.compile(r"[<\[{].*[>\]}]", re.DOTALL)


class Tokenizer:
    """A model's tokenizer, its special tokens and its chat template.

    Args:
        backend: the tokenizer proper.
        special_tokens: ``bos_token``, ``eos_token`` and the like, as text.
        prefix: ids that every prompt begins with, such as the beginning-of-text token.
        templates: chat template sources by name; empty for a model without one.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        prefix: tuple[int, ...],
        templates: Mapping[str, str],
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.prefix = prefix
        self.template = ChatTemplate(templates, self.special_tokens)
        self.bos_id = self._id("bos_token")
        self.eos_id = self._id("eos_token")
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        added = backend.get_added_tokens_decoder()
        rules = PieceRules.of(backend)
        self.drops_first_space = rules.drops_first_space
        self.pieces = [b""] * self.vocab_size
        """The bytes that each token stands for."""
        for piece, i in vocabulary.items():
            self.pieces[i] = rules.to_bytes(piece)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        # Some markers are not flagged special, so that they show in text; a template that mentions one gives it a meaning.
        mentioned = self.template.text
        self._control = {
            i: token.content
            for i, token in added.items()
            if token.special or (_MARKER.fullmatch(token.content) and token.content in mentioned)
        }
        longest_first = sorted(self._control.values(), key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._nonce = secrets.token_hex(8)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and what lies beside it: tokenizer_config.json, special_tokens_map.json, chat templates.

        Raises:
            ModelError: a file is missing or damaged.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path} is missing: a model folder needs its tokenizer.json")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise ModelError(f"{path} cannot be read: {error}") from error
        settings = {**read_settings(folder / "special_tokens_map.json"), **read_settings(folder / "tokenizer_config.json")}
        special = {name: text for name in NAMED if (text := token_text(settings.get(name)))}
        register_special(backend, settings, special.values())
        return cls(
            backend,
            special_tokens=special,
            prefix=prefix_ids(backend, settings.get("add_bos_token"), special.get("bos_token")),
            templates=read_templates(folder, settings),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Rebuild the tokenizer that GGUF metadata describes.

        Raises:
            ModelError: it cannot be rebuilt exactly; the message says what to use instead.
        """
        backend = backend_from_gguf(metadata)

        def token(name: str) -> int | None:
            i = setting(metadata, f"tokenizer.ggml.{name}_token_id", int)
            return None if i is None or i < 0 else i  # some files write -1 for a token that they do not have

        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        special = {
            name: text
            for name, key in names.items()
            if (i := token(key)) is not None and (text := backend.id_to_token(i)) is not None
        }
        bos = token("bos")
        said = setting(metadata, "tokenizer.ggml.add_bos_token", bool)
        adds = splitting(metadata).add_bos if said is None else said
        template = setting(metadata, "tokenizer.chat_template", str)
        return cls(
            backend,
            special_tokens=special,
            prefix=(bos,) if adds and bos is not None and "bos_token" in special else (),
            templates={"default": template} if template else {},
        )

    def files(self) -> dict[str, str]:
        """What ``from_folder`` reads as this tokenizer: names of files, and their text."""
        sources = self.template.sources
        templates: Any = (
            sources.get("default")
            if len(sources) < 2
            else [{"name": name, "template": source} for name, source in sources.items()]
        )
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.special_tokens,
            "add_bos_token": self.bos_id is not None and self.bos_id in self.prefix,
            "chat_template": templates,
        }
        return {"tokenizer.json": self._backend.to_str(), "tokenizer_config.json": json.dumps(settings, indent=1)}

    @property
    def has_chat_template(self) -> bool:
        return bool(self.template)

    def encode(self, text: str, *, add_special: bool, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text.
            add_special: begin with the ids that the model's prompts begin with.
            parse_special: turn text that spells a control token into it; without, such text stays plain characters.

        Raises:
            TextError: a lone surrogate, which no file and no model can hold.
        """
        _check_text(text)
        ids = _encode(self._backend, text)
        if not parse_special and not self._control.keys().isdisjoint(ids):
            ids = _encode(self._separated, text)
        return self._prefixed(ids) if add_special else ids

    def decode(self, ids: Many[int], *, skip_special: bool = True) -> str:
        """The text of token ids; special tokens are left out unless asked for. Bytes that are no UTF-8 become U+FFFD."""
        data = b"".join(map(self.text_bytes, ids) if skip_special else map(self.piece, ids))
        text = data.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.drops_first_space else text

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for; empty for an id that only the model's padded vocabulary has."""
        return self.pieces[token] if token < self.vocab_size else b""

    def text_bytes(self, token: int) -> bytes:
        """What a token adds to decoded text: its bytes, or nothing if it is special."""
        return b"" if token in self.special_ids else self.piece(token)

    def chat(self, messages: Many[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Token ids of a conversation, as the model's chat template lays it out.

        Args:
            messages: each with a ``role`` and a ``content``, a string or a list of text parts.
            add_generation_prompt: end with the beginning of an assistant's turn.
            variables: what else the template knows, such as ``tools``.

        Raises:
            ChatTemplateError: no template, malformed messages, a variable that the template has no use for, or its own refusal.
            TextError: as ``encode``.
        """
        given = {"messages": [_message(i, message) for i, message in enumerate(messages)], **variables}
        for string in strings(given):
            _check_text(string)
        self.template.check(variables)
        everything = {**given, "add_generation_prompt": add_generation_prompt}
        if not has_control(given, self._control_pattern):
            ids = _encode(self._backend, self.template.render(everything))
        else:
            alias = {text: self._alias(i) for i, text in self._control.items()}
            text = self.template.separate(everything, self._control_pattern, alias.__getitem__)
            ids = _encode(self._separated, text)
        return self._prefixed(ids)

    def _id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _prefixed(self, ids: list[int]) -> list[int]:
        """Begin with the prefix, once: a template or a parsed text may have written it already."""
        return ids if tuple(ids[: len(self.prefix)]) == self.prefix else [*self.prefix, *ids]

    def _alias(self, token: int) -> str:
        return f"\ue003{self._nonce}{token:08d}\ue004"

    @cached_property
    def _separated(self) -> Backend:
        """The same tokenizer, except that each control token is spelled by its alias and its own text is plain text.

        One more tokenizer rather than text cut into pieces: what a tokenizer does at the start of a text or beside an added
        token then happens in the same places as ever.
        """
        document = json.loads(self._backend.to_str())
        for token in document["added_tokens"]:
            if token["id"] in self._control:
                token["content"] = self._alias(token["id"])
                token["normalized"] = False
        model = document["model"]
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            aliases = {text: self._alias(i) for i, text in self._control.items()}
            model["vocab"] = {aliases.get(piece, piece): i for piece, i in vocab.items()}
        else:
            named = {i: self._alias(i) for i in self._control}
            model["vocab"] = [[named.get(i, piece), score] for i, (piece, score) in enumerate(vocab)]
        document["post_processor"] = None
        backend = Backend.from_str(json.dumps(document))
        for i, text in self._control.items():
            if backend.token_to_id(self._alias(i)) != i:
                raise ModelError(f"the control token {text!r} of this tokenizer cannot be told from plain text")
        return backend


def _encode(backend: Backend, text: str) -> list[int]:
    """Token ids of a text. As a batch of one: that alone lets other threads run meanwhile, and keeps no places of tokens."""
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise TextError(
            f"the text holds a lone surrogate at character {at}, which is no Unicode character: "
            f"{text[max(0, at - 10) : at + 10]!r}; it may come from bytes that are no UTF-8"
        ) from None


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its text parts joined."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ChatTemplateError(f"message {index} must be a mapping with a role, got {message!r}")
    content = message.get("content")
    if content is None and message.keys() <= {"role", "name", "content"}:
        raise ChatTemplateError(f"message {index} says nothing: it has no content")
    if isinstance(content, str) or content is None:
        return dict(message)
    if not isinstance(content, list | tuple):
        raise ChatTemplateError(f"the content of message {index} must be a string or a list of text parts")
    return {**message, "content": "".join(_part(index, part) for part in content)}


def _part(index: int, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        part = part.get("text")
    if not isinstance(part, str):
        raise ChatTemplateError(f"message {index} has a part that is not text; this engine reads text only")
    return part
