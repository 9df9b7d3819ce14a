"""The same application as a Ray Serve deployment, on one machine or many (extra ``specdec[ray]``).

Two deployments: ``Engine`` is a replica, and ``Front`` is the router of ``--replicas`` in front of them. Ray starts, watches,
restarts and scales the engines; which of them gets a request is decided by ``PrefixRouter``.

The actor of an engine imports no PyTorch and holds no model: it owns a keeper, which has the replica. A replica that dies is
forked anew from a process that has imported all it needs, and one whose actor dies goes on for the next actor on its machine.

    serve run specdec.serve.scale.ray_app:app model=smollm2-135m-instruct max_replicas=4
"""

from __future__ import annotations

import asyncio
import functools
import json
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from typing import Any

import ray
from pydantic import BaseModel, ConfigDict
from ray import cloudpickle, serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from specdec.config import DEFAULT_MODEL, EngineConfig, ServeConfig
from specdec.serve.scale.figures import labelled, rendered
from specdec.serve.scale.keeper import Errand, Sealed
from specdec.serve.scale.local import LocalReplicas
from specdec.serve.scale.owner import Owner
from specdec.serve.scale.prefix import SLACK, Held
from specdec.serve.scale.replicas import Answer, Asked, BrokenOff, Headers, NoReplica
from specdec.serve.scale.router import Router
from specdec.serve.scale.worker import Load

HEALTH_SECONDS = 1.0
"""Between two questions of Ray's after an engine's health: so late it may learn that one has died."""
SILENT_SECONDS = 2.0
"""For how long an engine may leave one unanswered; three of these in a row and it is replaced."""
AGAIN_SECONDS = 10.0
"""For how long a request waits for an engine that is being started again, where no other one takes it."""


class Settings(BaseModel):
    """What ``serve run`` and a config file may set."""

    model_config = ConfigDict(extra="forbid")

    model: str = DEFAULT_MODEL
    precision: str = "auto"
    speculation: str = "auto"
    drafter: str | None = None
    threads: int | None = None
    """Of each engine; None: as many as it has CPUs."""
    device: str = "cpu"
    generation_config: str = "auto"
    max_sequences: int = 32
    max_len: int | None = None
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float = 8
    """Requests of each engine at which their number stays as it is."""
    cpus: float = 1
    """Of each engine."""
    gpus: float = 0


def app(args: dict[str, Any]) -> serve.Application:
    """The application, for ``serve run`` and config files.

    Args:
        args: fields of ``Settings``; text for numbers will do.
    """
    from specdec.llm import LLM

    settings = Settings.model_validate(args)
    load = functools.partial(
        LLM,
        settings.model,
        precision=settings.precision,  # type: ignore[arg-type]
        speculation=settings.speculation,
        drafter=settings.drafter,
        threads=settings.threads or max(1, int(settings.cpus)),
        device=settings.device,
        generation_config=settings.generation_config,
        max_len=settings.max_len,
        progress=False,
        max_sequences=settings.max_sequences,
    )
    return build(
        load,
        ServeConfig(api_keys=settings.api_keys, allowed_origins=settings.allowed_origins),
        scaling=AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            target_ongoing_requests=settings.target_ongoing_requests,
        ),
        max_sequences=settings.max_sequences,
        cpus=settings.cpus,
        gpus=settings.gpus,
    )


def build(
    load: Load,
    config: ServeConfig,
    *,
    scaling: AutoscalingConfig,
    max_sequences: int = EngineConfig().max_sequences,
    cpus: float = 1,
    gpus: float = 0,
) -> serve.Application:
    """The application from a function that loads the model.

    Args:
        load: called in the process of each replica; cloudpickle must be able to send it there.
        config: limits, of the router and of each engine's routes.
        scaling: how many engines there are.
        max_sequences: that an engine runs at once; it may queue ``config.max_queue`` more.
        cpus, gpus: of each engine.
    """
    engine = serve.deployment(
        Engine,
        name="Engine",
        autoscaling_config=scaling,
        max_ongoing_requests=max_sequences + config.max_queue,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=SILENT_SECONDS,
        graceful_shutdown_timeout_s=config.shutdown_seconds,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
    )

    def front() -> Router:
        name = serve.get_replica_context().app_name
        return Router(RayReplicas(serve.get_deployment_handle("Engine", app_name=name)), config)

    entry = serve.deployment(
        serve.ingress(front)(),
        name="Front",
        max_ongoing_requests=100_000,  # the engines bound what runs and what waits
        ray_actor_options={"num_cpus": 0},
    )
    return entry.bind(engine.bind(Errand(Sealed(cloudpickle.dumps(load)), config, uuid.uuid4().hex)))


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Ranks engines as ``prefix.Held`` does."""

    def initialize_state(self, slack: int = SLACK) -> None:
        self._slack = slack
        self._held = Held()
        self._running: defaultdict[str, set[str]] = defaultdict(set)
        """Ids of requests that each engine is answering."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        wanted, avoided = _keys(pending_request), _avoided(pending_request)
        left = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranks = []
        while left:
            loads = {name: len(self._running[name]) for name in left.keys() - avoided or left}
            ranks.append([left.pop(self._held.choose(loads, wanted, self._slack))])
        return ranks

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._running[replica_id.unique_id].add(pending_request.metadata.internal_request_id)
        self._held.note(replica_id.unique_id, _keys(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._running[replica_id.unique_id].discard(internal_request_id)  # one that was turned away never ran

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._held.forget(replica_id.unique_id)
        self._running.pop(replica_id.unique_id, None)


def _keys(pending: PendingRequest | None) -> list[bytes]:
    if pending is None or not pending.args or not isinstance(pending.args[0], Asked):
        return []
    return pending.args[0].keys


def _avoided(pending: PendingRequest | None) -> frozenset[str]:
    if pending is None or len(pending.args) < 2:
        return frozenset()
    avoided: frozenset[str] = pending.args[1]
    return avoided


Head = tuple[str, int, Headers]
"""The engine's name, and the status and the headers of an answer."""


class Engine:
    """The owner of a replica, in an actor."""

    async def __init__(self, errand: Errand) -> None:  # type: ignore[misc]  # Ray awaits it
        self._name = serve.get_replica_context().replica_id.unique_id
        place = json.dumps(ray.get_runtime_context().get_accelerator_ids(), sort_keys=True)
        self._owner = Owner(errand, self._name, place, changed=lambda replica: self._replicas.changed(replica))
        self._replicas = LocalReplicas(self._owner)
        await self._owner.start()

    async def __del__(self) -> None:
        """Called by Ray before it ends the actor, once no request runs."""
        await self._owner.stop()
        await self._replicas.close()

    def check_health(self) -> None:
        """Asked by Ray; an error has the engine replaced."""
        self._owner.check()

    async def figures(self) -> tuple[str, str]:
        """The name of this engine, and the metrics of its replica."""
        return self._name, (await self._replicas.metrics()).decode()

    async def answer(self, asked: Asked, avoid: frozenset[str]) -> AsyncGenerator[Head | bytes | None, None]:
        """The replica's response: its head, of status 0 where there is no replica now; then its body as it comes, and None
        where the replica is gone before the end. Closing it ends the request.

        Args:
            avoid: engines that could not answer. This one is among them where no other can, and waits for its replica.
        """
        if self._name in avoid:
            await self._owner.until_ready(AGAIN_SECONDS)
        try:
            answer = await self._replicas.ask(asked, ())
        except (BrokenOff, NoReplica):
            yield self._name, 0, []
            return
        try:
            yield self._name, answer.status, answer.headers
            async for chunk in answer.chunks():
                yield chunk
        except BrokenOff:
            yield None
        finally:
            await answer.close()


class RayReplicas:
    """Engines behind a handle. Ray chooses, through ``PrefixRouter``, and leaves out those that it knows to be dead."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def ask(self, asked: Asked, avoid: Collection[str]) -> Answer:
        response = self._streaming.answer.remote(asked, frozenset(avoid))
        try:
            name, status, headers = await anext(response)
        except RayActorError as error:
            raise BrokenOff(None) from error
        except DeploymentUnavailableError as error:
            raise NoReplica from error
        except asyncio.CancelledError:
            response.cancel()
            raise
        if not status:
            response.cancel()
            raise BrokenOff(name)
        return _RayAnswer(response, name, status, headers)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Ray watches the engines and knows best: its own routes and ``serve status`` tell of each."""
        return True, {}

    async def metrics(self) -> bytes:
        """Of the engines that answer; one that has just died is left out, as it soon is by Ray."""
        try:
            found = await self._handle.broadcast("figures").results_async(return_exceptions=True)
        except DeploymentUnavailableError:
            found = []
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, RayActorError):
                raise error
        return rendered(labelled(figures for figures in found if not isinstance(figures, RayActorError)))


class _RayAnswer:
    def __init__(self, response: DeploymentResponseGenerator[Any], name: str, status: int, headers: Headers) -> None:
        self._response = response
        self.replica: str | None = name
        self.status = status
        self.headers = headers

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._response:
                if chunk is None:
                    raise BrokenOff(self.replica)
                yield chunk
        except RayActorError as error:
            raise BrokenOff(self.replica) from error

    async def close(self) -> None:
        self._response.cancel()  # nothing happens where it has ended
