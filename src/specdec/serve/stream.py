"""How answers travel over HTTP: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.serve.generation import Generation, Piece
from specdec.serve.shapes import Shape

_log = logging.getLogger(__name__)

DONE = "[DONE]"

PACE_SECONDS = 0.1
"""A stream with a rate limit is sent what this time allows, or one token, at once."""


def dump(value: Any) -> str:
    """Strict JSON in ASCII: no client can take a line separator within a text for the end of a line."""
    return _ENCODER.encode(value)


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))  # ``json.dumps`` would make one for every frame


class Reply(Response):
    """The answer of a generation as an HTTP response.

    Nothing is sent before the first token is there, so what fails until then has its proper status. When the client goes,
    the generation is closed at once.

    Args:
        generation: has started.
        shape: of the route.
        rate: tokens per second that a stream is sent; None: as they come.
        stalled: seconds after which a streaming client that takes nothing is given up.
    """

    def __init__(self, generation: Generation, shape: Shape, *, streamed: bool, rate: float | None, stalled: float) -> None:
        self._generation = generation
        self._shape = shape
        self._streamed = streamed
        self._rate = rate
        self._stalled = stalled
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing_when_gone(self._generation, receive):
            if self._streamed:
                await self._stream(scope, receive, send)
            else:
                await self._whole(scope, receive, send)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        await generation.wait()
        if generation.closed:
            return
        if generation.error:
            raise generation.error
        pieces = [piece for choice in generation.choices if (piece := choice.take())]
        body = dump(self._shape.whole(generation, pieces)).encode()
        await Response(body, media_type="application/json")(scope, receive, send)
        generation.delivered()

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async for frames in messages(self._generation, self._shape, self._rate):
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
            data = "".join([f"data: {frame}\n\n" for frame in frames]).encode()
            try:
                async with asyncio.timeout(self._stalled):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except TimeoutError:
                _log.warning("a client took nothing for %g s and is given up", self._stalled)
                return
            self._generation.delivered()
        if started:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that would gather chunks
]


async def messages(generation: Generation, shape: Shape, rate: float | None) -> AsyncIterator[list[str]]:
    """The frames of a stream as JSON, as many at a time as are ready; the last one says that it is done.

    Raises:
        ApiError: it failed before there was anything to send. A later failure is a frame.
    """
    begun = False
    due = 0.0
    most = None if rate is None else max(1, math.floor(rate * PACE_SECONDS))
    while not generation.closed:
        await generation.wait()
        while True:
            if most is not None and (early := due - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            pieces = _take(generation, most)
            if not pieces:
                break
            if rate is not None:
                due = max(due, time.perf_counter()) + sum(piece.stop - piece.start for piece in pieces) / rate
            frames = [dump(frame) for piece in pieces for frame in shape.chunks(piece)]
            if generation.finished and generation.error is None:
                yield [*frames, *map(dump, shape.last(generation)), DONE]
                return
            if frames:
                begun = True
                yield frames
        if generation.error:
            if not begun:
                raise generation.error
            yield [dump(generation.error.body), DONE]
            return


def _take(generation: Generation, most: int | None) -> list[Piece]:
    """What is new of each choice, of at most so many tokens together."""
    pieces = []
    for choice in generation.choices:
        if piece := choice.take(most):
            pieces.append(piece)
            if most is not None:
                most -= piece.stop - piece.start
                if most <= 0:
                    break
    return pieces


@contextmanager
def closing_when_gone(generation: Generation, receive: Receive) -> Iterator[None]:
    """Close a generation at the end, or as soon as its client has gone."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.close()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watcher.cancel()
        generation.close()
