"""Keeps the replicas of this machine alive: starts them, watches their health, and starts anew what died or fell silent."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import httpx

from specdec.config import ConfigError, ServeConfig
from specdec.serve.scale.worker import Failed, Load, Ready, run

_log = logging.getLogger(__name__)

HEALTH_SECONDS = 1.0
"""Between two questions after a replica's health."""
SILENCE = 5
"""Unanswered questions, of ``HEALTH_SECONDS`` at most each, after which a replica is taken for dead."""
AGAIN_SECONDS = 1.0
"""Before a replica that died at its start is started again; doubled each time, up to thirty times that."""
LAST_SECONDS = 8.0
"""For a replica to end after all requests have."""
_GLANCE_SECONDS = 0.02


class Replica:
    """One replica: its present process, or none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = "starting"
        self.ready: Ready | None = None
        self.process: BaseProcess | None = None
        self.restarts = 0
        self.failures = 0
        """Starts that have failed since the last one that did not."""
        self.leaving = False
        """It gets no new requests and ends with its last one."""
        self.load = 0
        """Requests that it is answering."""

    @property
    def url(self) -> str:
        assert self.ready is not None
        return self.ready.url


class Supervisor:
    """The replicas.

    Args:
        load: loads the model, in the replica's process; it must be picklable.
        config: of each replica's server.
        n: how many there are at first.
        changed: called when a replica takes requests, and when it no longer does.
    """

    def __init__(
        self, load: Load, config: ServeConfig, n: int, changed: Callable[[Replica], None] = lambda replica: None
    ) -> None:
        self._load = load
        self._config = config
        self._changed = changed
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        # Replicas are forks of a process that has imported all they need and runs no thread: none waits for PyTorch again.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["specdec.serve.server"])
        self._client = httpx.AsyncClient(timeout=HEALTH_SECONDS, trust_env=False)
        self.replicas = [Replica(str(i)) for i in range(n)]

    @property
    def ready(self) -> list[Replica]:
        """Those that take requests."""
        return [replica for replica in self.replicas if replica.state == "ready"]

    async def start(self) -> None:
        """Start all and wait until they take requests: the first one alone, since it may have to fetch the model and to
        measure its passes, which the others then find done.

        Raises:
            ConfigError: one of them cannot start.
        """
        for some in (self.replicas[:1], self.replicas[1:]):
            started = [asyncio.get_running_loop().create_future() for _ in some]
            self._tasks += [asyncio.create_task(self._keep(*both)) for both in zip(some, started, strict=True)]
            await asyncio.gather(*started)

    def add(self) -> None:
        """Start one more, with the lowest name that is free; it takes requests once it is ready."""
        if self._closing:
            return
        taken = {replica.name for replica in self.replicas}
        replica = Replica(next(name for i in range(len(taken) + 1) if (name := str(i)) not in taken))
        self.replicas.append(replica)
        _log.info("replica %s is started: %d are to run", replica.name, len(self._staying))
        self._tasks.append(asyncio.create_task(self._try(replica)))

    def remove(self) -> None:
        """Give the last one, of those first that do not work, no more requests, and end it when it has none left; one stays in
        any case."""
        if self._closing:
            return
        if len(self._staying) == 1:
            _log.warning("the last replica stays")
            return
        replica = max(self._staying, key=lambda replica: (replica.state != "ready", int(replica.name)))
        replica.leaving, replica.state = True, "stopping"
        _log.info("replica %s is to end: %d are to run", replica.name, len(self._staying))
        self._tasks.append(asyncio.create_task(self._let_go(replica)))

    @property
    def _staying(self) -> list[Replica]:
        return [replica for replica in self.replicas if not replica.leaving]

    async def _try(self, replica: Replica) -> None:
        """Keep an added replica, unless it cannot start."""
        started = asyncio.get_running_loop().create_future()
        await self._keep(replica, started)
        if started.done() and (error := started.exception()):
            _log.error("%s", error)
            self.replicas.remove(replica)

    async def _let_go(self, replica: Replica) -> None:
        while replica.load:
            await asyncio.sleep(_GLANCE_SECONDS)
        if replica.process and replica.process.is_alive():
            replica.process.terminate()

    def end(self) -> None:
        """Tell all to stop: those that run requests take their time for it, as a server does that stops."""
        self._closing = True
        for replica in self.replicas:
            if replica.process and replica.process.is_alive():
                replica.process.terminate()

    async def stop(self, seconds: float, hurried: Callable[[], bool] = lambda: False) -> None:
        """Wait so long for all to end, unless hurried, then end them."""
        self.end()
        end = time.monotonic() + seconds
        for replica in list(self.replicas):
            while replica.process and replica.process.is_alive() and time.monotonic() < end and not hurried():
                await asyncio.sleep(_GLANCE_SECONDS)
            if replica.process and replica.process.is_alive():
                replica.process.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    async def _keep(self, replica: Replica, started: asyncio.Future[None]) -> None:
        """Run a replica's processes one after the other, until it is to leave."""
        while not (self._closing or replica.leaving):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=run, args=(self._load, self._config, theirs), name=f"specdec-{replica.name}", daemon=True
            )
            process.start()
            theirs.close()
            replica.process = process
            began = time.monotonic()
            try:
                said = await _told(ours)
                if isinstance(said, Ready):
                    replica.ready, replica.failures = said, 0
                    replica.state = "stopping" if replica.leaving else "ready"
                    self._changed(replica)
                    _log.info("replica %s is ready after %.1f s", replica.name, time.monotonic() - began)
                    if not started.done():
                        started.set_result(None)
                    await self._watch(replica, process)
            finally:
                replica.state = "stopping" if self._closing or replica.leaving else "starting"
                self._changed(replica)
                if not self._closing and process.is_alive():
                    process.kill()
                ours.close()
            await asyncio.to_thread(process.join)
            if self._closing or replica.leaving:
                break
            if not started.done():
                reason = said.message if isinstance(said, Failed) else f"it ended with code {process.exitcode}"
                started.set_exception(ConfigError(f"replica {replica.name} does not start: {reason}"))
                return
            replica.restarts += 1
            _log.error("replica %s ended with code %s and is started again", replica.name, process.exitcode)
            if said is None or isinstance(said, Failed):
                replica.failures += 1
                self._changed(replica)
                await asyncio.sleep(AGAIN_SECONDS * min(2 ** (replica.failures - 1), 30))
        if replica.leaving:
            self.replicas.remove(replica)

    async def _watch(self, replica: Replica, process: BaseProcess) -> None:
        """Return when the process has ended, or does not answer, or says that its engine has failed."""
        silent = 0
        ended = _readable(process.sentinel)
        try:
            while silent < SILENCE:
                await asyncio.wait({ended}, timeout=HEALTH_SECONDS)
                if ended.done():
                    return
                try:
                    answer = await self._client.get(f"{replica.url}/health")
                    silent = 0
                except httpx.TimeoutException:
                    silent += 1
                except httpx.TransportError:
                    continue  # it is ending; the process tells when
                else:
                    if answer.status_code == 503 and answer.json()["error"]["code"] == "engine_failed":
                        _log.error("the engine of replica %s has failed", replica.name)
                        return
            _log.error("replica %s does not answer", replica.name)
        finally:
            ended.cancel()


def _readable(descriptor: int) -> asyncio.Future[None]:
    """A future that is done once there is something to read."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        loop.remove_reader(descriptor)
        if not future.done():
            future.set_result(None)

    loop.add_reader(descriptor, readable)
    future.add_done_callback(lambda _: loop.remove_reader(descriptor))
    return future


async def _told(connection: Connection) -> Any:
    """What a starting process says; None where it ends without a word."""
    await _readable(connection.fileno())
    with suppress(EOFError, OSError):
        return connection.recv()
    return None
