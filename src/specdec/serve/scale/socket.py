"""WebSockets at the router: each message is asked as a streamed request, so it is routed and asked again as those are."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from itertools import count

from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from specdec.serve.account import ID_HEADER, LONGEST_ID, ROUTES, Account
from specdec.serve.errors import ApiError, shutting_down
from specdec.serve.scale.replicas import Asked, BrokenOff
from specdec.serve.scale.router import Router, account_of, broken_off, named, passed_on, streams, tell

WAITING = 8
"""Most requests of one connection that wait for an earlier one's answer; as in a single server."""

_SHOWN = (b"authorization", ID_HEADER.lower().encode())
"""Headers of a handshake by which it is judged."""

_UNSUPPORTED, _POLICY = 1003, 1008  # of RFC 6455


class RoutedConversation:
    """One connection. Requests are answered in order; when the client goes, the running one ends at once."""

    def __init__(self, router: Router, socket: WebSocket) -> None:
        self._router = router
        self._socket = socket
        self._account = account_of(socket)
        """Of the handshake."""
        self._inbox: asyncio.Queue[str] = asyncio.Queue()

    async def run(self) -> None:
        """Answer until the client goes."""
        try:
            denial = await self._denied()
        except ApiError as error:
            denial = self._router.refuse(error, self._account)
        if denial:
            await self._socket.send_denial_response(denial)
            return
        await self._socket.accept(headers=[named(self._account.request_id)])
        reading = asyncio.ensure_future(self._read())
        answering = asyncio.ensure_future(self._answer_all())
        try:
            await asyncio.wait({reading, answering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            answering.cancel()
            await asyncio.wait({reading, answering})

    async def _denied(self) -> Response | None:
        """The answer to a client that may not connect: what the list of models says to it, which no replica's log tells of."""
        if self._router.closing:
            raise shutting_down()
        if self._socket.url.path not in ROUTES:
            raise ApiError(404, "there is no WebSocket here")
        given = await self._router.asked(self._socket, b"", self._account.request_id)
        headers = [header for header in given.headers if header[0] in _SHOWN]
        async with aclosing(self._router.answers(Asked("GET", "/v1/models", "", headers, b"", []))) as answers:
            async for answer, parts in answers:
                try:
                    body = b"".join([part async for part in parts])
                except BrokenOff as error:
                    self._router.lost(error)
                    continue
                finally:
                    await answer.close()
                if answer.status == 200:
                    return None
                tell(self._account, answer.status, _error_in(body, answer.status))
                response = Response(body, answer.status)
                response.raw_headers += passed_on(answer.headers)
                return response
        return None

    async def _read(self) -> None:
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            if message.get("text") is None:
                await self._socket.close(_UNSUPPORTED, "requests are text messages")
                return
            if self._inbox.qsize() >= WAITING:
                await self._socket.close(_POLICY, f"more than {WAITING} requests wait on this connection")
                return
            self._inbox.put_nowait(message["text"])

    async def _answer_all(self) -> None:
        try:
            for part in count(1):
                text = await self._inbox.get()
                account = account_of(self._socket, f"{self._account.request_id}-{part}"[-LONGEST_ID:])
                try:
                    await self._answer(text, account)
                except ApiError as error:
                    self._router.refuse(error, account)
                    await self._send(json.dumps(error.body), "[DONE]")
        except (WebSocketDisconnect, TimeoutError):
            pass  # it went, or took nothing for too long

    async def _answer(self, text: str, account: Account) -> None:
        asked = await self._router.asked(self._socket, _streamed(text), account.request_id)
        headers = [(name, value) for name, value in asked.headers if name == b"authorization"]
        headers += [(b"content-type", b"application/json"), named(account.request_id)]
        asked = Asked(asked.method, asked.path, "", headers, asked.body, asked.keys)
        begun = False
        async with aclosing(self._router.answers(asked)) as answers:
            async for answer, parts in answers:
                try:
                    if not streams(answer):
                        body = b"".join([part async for part in parts])
                        await self._send(body.decode(), "[DONE]")
                        return
                    async for part in parts:
                        begun = True
                        await self._send(*(frame.removeprefix("data: ") for frame in part.decode().split("\n\n") if frame))
                    return
                except BrokenOff as error:
                    if begun:
                        gone = broken_off()
                        tell(account, None, gone)
                        await self._send(json.dumps(gone.body), "[DONE]")
                        return
                    self._router.lost(error)
                finally:
                    await answer.close()

    async def _send(self, *frames: str) -> None:
        async with asyncio.timeout(self._router.config.stalled_seconds):
            for frame in frames:
                await self._socket.send_text(frame)


def _error_in(body: bytes, status: int) -> ApiError:
    """What a replica said where it refused."""
    error = json.loads(body)["error"]
    return ApiError(status, error["message"], code=error["code"])


def _streamed(text: str) -> bytes:
    """A message as the body of a streamed request; what is no body stays as it is, for a replica to refuse."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return text.encode("utf-8", "surrogatepass")
    if not isinstance(body, dict):
        return text.encode("utf-8", "surrogatepass")
    if body.get("stream") is False:
        raise ApiError(400, "a WebSocket always streams: leave stream out", param="stream")
    return json.dumps({**body, "stream": True}).encode()
