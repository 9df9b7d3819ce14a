"""Runs the router and its replicas on this machine, adds and removes some on signals, and stops them in good order."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable

import uvicorn

from specdec.config import ServeConfig
from specdec.serve.scale.local import LocalReplicas
from specdec.serve.scale.router import Router
from specdec.serve.scale.supervisor import LAST_SECONDS, Supervisor
from specdec.serve.scale.worker import Load, Ready


class ScaledServer(uvicorn.Server):
    """As ``serve.server.Server``, with the work done by replicas. SIGTTIN adds one and SIGTTOU removes one.

    Args:
        load: loads the model, in the process of each replica; it must be picklable.
        config: limits, of the router and of each replica.
        n: replicas.
        ready: called with the address and what the replicas run, once all take requests.
    """

    def __init__(
        self, load: Load, config: ServeConfig, n: int, host: str, port: int, ready: Callable[[str, Ready], None]
    ) -> None:
        self.supervisor = Supervisor(load, config, n, changed=lambda replica: self.replicas.changed(replica))
        self.replicas = LocalReplicas(self.supervisor)
        self.router = Router(self.replicas, config)
        self._config = config
        self._ready = ready
        super().__init__(
            uvicorn.Config(
                self.router,
                host=host,
                port=port,
                ws="websockets-sansio",
                ws_max_size=config.max_body_bytes,
                lifespan="off",
                access_log=False,
                log_config=None,
                timeout_graceful_shutdown=int(LAST_SECONDS),
            )
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the replicas, then take requests. Raises ConfigError where a replica cannot start."""
        try:
            await self.supervisor.start()
        except BaseException:
            await self.supervisor.stop(0)
            raise
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTTIN, self.supervisor.add)
            loop.add_signal_handler(signal.SIGTTOU, self.supervisor.remove)
        first = self.supervisor.replicas[0].ready
        if self.started and first:
            self._ready(self.address, first)

    @property
    def address(self) -> str:
        """Where it listens, as a URL."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # As with one server: connections are still taken while requests run, and learn from /health that this one stops.
        self.router.closing = True
        await self.supervisor.stop(self._config.shutdown_seconds + LAST_SECONDS, lambda: self.force_exit)
        await super().shutdown(sockets)
        await self.replicas.close()
