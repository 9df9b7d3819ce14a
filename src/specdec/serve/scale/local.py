"""Replicas on this machine, asked over loopback connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from typing import Any, Protocol

import httpx
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specdec.serve.scale.figures import labelled, rendered
from specdec.serve.scale.prefix import Held
from specdec.serve.scale.replicas import Answer, Asked, BrokenOff, Headers, NoReplica
from specdec.serve.scale.supervisor import Replica

CONNECT_SECONDS = 2.0
KEPT_SECONDS = 3.0
"""An idle connection is dropped before the server drops it."""
METRICS_SECONDS = 2.0


class Supervised(Protocol):
    """Who knows the replicas."""

    @property
    def replicas(self) -> list[Replica]: ...

    @property
    def ready(self) -> list[Replica]:
        """Those that take requests."""
        ...


class LocalReplicas:
    """Chooses among the replicas of a supervisor, and asks them.

    Args:
        supervisor: keeps them alive; ``changed`` is to be called when the state of one has changed.
    """

    def __init__(self, supervisor: Supervised) -> None:
        self._supervisor = supervisor
        self._held = Held()
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEPT_SECONDS),
            trust_env=False,
        )
        self.asked: dict[str, int] = {}
        """Requests given to each replica."""
        self.broken: dict[str, int] = {}
        """Those of them that it has not answered to the end."""

    def changed(self, replica: Replica) -> None:
        """What one holds that no longer takes requests is forgotten, since it goes with its process."""
        if replica.state != "ready":
            self._held.forget(replica.name)

    async def ask(self, asked: Asked, avoid: Collection[str]) -> Answer:
        ready = {replica.name: replica for replica in self._supervisor.ready if replica.name not in avoid}
        if not ready:
            raise NoReplica
        loads = {name: replica.load for name, replica in ready.items()}
        replica = ready[self._held.choose(loads, asked.keys)]
        self._held.note(replica.name, asked.keys)
        self.asked[replica.name] = self.asked.get(replica.name, 0) + 1
        url = f"{replica.url}{asked.path}" + (f"?{asked.query}" if asked.query else "")
        request = self._client.build_request(asked.method, url, headers=asked.headers, content=asked.body)
        replica.load += 1
        try:
            response = await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            replica.load -= 1
            raise self._broke(replica) from error
        except BaseException:
            replica.load -= 1
            raise
        return _LocalAnswer(self, replica, response)

    def _broke(self, replica: Replica) -> BrokenOff:
        self.broken[replica.name] = self.broken.get(replica.name, 0) + 1
        return BrokenOff(replica.name)

    def health(self) -> tuple[bool, dict[str, Any]]:
        replicas = [
            {"name": replica.name, "state": replica.state, "running": replica.load, "restarts": replica.restarts}
            for replica in self._supervisor.replicas
        ]
        return bool(self._supervisor.ready), {"replicas": replicas}

    async def metrics(self) -> bytes:
        """Each replica's own figures with its name as a label, and what is known of the replicas here."""
        ready = self._supervisor.ready
        texts = await asyncio.gather(*(self._metrics_of(replica) for replica in ready))
        names = [replica.name for replica in ready]
        return rendered([*labelled(zip(names, texts, strict=True)), *self._of_router()])

    async def _metrics_of(self, replica: Replica) -> str:
        try:
            return (await self._client.get(f"{replica.url}/metrics", timeout=METRICS_SECONDS)).text
        except httpx.TransportError:
            return ""  # its absence shows in replica_up

    def _of_router(self) -> Iterator[Metric]:
        replicas = self._supervisor.replicas
        up = GaugeMetricFamily("specdec:replica_up", "Whether the replica takes requests", labels=("replica",))
        running = GaugeMetricFamily("specdec:replica_requests", "Requests that it is answering", labels=("replica",))
        restarts = CounterMetricFamily("specdec:replica_restarts", "Times that it was started again", labels=("replica",))
        asked = CounterMetricFamily("specdec:replica_asked", "Requests that were given to it", labels=("replica",))
        broken = CounterMetricFamily("specdec:replica_broken_off", "Requests that it died of", labels=("replica",))
        for replica in replicas:
            label = (replica.name,)
            up.add_metric(label, float(replica.state == "ready"))
            running.add_metric(label, replica.load)
            restarts.add_metric(label, replica.restarts)
            asked.add_metric(label, self.asked.get(replica.name, 0))
            broken.add_metric(label, self.broken.get(replica.name, 0))
        yield from (up, running, restarts, asked, broken)

    async def close(self) -> None:
        await self._client.aclose()


class _LocalAnswer:
    """A response that is being read."""

    def __init__(self, replicas: LocalReplicas, replica: Replica, response: httpx.Response) -> None:
        self._replicas = replicas
        self._asked = replica
        self._response = response
        self.replica: str | None = replica.name
        self.status = response.status_code
        self.headers: Headers = [(name.lower(), value) for name, value in response.headers.raw]

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._response.aiter_raw():
                yield chunk
        except httpx.TransportError as error:
            raise self._replicas._broke(self._asked) from error

    async def close(self) -> None:
        self._asked.load -= 1
        await self._response.aclose()
