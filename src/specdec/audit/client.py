"""A client of OpenAI's routes that keeps what an audit compares. It knows no more of a server than its answers tell."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from specdec.config import ConfigError

SECONDS = 120.0
"""Longest that an answer may take."""


class Refused(Exception):
    """The server does not take a request; the message is its own."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request: the same body each time it is asked."""

    label: str
    route: str
    """``chat/completions`` or ``completions``."""
    body: Mapping[str, Any]

    def with_fields(self, **more: Any) -> Question:
        return Question(self.label, self.route, {**self.body, **more})


@dataclass(slots=True)
class Reply:
    """An answer, whole or put together from a stream."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    """As the log-probabilities name them; empty where the server gives none."""
    logprobs: list[float] = field(default_factory=list)
    gaps: list[float | None] = field(default_factory=list)
    """Between the two likeliest tokens at each place."""
    token_ids: list[int] = field(default_factory=list)
    sources: list[str | None] = field(default_factory=list)
    n_tokens: int | None = None

    def add(self, choice: Mapping[str, Any]) -> None:
        """Take in a choice of an answer, or of a frame of a stream."""
        message = choice.get("message") or choice.get("delta") or {}
        self.text += choice.get("text") or message.get("content") or ""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.token_ids += choice.get("token_ids") or []
        self.sources += choice.get("token_sources") or []
        for token, logprob, top in _logprobs(choice.get("logprobs")):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            best = sorted(top, reverse=True)
            self.gaps.append(best[0] - best[1] if len(best) > 1 else None)


class Server:
    """A server that is audited.

    Args:
        url: of its ``/v1``; the path may be left out.
        key: sent as a bearer token.
        model: what to ask for; None takes the only one, or the first, that the server names.

    Raises:
        ConfigError: nothing answers there, or it names no model.
    """

    def __init__(self, url: str, key: str | None = None, model: str | None = None) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"--url {url!r} is no address: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{url!r} is no address of a server: http://host:port/v1 is expected")
        self.url = str(parsed).rstrip("/") if parsed.path.strip("/") else f"{str(parsed).rstrip('/')}/v1"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=self.url + "/", headers=headers, timeout=SECONDS)
        try:
            found = self._json(self._http.get("models")).get("data") or []
        except (httpx.HTTPError, Refused) as error:
            self._http.close()
            raise ConfigError(f"no models are told at {self.url}/models: {error}") from error
        names = [str(entry.get("id")) for entry in found]
        if model is None and not names:
            self._http.close()
            raise ConfigError(f"{self.url}/models names no model: say which with --model")
        self.model = model or names[0]
        about: dict[str, Any] = next((entry for entry in found if entry.get("id") == self.model), {})
        self.ours = about.get("owned_by") == "specdec"
        """Is it specdec, whose requests may choose how they are drafted for?"""
        self.drafters: list[str] = list(about.get("drafters") or []) if self.ours else []

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def ask(self, question: Question) -> Reply:
        """The answer in one piece.

        Raises:
            Refused: the server does not take the request.
            ConfigError: it does not answer.
        """
        try:
            answer = self._json(self._http.post(question.route, json={"model": self.model, **question.body}))
        except httpx.HTTPError as error:
            raise ConfigError(f"{self.url} did not answer {question.label!r}: {error or type(error).__name__}") from error
        reply = Reply()
        for choice in answer.get("choices") or []:
            reply.add(choice)
        reply.n_tokens = (answer.get("usage") or {}).get("completion_tokens")
        return reply

    def stream(self, question: Question) -> Reply:
        """The same answer, streamed and put together again. Raises as ``ask``."""
        reply = Reply()
        body = {"model": self.model, **question.body, "stream": True}
        try:
            with self._http.stream("POST", question.route, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    self._json(response)
                for frame in _frames(response):
                    for choice in frame.get("choices") or []:
                        reply.add(choice)
        except httpx.HTTPError as error:
            raise ConfigError(f"{self.url} broke off the stream of {question.label!r}: {error}") from error
        return reply

    @staticmethod
    def _json(response: httpx.Response) -> dict[str, Any]:
        try:
            value = response.json()
        except ValueError as error:
            raise Refused(f"status {response.status_code}, and no JSON") from error
        if response.status_code != 200 or not isinstance(value, dict):
            said = value.get("error") if isinstance(value, dict) else value
            message = said.get("message") if isinstance(said, dict) else said
            raise Refused(f"status {response.status_code}: {message or value}")
        return value


def _frames(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        frame = json.loads(data)
        if "error" in frame:
            raise Refused(f"the stream ended with an error: {frame['error']}")
        yield frame


def _logprobs(given: Mapping[str, Any] | None) -> Iterator[tuple[str, float, list[float]]]:
    """Token, its log-probability and those of the likeliest, of either route."""
    if not given:
        return
    if given.get("content"):
        for entry in given["content"]:
            yield entry["token"], entry["logprob"], [other["logprob"] for other in entry.get("top_logprobs") or []]
    elif given.get("tokens"):
        tops = given.get("top_logprobs") or [None] * len(given["tokens"])
        for token, logprob, top in zip(given["tokens"], given["token_logprobs"], tops, strict=False):
            yield token, logprob if logprob is not None else 0.0, list((top or {}).values())
