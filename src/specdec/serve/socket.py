"""Streaming through a WebSocket: each message is a request's body, each frame of its answer is a message."""

from __future__ import annotations

import asyncio

from fastapi import WebSocket, WebSocketDisconnect

from specdec.serve.account import Account
from specdec.serve.errors import ApiError
from specdec.serve.generation import Generation
from specdec.serve.schema import Body, parse
from specdec.serve.service import Service
from specdec.serve.shapes import dump
from specdec.serve.stream import DONE, messages

WAITING = 8
"""Most requests of one connection that wait for an earlier one's answer."""

_UNSUPPORTED, _POLICY = 1003, 1008  # of RFC 6455


class Conversation:
    """One connection. Requests are answered in order; when the client goes, the running one ends at once.

    Args:
        socket: not accepted yet.
        service: answers.
        kind: what the messages are.
        tenant: the key that the client showed.
    """

    def __init__(self, socket: WebSocket, service: Service, kind: type[Body], tenant: str | None) -> None:
        self._socket = socket
        self._service = service
        self._kind = kind
        self._tenant = tenant
        self._inbox: asyncio.Queue[str | None] = asyncio.Queue()
        """Bodies that came; None: none will follow."""
        self._answered = 0
        self._running: Generation | None = None
        self._gone = False

    async def run(self) -> None:
        """Answer until the client goes."""
        await self._socket.accept()
        reader = asyncio.ensure_future(self._read())
        try:
            while not self._gone and (data := await self._inbox.get()) is not None:
                await self._answer(data)
        except (WebSocketDisconnect, TimeoutError):
            pass  # it went, or took nothing for too long
        finally:
            reader.cancel()

    async def _read(self) -> None:
        try:
            while True:
                message = await self._socket.receive()
                if message["type"] == "websocket.disconnect":
                    break
                if message.get("text") is None:
                    await self._socket.close(_UNSUPPORTED, "requests are text messages")
                    break
                if self._inbox.qsize() >= WAITING:
                    await self._socket.close(_POLICY, f"more than {WAITING} requests wait on this connection")
                    break
                self._inbox.put_nowait(message["text"])
        finally:
            self._gone = True
            self._inbox.put_nowait(None)
            if self._running:
                self._running.close()

    async def _answer(self, data: str) -> None:
        self._answered += 1
        request_id = f"{self._socket.state.request_id}-{self._answered}"
        account = Account(request_id, self._socket.url.path, self._socket.headers, self._service.tracing)
        try:
            await self._converse(data, account)
        finally:
            account.end()

    async def _converse(self, data: str, account: Account) -> None:
        try:
            body = parse(self._kind, data)
            if body.stream is False:
                raise ApiError(400, "a WebSocket always streams: leave stream out", param="stream")
            generation, shape = await self._service.begin(body, self._tenant, account, streamed=True)
            self._running = generation
            try:
                if not self._gone:
                    async for frames in messages(generation, shape, self._service.config.stream_rate):
                        await self._send(frames)
                        generation.delivered()
            finally:
                self._running = None
                generation.close()
        except ApiError as error:
            account.error = error
            self._service.metrics.refused.labels(str(error.status)).inc()
            await self._send([dump(error.body), DONE])

    async def _send(self, frames: list[str]) -> None:
        async with asyncio.timeout(self._service.config.stalled_seconds):
            for frame in frames:
                await self._socket.send_text(frame)
