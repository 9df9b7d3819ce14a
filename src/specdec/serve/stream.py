"""How answers travel over HTTP: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator
from contextlib import contextmanager
from types import TracebackType, coroutine
from typing import Any, cast

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from specdec.serve.generation import Generation, Piece
from specdec.serve.shapes import Shape, dump

_log = logging.getLogger(__name__)

DONE = "[DONE]"

PACE_SECONDS = 0.1
"""A stream with a rate limit is sent what this time allows, or one token, at once."""

STRAIGHT = "straight"
"""Where the state of a scope has the server's own ``send``, which no layer of the application has wrapped, and of which it is
known that it may be called outside of a task."""


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
        started = ended = False
        straight = None if self._rate is not None else scope.get("state", {}).get(STRAIGHT)
        async with Patience(self._stalled) as patience, _Shortcut(self._generation, self._shape, straight) as shortcut:
            async for frames in messages(self._generation, self._shape, self._rate):
                patience.begin()
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
                await shortcut.clear()
                ended = frames[-1] == DONE
                await send(_events(frames, ended=ended))
                patience.end()
                self._generation.delivered()
                shortcut.open = True
            if shortcut.ended:
                patience.begin()
                await shortcut.clear()
        if started and not (ended or shortcut.ended or patience.lost):
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _events(frames: list[str], *, ended: bool = False) -> Message:
    data = "".join([f"data: {frame}\n\n" for frame in frames]).encode()
    return {"type": "http.response.body", "body": data, "more_body": not ended}


class Patience:
    """Gives up a client that takes nothing for so many seconds: leaves the ``async with`` block.

    One timer for the whole of a stream, since nearly everything that is sent is taken at once.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None
        self._loop = asyncio.get_running_loop()
        self.lost = False

    def begin(self) -> None:
        """Something is being sent from now on."""
        self._since = self._loop.time()

    def end(self) -> None:
        """It has been taken."""
        self._since = None

    async def __aenter__(self) -> Patience:
        self._limit = asyncio.timeout(None)
        await self._limit.__aenter__()
        self._timer = self._loop.call_later(self._seconds, self._look)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        self._timer.cancel()
        try:
            await self._limit.__aexit__(kind, error, at)
        except TimeoutError:
            self.lost = True
            _log.warning("a client took nothing for %g s and is given up", self._seconds)
        return self.lost

    def _look(self) -> None:
        now = self._loop.time()
        since = now if self._since is None else self._since
        if now - since >= self._seconds:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_at(since + self._seconds, self._look)


class _Shortcut:
    """Writes what follows the first frames of a stream there and then, instead of waking its task for it.

    A pass has a token for each of many streams, and the last of them waits for all others. Streams end together too: what has
    to be done at an end waits until all have their last frames.

    Args:
        send: the server's own; None: there is no shortcut.
    """

    def __init__(self, generation: Generation, shape: Shape, send: Send | None) -> None:
        self._generation, self._shape, self._send = generation, shape, send
        self._rest: asyncio.Task[None] | None = None
        """Sends the rest of what could not be written at once."""
        self.open = False
        """The response has begun, and its task sends nothing."""
        self.ended = False
        """The end of the response was written here."""

    async def clear(self) -> None:
        """Close it, and wait until all that was written here has gone."""
        self.open = False
        if self._rest:
            await self._rest
            self._rest = None

    def _is_clear(self) -> bool:
        if self._rest and self._rest.done() and not self._rest.exception():
            self._rest = None
        return self._rest is None

    def _write(self) -> bool:
        generation = self._generation
        if not self.open or generation.error or not self._is_clear():
            return False
        generation.sending()
        frames = [frame for piece in _take(generation, None) for frame in self._shape.frames(piece)]
        if generation.finished:
            self.ended = True
            frames += [*self._shape.last(generation), DONE]
        if not frames:
            return True
        assert self._send is not None
        sending = cast(Coroutine[Any, Any, None], self._send(_events(frames, ended=self.ended)))
        try:
            waits_for = sending.send(None)
        except StopIteration:
            generation.delivered()
        else:  # the client is slow: what follows waits for this, and goes the long way
            self._rest = asyncio.ensure_future(_go_on(sending, waits_for))
        return not self.ended

    async def __aenter__(self) -> _Shortcut:
        if self._send:
            self._generation.write = self._write
        return self

    async def __aexit__(self, *error: object) -> None:
        self._generation.write = None
        if self._rest:
            self._rest.cancel()


async def _go_on(begun: Coroutine[Any, Any, None], waits_for: Any) -> None:
    """The rest of a coroutine that was begun outside of any task, and waits for something."""
    await _resumed(begun, waits_for)


@coroutine
def _resumed(begun: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    try:
        yield waits_for
        yield from begun
    finally:
        begun.close()


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
            frames = [frame for piece in pieces for frame in shape.frames(piece)]
            if generation.finished and generation.error is None:
                yield [*frames, *shape.last(generation), DONE]
                return
            if frames:
                begun = True
                yield frames
        if generation.error:
            if not begun:
                raise generation.error
            yield [dump(generation.error.body), DONE]
            return
        if generation.finished:
            return  # its end was written by a shortcut


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
