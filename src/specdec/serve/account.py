"""What is told about a request once it has ended: a line in the log, and a trace where one is kept.

Every HTTP request and every message of a WebSocket that asks for an answer has an account, whatever becomes of it: refused,
answered, broken off, or left by its client. What a client sent or got as text is never told.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.serve.errors import ApiError

if TYPE_CHECKING:
    from specdec.serve.generation import Choice, Generation
    from specdec.serve.tracing import Trace, Tracing

_log = logging.getLogger(__name__)

ROUTES = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Those whose requests are accounted for."""

ID_HEADER = "X-Request-Id"
LONGEST_ID = 128


class Account:
    """One request, from its arrival to its end.

    Args:
        request_id: the client's own, or one made for it.
        route: which it came by.
        headers: of the HTTP request.
        tracing: keeps traces; None: nobody does.
    """

    def __init__(self, request_id: str, route: str, headers: Headers, tracing: Tracing | None) -> None:
        self.request_id = request_id
        self.route = route
        self.arrived = time.perf_counter()
        self.status: int | None = None
        """Of the HTTP response; None where none has begun."""
        self.error: ApiError | None = None
        self.generation: Generation | None = None
        self._trace: Trace | None = tracing.begin(self, headers) if tracing else None

    def end(self) -> None:
        """Tell of it; nothing more will happen."""
        now = time.perf_counter()
        facts = self._facts(now)
        if self._trace:
            facts |= self._trace.end(self, facts, now)
        _log.info("request ended", extra={"facts": facts})

    @property
    def choices(self) -> list[Choice]:
        return self.generation.choices if self.generation else []

    @property
    def failure(self) -> ApiError | None:
        """What the client was told instead of an answer, or of its end."""
        return self.error or (self.generation.error if self.generation else None)

    def _facts(self, now: float) -> dict[str, Any]:
        """Plain values by name; what is not known is left out."""
        facts: dict[str, Any] = {"request_id": self.request_id, "route": self.route, "status": self.status}
        if self.generation:
            facts |= _of_choices(self.generation, self.arrived)
        facts["seconds"] = now - self.arrived
        if self.failure:
            facts |= {"error": self.failure.message, "code": self.failure.code}
        return {name: value for name, value in facts.items() if value is not None}


def _of_choices(generation: Generation, arrived: float) -> dict[str, Any]:
    choices = generation.choices
    passes = sum(len(choice.passes) for choice in choices)
    tokens = sum(len(choice.tokens) for choice in choices)
    begun = [choice.times for choice in choices if choice.times.begun is not None]
    first = [choice.passes[0][0] for choice in choices if choice.passes]
    stats = [choice.stats for choice in choices if choice.stats]
    spent = sum(sum(one["seconds"].values()) for one in stats)
    accepted = Counter[str | None]()
    for choice in choices:
        accepted.update(choice.sources)
    del accepted[None]
    return {
        "finish_reason": ",".join(sorted({choice.end or "abort" for choice in choices})),
        "prompt_tokens": sum(len(prompt) for prompt in generation.asked.prompts),
        "cached_tokens": sum(one["cached_tokens"] for one in stats) if stats else None,
        "completion_tokens": tokens,
        "queue_seconds": max(times.begun - times.added for times in begun if times.begun is not None) if begun else None,
        "first_token_seconds": min(first) - arrived if first else None,
        "tokens_per_pass": tokens / passes if passes else None,
        "drafted": sum(one["drafted"] for one in stats) if stats else None,
        "accepted": accepted.total(),
        "accepted_by_drafter": dict(accepted) or None,
        "speedup": sum(one["plain_seconds"] for one in stats) / spent if spent else None,
    }


class Accounts:
    """ASGI middleware: gives every request an id, which its response carries, and keeps the account of those that ask for an
    answer.

    A client may name its request itself, by the header X-Request-Id; anything but 1 to 128 visible ASCII characters is refused.

    Args:
        tracing: keeps traces.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing | None) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id = id_of(headers)
        account: Account | None = None
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in ROUTES:
            state["account"] = account = Account(request_id, scope["path"], headers, self._tracing)

        async def noting(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
                MutableHeaders(scope=message)[ID_HEADER] = request_id
                if account:
                    account.status = message.get("status")
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            if account:
                account.status = account.status or 500
            raise
        finally:
            if account:  # others may have ended with the same pass: they get their last frames first
                asyncio.get_running_loop().call_soon(account.end)


def id_of(headers: Headers) -> str:
    """What a request is called: as its client does, or by a new name."""
    given = headers.get(ID_HEADER)
    return given if given and is_id(given) else uuid.uuid4().hex


def is_id(given: str) -> bool:
    """May a client call its request so?"""
    return 0 < len(given) <= LONGEST_ID and all("!" <= character <= "~" for character in given)
