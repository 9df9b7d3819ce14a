"""The router: an ASGI application that hands each request to a replica and the answer back, frame by frame.

A request without a seed is given one here, so it has the same answer wherever it runs. Until something of an answer has been
sent, a replica that dies costs only time: the request is asked again elsewhere, and no client can tell. Afterwards a stream
ends with an error frame. Only whole frames are passed on, so it is never cut within one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from prometheus_client.core import CounterMetricFamily
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from specdec.config import ServeConfig
from specdec.serve.account import ID_HEADER, ROUTES, Account, id_of
from specdec.serve.body import SMALL, read_body
from specdec.serve.errors import ApiError, shutting_down
from specdec.serve.origins import open_to
from specdec.serve.scale.figures import rendered
from specdec.serve.scale.prefix import keys
from specdec.serve.scale.replicas import Answer, Asked, BrokenOff, Headers, NoReplica, Replicas

_log = logging.getLogger(__name__)

FULL_OR_GONE = (429, 503)
"""What a replica answers that cannot take a request now; another one may."""

TRIES = 8
"""Most replicas that a request is given to, one after the other."""

OURS = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server", b"host", b"origin"}
)
"""Headers of a connection, not of what goes through it; and that of browsers, which the router answers itself."""


class Router:
    """The application.

    Args:
        replicas: answer.
        config: the limits of bodies and of slow clients, and the origins that it is open to.
    """

    def __init__(self, replicas: Replicas, config: ServeConfig) -> None:
        self.replicas = replicas
        self.config = config
        self._app = open_to(config.allowed_origins, self._respond)
        self.closing = False
        """No new requests: the server is about to stop."""
        self.retries = 0
        """Requests that were asked again because a replica had gone."""
        self.refused: Counter[int] = Counter()
        """Requests that were refused here, by status; of those that a replica refuses, its own figures tell."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            from specdec.serve.scale.socket import RoutedConversation

            await RoutedConversation(self, WebSocket(scope, receive, send)).run()
        elif scope["type"] == "http":
            account = account_of(HTTPConnection(scope))
            try:
                response = await self._own(scope["path"]) or await self._routed(Request(scope, receive), account, send)
            except ApiError as error:
                response = self.refuse(error, account, told=scope["method"] == "POST" and scope["path"] in ROUTES)
            except ClientDisconnect:
                return
            if response:
                await response(scope, receive, send)

    async def _own(self, path: str) -> Response | None:
        """What the router answers itself."""
        if path == "/health":
            if self.closing:
                raise shutting_down()
            healthy, detail = self.replicas.health()
            return JSONResponse({"status": "ok" if healthy else "unavailable", **detail}, 200 if healthy else 503)
        if path == "/metrics":
            text = await self.replicas.metrics() + self._metrics()
            return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
        return None

    def refuse(self, error: ApiError, account: Account, *, told: bool = True) -> Response:
        """The response to a request that no replica has answered. It is counted, and unless it asked for no answer, told of."""
        self.refused[error.status] += 1
        if told:
            tell(account, error.status, error)
        return JSONResponse(error.body, error.status, {**error.headers, ID_HEADER: account.request_id})

    def _metrics(self) -> bytes:
        name, help = "specdec:router_requests_refused", "Requests that the router refused itself"
        refused = CounterMetricFamily(name, help, labels=("status",))
        for status, n in sorted(self.refused.items()):
            refused.add_metric((str(status),), n)
        return rendered([refused])

    async def _routed(self, request: Request, account: Account, send: Send) -> Response | None:
        """Pass on an answer; a response where there is none. What it does ends when the client goes."""
        if self.closing:
            raise shutting_down()
        asked = await self.asked(request, await read_body(request, self.config), account.request_id)

        async def gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        answering = asyncio.ensure_future(self._answer(asked, account, send))
        leaving = asyncio.ensure_future(gone())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return answering.result() if answering.done() else None
        finally:
            answering.cancel()
            leaving.cancel()
            await asyncio.wait({answering, leaving})

    async def asked(self, request: HTTPConnection, data: bytes, name: str) -> Asked:
        """The request as it goes to replicas: with a seed, the keys of its prompt, and a name by which they tell of it."""
        url = request.url
        found: list[bytes] = []
        if url.path in ROUTES and data:
            tenant = request.headers.get("authorization", "")
            if len(data) <= SMALL:
                data, found = prepared(data, tenant)
            else:
                data, found = await asyncio.to_thread(prepared, data, tenant)
        headers = passed_on(request.headers.raw)
        if ID_HEADER not in request.headers:
            headers.append(named(name))
        return Asked(request.scope.get("method", "POST"), url.path, url.query, headers, data, found)

    async def answers(self, asked: Asked) -> AsyncGenerator[tuple[Answer, AsyncIterator[bytes]], None]:
        """Answers to a request, each of another replica, until the caller is content; he closes each of them.

        Raises:
            ApiError: nobody is left to be asked.
        """
        avoid: set[str] = set()
        for _ in range(TRIES):
            try:
                answer = await self.replicas.ask(asked, avoid)
            except NoReplica:
                break
            except BrokenOff as error:
                self.lost(error, avoid)
                continue
            yield answer, frames(answer) if streams(answer) else answer.chunks()
            if answer.replica is not None:
                avoid.add(answer.replica)
        message = "no replica can answer now; ask again"
        raise ApiError(503, message, code="no_replica", headers={"Retry-After": "1"})

    def lost(self, error: BrokenOff, avoid: set[str] | None = None) -> None:
        """Note that a replica is gone, and a request is asked again."""
        self.retries += 1
        _log.warning("%s; its request is asked again", error)
        if avoid is not None and error.replica is not None:
            avoid.add(error.replica)

    async def _answer(self, asked: Asked, account: Account, send: Send) -> Response | None:
        refusal: Response | None = None
        try:
            async with aclosing(self.answers(asked)) as answers:
                async for answer, parts in answers:
                    try:
                        if streams(answer):
                            if await self._stream(answer, parts, account, send):
                                return None
                            continue
                        body = b"".join([part async for part in parts])
                    except BrokenOff as error:
                        self.lost(error)
                        continue
                    finally:
                        await answer.close()
                    response = Response(body, answer.status)
                    response.raw_headers += passed_on(answer.headers)
                    if answer.status not in FULL_OR_GONE:
                        return response
                    refusal = response
        except ApiError:
            if refusal is None:
                raise
        return refusal

    async def _stream(self, answer: Answer, parts: AsyncIterator[bytes], account: Account, send: Send) -> bool:
        """Pass on a stream; False where it broke off before anything was sent. Of one that breaks off later nobody is left to
        tell but the router."""
        started = False
        try:
            async for part in parts:
                if not started:
                    started = True
                    head = {"type": "http.response.start", "status": answer.status, "headers": passed_on(answer.headers)}
                    await send(head)
                await self._send(send, part)
        except BrokenOff as error:
            if not started:
                self.lost(error)
                return False
            _log.warning("%s within a stream", error)
            tell(account, answer.status, broken_off())
            await self._send(send, broken_frames())
        except TimeoutError:
            _log.warning("a client took nothing for %g s and is given up", self.config.stalled_seconds)
            return True
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True

    async def _send(self, send: Send, body: bytes) -> None:
        async with asyncio.timeout(self.config.stalled_seconds):
            await send({"type": "http.response.body", "body": body, "more_body": True})


def prepared(data: bytes, tenant: str) -> tuple[bytes, list[bytes]]:
    """A body with a seed, if it can have one, and the keys of its prompt. What is no body a replica refuses."""
    try:
        body: Any = json.loads(data.decode())
    except (ValueError, RecursionError):
        return data, []
    if not isinstance(body, dict):
        return data, []
    if body.get("seed") is None:
        body["seed"] = secrets.randbelow(2**63)
        data = json.dumps(body, separators=(",", ":")).encode()
    return data, keys(body, tenant)


def streams(answer: Answer) -> bool:
    """Is it a stream of events?"""
    return dict(answer.headers).get(b"content-type", b"").startswith(b"text/event-stream")


async def frames(answer: Answer) -> AsyncIterator[bytes]:
    """A stream in whole frames, as soon as each is there. Raises BrokenOff."""
    rest = b""
    async for chunk in answer.chunks():
        ready, end, rest = (rest + chunk).rpartition(b"\n\n")
        if end:
            yield ready + end
    if rest:
        raise BrokenOff(answer.replica)


def broken_off() -> ApiError:
    return ApiError(502, "the replica that answered is gone; ask again", code="replica_gone")


def broken_frames() -> bytes:
    """The end of a stream whose replica is gone."""
    return f"data: {json.dumps(broken_off().body, separators=(',', ':'))}\n\ndata: [DONE]\n\n".encode()


def passed_on(headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if name not in OURS]


def named(name: str) -> tuple[bytes, bytes]:
    """The header that gives a request its name."""
    return ID_HEADER.lower().encode(), name.encode()


def account_of(connection: HTTPConnection, name: str | None = None) -> Account:
    """Of a request that has just come, to be ended only where no replica tells of it."""
    return Account(name or id_of(connection.headers), connection.url.path, connection.headers, None)


def tell(account: Account, status: int | None, error: ApiError) -> None:
    """End the account of a request of which no replica tells.

    Args:
        status: of the response; None where none has begun.
        error: what the client was told.
    """
    account.status, account.error = status, error
    account.end()
