"""Runs the application on uvicorn, and stops it in good order."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from specdec.config import ServeConfig
from specdec.llm import LLM
from specdec.serve.app import create_app
from specdec.serve.service import Service
from specdec.serve.stream import STRAIGHT

if TYPE_CHECKING:
    from specdec.serve.tracing import Tracing

LAST_SECONDS = 5
"""For what remains to be sent when all requests have been ended."""


class _Straight:
    """Hands the server's own ``send`` to the application, which may write the middle of a stream past all its layers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["state"][STRAIGHT] = send
        await self._app(scope, receive, send)


class Server(uvicorn.Server):
    """Takes requests until it is told to stop; then those that run go on for a while, and the rest end with an error.

    Args:
        llm: the model; its engine must be used by nobody else.
        config: limits.
        ready: called with the address once connections are taken.
        tracing: keeps traces, in place of what ``config`` and the environment say.
    """

    def __init__(
        self,
        llm: LLM,
        config: ServeConfig,
        host: str,
        port: int,
        ready: Callable[[str], None] = lambda address: None,
        tracing: Tracing | None = None,
    ) -> None:
        app = create_app(llm, config, tracing)
        self.service: Service = app.state.service
        self._ready = ready
        super().__init__(
            uvicorn.Config(
                _Straight(app),
                host=host,
                port=port,
                ws="websockets-sansio",
                ws_max_size=config.max_body_bytes,
                access_log=False,
                log_config=None,
                timeout_graceful_shutdown=LAST_SECONDS,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready(self.address)

    @property
    def address(self) -> str:
        """Where it listens, as a URL."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # While requests run, connections are still taken: a load balancer then learns from /health that this server stops.
        await self.service.drain(self.service.config.shutdown_seconds, lambda: self.force_exit)
        await super().shutdown(sockets)
