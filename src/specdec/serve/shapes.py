"""The JSON of answers: one class per route, each for whole answers and for chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Many
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Protocol

from specdec.serve.generation import Choice, Generation, Piece
from specdec.serve.schema import Body, ChatBody, CompletionBody
from specdec.text import Decoder, Detokenizer
from specdec.types import TokenLogprob

Json = dict[str, Any]

FLOOR = -9999.0
"""Stands for the logarithm of zero, which JSON cannot hold."""


def dump(value: Any) -> str:
    """Strict JSON in ASCII: no client can take a line separator within a text for the end of a line."""
    return _ENCODER.encode(value)


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))  # ``json.dumps`` would make one for every frame


class Vocabulary(Decoder, Protocol):
    """What is needed of a tokenizer to show single tokens."""

    def piece(self, token: int) -> bytes: ...

    def decode(self, ids: Many[int], *, skip_special: bool) -> str: ...


class Shape(ABC):
    """Names, usage and extras, which routes have in common.

    Args:
        body: what was asked.
        model: the served name.
        vocabulary: the model's tokenizer.
        with_logprobs: of the answer's tokens.
    """

    whole_kind: str
    chunk_kind: str
    prefix: str
    plain: tuple[str, str]
    """What stands before and after the text in a choice of a frame that has nothing but text, from its index on."""

    def __init__(self, body: Body, model: str, vocabulary: Vocabulary, *, with_logprobs: bool) -> None:
        self._body = body
        self._vocabulary = vocabulary
        self._head: Json = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._begun: set[int] = set()
        """Choices of which something was sent."""
        self._counted = bool(with_logprobs or body.return_token_ids or body.stats)
        """Somebody counts tokens, so there are frames for those without text too."""
        before, after = self.plain
        self._before = dump({"object": self.chunk_kind, **self._head})[:-1] + ',"choices":[{"index":'
        self._text, self._after = before, after + "}]" + (',"usage":null' if body.usage_in_stream else "") + "}"

    def whole(self, generation: Generation, pieces: Iterable[Piece]) -> Json:
        """The answer to a request that is not streamed; one piece for each choice."""
        choices = [self._finished(piece) for piece in pieces]
        answer = {"object": self.whole_kind, **self._head, "choices": choices, "usage": usage(generation.choices)}
        return {**answer, **self._prompt_ids(generation.choices[0])}

    def frames(self, piece: Piece) -> list[str]:
        """The frames for what is new of a choice, as JSON."""
        index = piece.choice.index
        if self._counted or piece.finish_reason or index not in self._begun:
            return [dump(frame) for frame in self._chunks(piece)]
        # Nearly all frames are of this kind, and only the text differs.
        return [f"{self._before}{index}{self._text}{quoted(piece.text)}{self._after}"] if piece.text else []

    def _chunks(self, piece: Piece) -> list[Json]:
        opening = piece.choice.index not in self._begun
        self._begun.add(piece.choice.index)
        frames = []
        for choice in self._news(piece, opening):
            frame: Json = {"object": self.chunk_kind, **self._head, "choices": [choice]}
            if self._body.usage_in_stream:
                frame["usage"] = None
            frames.append(frame)
        if opening and frames:
            frames[0] |= self._prompt_ids(piece.choice)
        return frames

    def last(self, generation: Generation) -> list[str]:
        """What follows the last choice's last frame."""
        if not self._body.usage_in_stream:
            return []
        return [dump({"object": self.chunk_kind, **self._head, "choices": [], "usage": usage(generation.choices)})]

    @abstractmethod
    def _finished(self, piece: Piece) -> Json:
        """A choice of an answer that is not streamed."""

    @abstractmethod
    def _news(self, piece: Piece, opening: bool) -> list[Json]:
        """A choice of each frame for what is new; ``opening`` with the first frame of the choice."""

    def _prompt_ids(self, choice: Choice) -> Json:
        return {"prompt_token_ids": choice.prompt} if self._body.return_token_ids else {}

    def _extras(self, piece: Piece) -> Json:
        """Fields of a choice that OpenAI does not have, where they were asked for."""
        extras: Json = {}
        choice = piece.choice
        if self._body.return_token_ids:
            extras["token_ids"] = piece.tokens
        if self._body.stats:
            extras["token_sources"] = piece.sources
            extras["token_texts"] = piece.texts
            if piece.finish_reason:
                extras["stats"] = {"seed": choice.asked_seed, **choice.stats}
        if self._body.prompt_logprobs is not None and piece.start == 0:
            scored = [self._by_id(entry, self._body.prompt_logprobs) for entry in choice.prompt_logprobs or ()]
            extras["prompt_logprobs"] = [None, *scored]
        return extras

    def _by_id(self, entry: TokenLogprob, most: int) -> Json:
        best = dict([*entry.top[:most], (entry.token, entry.logprob)])
        return {
            str(token): {"logprob": finite(logprob), "decoded_token": token_text(self._vocabulary, token)}
            for token, logprob in best.items()
        }


class ChatShape(Shape):
    """``chat.completion`` and ``chat.completion.chunk``."""

    whole_kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    plain = ',"delta":{"content":', '},"logprobs":null,"finish_reason":null'

    def __init__(self, body: ChatBody, model: str, vocabulary: Vocabulary) -> None:
        self._with_logprobs = bool(body.logprobs)
        super().__init__(body, model, vocabulary, with_logprobs=self._with_logprobs)

    def _finished(self, piece: Piece) -> Json:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {
            "index": piece.choice.index,
            "message": message,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            **self._extras(piece),
        }

    def _news(self, piece: Piece, opening: bool) -> list[Json]:
        index = piece.choice.index
        first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        delta = {"content": piece.text} if piece.text else {}
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            **self._extras(piece),
        }
        # Nothing to show yet, as within a character: no frame, unless somebody counts tokens.
        shown = piece.text or piece.finish_reason or self._counted
        return [*([first] if opening else []), *([choice] if shown else [])]

    def _logprobs(self, piece: Piece) -> Json | None:
        if not self._with_logprobs:
            return None
        entries = [
            {**self._entry(entry.token, entry.logprob), "top_logprobs": [self._entry(*best) for best in entry.top]}
            for entry in piece.logprobs
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        data = self._vocabulary.piece(token)
        return {"token": token_text(self._vocabulary, token), "logprob": finite(logprob), "bytes": list(data)}


class CompletionShape(Shape):
    """``text_completion``, whole and streamed."""

    whole_kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"
    plain = ',"text":', ',"logprobs":null,"finish_reason":null'

    def __init__(self, body: CompletionBody, model: str, vocabulary: Vocabulary) -> None:
        super().__init__(body, model, vocabulary, with_logprobs=body.logprobs is not None)
        self._k = body.logprobs
        self._echo = bool(body.echo)
        self._places: dict[int, _Places] = {}

    def _finished(self, piece: Piece) -> Json:
        text, logprobs = self._content(piece)
        return {
            "index": piece.choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            **self._extras(piece),
        }

    def _news(self, piece: Piece, opening: bool) -> list[Json]:
        choice = self._finished(piece)
        return [choice] if choice["text"] or piece.finish_reason or self._counted else []

    def _content(self, piece: Piece) -> tuple[str, Json | None]:
        """Text and log-probabilities of a piece, the prompt's before them where they are to be echoed."""
        choice, text = piece.choice, piece.text
        echoed = self._echo and piece.start == 0
        if echoed:
            text = self._vocabulary.decode(choice.prompt, skip_special=True) + text
        if self._k is None:
            return text, None
        places = self._places.setdefault(choice.index, _Places(self._vocabulary, [] if self._echo else choice.prompt))
        columns: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if echoed:
            self._append(columns, places, choice.prompt[0], None)
            for entry in choice.prompt_logprobs or ():
                self._append(columns, places, entry.token, entry)
        for entry in piece.logprobs:
            self._append(columns, places, entry.token, entry)
        if self._k == 0:
            columns["top_logprobs"] = None
        return text, columns

    def _append(self, columns: Json, places: _Places, token: int, entry: TokenLogprob | None) -> None:
        columns["tokens"].append(token_text(self._vocabulary, token))
        columns["text_offset"].append(places.place(token))
        columns["token_logprobs"].append(None if entry is None else finite(entry.logprob))
        if entry is None:
            columns["top_logprobs"].append(None)
            return
        best: dict[str, float] = {}
        for other, logprob in [*entry.top[: self._k], (token, entry.logprob)]:
            best.setdefault(token_text(self._vocabulary, other), finite(logprob))
        columns["top_logprobs"].append(best)


class _Places:
    """Where each token begins in the text of all of them; a part of a character begins where the character does."""

    def __init__(self, vocabulary: Vocabulary, prompt: Many[int]) -> None:
        self._detokenizer = Detokenizer(vocabulary, prompt)
        self._length = 0

    def place(self, token: int) -> int:
        """The place of the next token."""
        place = self._length
        self._length += len(self._detokenizer.push(token))
        return place


def token_text(vocabulary: Vocabulary, token: int) -> str:
    """A token as text; bytes that are no whole characters as OpenAI writes them, such as ``bytes:\\xe2\\x82``."""
    data = vocabulary.piece(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, FLOOR)


def usage(choices: Many[Choice]) -> Json:
    """Tokens of all choices; a prompt counts once, however many choices it has."""
    prompts = {id(choice.prompt): choice for choice in reversed(choices)}.values()  # the first choice of each
    prompt = sum(len(choice.prompt) for choice in prompts)
    completion = sum(len(choice.tokens) for choice in choices)
    accepted = sum(choice.sources.count("prediction") for choice in choices)
    drafted = sum(choice.stats.get("drafted_by_drafter", {}).get("prediction", 0) for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.stats.get("cached_tokens", 0) for choice in prompts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(0, drafted - accepted),
        },
    }
