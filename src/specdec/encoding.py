"""From what users write to token ids: prompts, conversations, and the words that a request bans."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, TypeGuard

from specdec.config import SamplingParams
from specdec.models.errors import TextError
from specdec.request import RequestError
from specdec.text import Decoder

_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))
NOT_FOR_TEMPLATES = _SAMPLING | {"params", "self", "messages", "chat_template", "continue_final_message", "tokenize"}
"""Names that callers of other libraries may pass to ``chat``, and those of what a template is given anyway: as further
variables they would have no effect, or another one."""

Message: TypeAlias = Mapping[str, Any]


class TextTokenizer(Decoder, Protocol):
    """What the façade needs of a tokenizer."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, *, add_special: bool) -> list[int]: ...

    def decode(self, ids: Many[int], *, skip_special: bool) -> str: ...

    def piece(self, token: int) -> bytes: ...

    def chat(self, messages: Many[Message], **variables: Any) -> list[int]: ...


class Encoder:
    """Encodes requests; what cannot be encoded is the request's fault.

    Args:
        tokenizer: the model's.
        vocab_size: of the model: a token beyond it cannot occur.
    """

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def prompt(self, prompt: object) -> list[int]:
        """The token ids of a prompt, which may be ids already.

        Raises:
            RequestError: it is neither text nor ids, or text that cannot be encoded.
        """
        if isinstance(prompt, str):
            with _text_of_a_request():
                return self._tokenizer.encode(prompt, add_special=True)
        if is_ids(prompt):
            return list(prompt)
        is_message = isinstance(prompt, Mapping) and "role" in prompt
        hint = "; a conversation is for chat" if is_message or is_conversation(prompt) else ""
        raise RequestError(f"a prompt must be text or a list of token ids, got {reprlib.repr(prompt)}{hint}")

    def conversation(self, conversation: object, template: Mapping[str, Any]) -> list[int]:
        """The token ids of a conversation, laid out by the model's chat template.

        Args:
            conversation: messages, mappings with ``role`` and ``content``.
            template: what else the template knows.

        Raises:
            ChatTemplateError: the template refuses the messages, or there is none.
            RequestError: this is no conversation, its text cannot be encoded, or a variable can have no effect.
        """
        if mistaken := sorted(NOT_FOR_TEMPLATES & template.keys()):
            hint = "; sampling settings go into SamplingParams, the second argument" if _SAMPLING & template.keys() else ""
            raise RequestError(f"{', '.join(mistaken)} is no variable of a chat template{hint}")
        if not is_conversation(conversation):
            raise RequestError(
                f"a conversation must be a list of mappings with role and content, got {reprlib.repr(conversation)}"
            )
        with _text_of_a_request():
            return self._tokenizer.chat(conversation, **template)

    def spelled_out(self, params: SamplingParams) -> SamplingParams:
        """Bad words as token ids: the word as it begins a text, and as it follows a space.

        Raises:
            RequestError: a word cannot be written in the vocabulary.
        """
        words = dict.fromkeys(params.bad_words_ids)
        for word in params.bad_words:
            bare = word.lstrip(" ")
            texts = (bare, " " + bare) if bare.strip() else (word,)  # white space is banned as it stands
            with _text_of_a_request():
                spellings = [self._tokenizer.encode(text, add_special=False) for text in texts]
            possible = [tuple(ids) for ids in spellings if ids and max(ids) < self._vocab_size]
            if not possible:
                raise RequestError(f"the bad word {word!r} cannot be written in this model's vocabulary")
            words.update(dict.fromkeys(possible))
        return params.replace(bad_words=(), bad_words_ids=tuple(words)) if params.bad_words else params


def is_ids(prompt: object) -> TypeGuard[list[int] | tuple[int, ...]]:
    """Is it a list of token ids, and not of prompts?"""
    return (
        isinstance(prompt, list | tuple)
        and bool(prompt)
        and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt)
    )


def is_conversation(messages: object) -> TypeGuard[Many[Message]]:
    """Is it one conversation, and neither several nor a prompt?"""
    return isinstance(messages, list | tuple) and bool(messages) and all(isinstance(m, Mapping) for m in messages)


@contextmanager
def _text_of_a_request() -> Iterator[None]:
    try:
        yield
    except TextError as error:
        raise RequestError(str(error)) from error
