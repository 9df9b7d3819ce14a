"""Requests that arrive together begin one after the other, and tokens are sent between them."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send


class Turns:
    """ASGI middleware: lets one request begin in an iteration of the event loop.

    To route a request and check it takes some milliseconds of the event loop. Sixteen that come at once would keep all
    streams waiting for the sum of it; so streams wait for one of them at most.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            async with self._turn:  # in the order of arrival
                await asyncio.sleep(0)
        await self._app(scope, receive, send)
