"""One model behind the routes: admits requests, starts them, and ends them all when the server stops."""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from specdec import __version__
from specdec.config import ConfigError, ServeConfig
from specdec.llm import LLM
from specdec.metrics.prometheus import ServerMetrics
from specdec.serve.account import Account
from specdec.serve.errors import ApiError, engine_failed, shutting_down
from specdec.serve.generation import Generation
from specdec.serve.intake import Asked, Intake
from specdec.serve.schema import Body, ChatBody, CompletionBody
from specdec.serve.shapes import ChatShape, CompletionShape, Shape, Vocabulary
from specdec.serve.worker import Worker

if TYPE_CHECKING:
    from specdec.serve.tracing import Tracing

_T = TypeVar("_T")
_Given = TypeVarTuple("_Given")

POLL_SECONDS = 0.02


class Service:
    """Everything that a request needs once its body is known.

    Args:
        llm: the model; its engine must be used by nobody else.
        config: limits.
        tracing: keeps traces, in place of what ``config`` and the environment say.

    Raises:
        ConfigError: traces are asked for, but cannot be kept.
    """

    def __init__(self, llm: LLM, config: ServeConfig, tracing: Tracing | None = None) -> None:
        self.llm = llm
        self.config = config
        self.name = config.model_name or llm.name
        self.created = int(time.time())
        self.intake = Intake(llm)
        self.vocabulary: Vocabulary = llm.tokenizer
        self.worker = Worker(llm.engine)
        drafters = tuple(drafter.name for drafter in llm.engine.drafters)
        self.metrics = ServerMetrics(
            lambda: self.worker.snapshot,
            lambda: not self.worker.failed,
            self.name,
            drafters,
            {
                "version": __version__,
                "precision": llm.precision,
                "kv_format": llm.kv_format,
                "drafters": ",".join(drafters),
            },
        )
        self.tracing = tracing or _tracing(config)
        self.closing = False
        """No new requests: the server is about to stop."""
        self._most = llm.config.max_sequences + config.max_queue
        self._coming = 0
        """Sequences of requests that are being encoded or given to the engine."""
        self._generations: weakref.WeakSet[Generation] = weakref.WeakSet()
        self._encoders = ThreadPoolExecutor(max_workers=2, thread_name_prefix="encode")

    def check_health(self) -> None:
        """Raise ApiError where requests cannot be served."""
        if self.worker.failed:
            raise engine_failed()
        if self.closing:
            raise shutting_down()

    def check_model(self, name: str | None) -> None:
        """Raise ApiError unless this is the served model."""
        if name is not None and name != self.name:
            message = f"the model {name!r} is not served here; there is {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def beside(self, call: Callable[[*_Given], _T], *given: *_Given) -> _T:
        """Run what may take long on another thread than the event loop's and the engine's."""
        return await asyncio.get_running_loop().run_in_executor(self._encoders, call, *given)

    async def begin(self, body: Body, tenant: str | None, account: Account, *, streamed: bool) -> tuple[Generation, Shape]:
        """Start a request.

        Args:
            account: of the request; what becomes of it is noted there.

        Raises:
            ApiError: it cannot be served, or not now.
        """
        began = time.perf_counter()
        self.check_health()
        self.check_model(body.model)
        n = max(1, body.n or 1) * _n_prompts(body)
        self._admit(n)
        self._coming += n
        try:
            asked, shape = await self._encode(body, tenant)
            generation = Generation(asked, self.worker, self.metrics, self.vocabulary, account, streamed=streamed)
            account.generation = generation
            seconds = self.config.request_seconds - (time.perf_counter() - began)
            await generation.start(self.llm.end_tokens, max(0.0, seconds))
        finally:
            self._coming -= n
        self._generations.add(generation)
        return generation, shape

    async def _encode(self, body: Body, tenant: str | None) -> tuple[Asked, Shape]:
        if isinstance(body, ChatBody):
            return await self.beside(self.intake.chat, body, tenant), ChatShape(body, self.name, self.vocabulary)
        assert isinstance(body, CompletionBody)
        return await self.beside(self.intake.completion, body, tenant), CompletionShape(body, self.name, self.vocabulary)

    def _admit(self, n: int) -> None:
        if n > self._most:
            raise ApiError(400, f"the request asks for {n} answers, but this server holds {self._most} at once", param="n")
        if self.worker.n_open + self._coming + n > self._most:
            raise ApiError(
                429,
                f"the queue is full: {self.worker.n_open + self._coming} of {self._most} places are taken; try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )

    async def figures(self) -> bytes:
        """The metrics in Prometheus' format, as of now."""
        await self.worker.look()
        for generation in self._open:
            generation.measure()
        return await asyncio.to_thread(self.metrics.render)  # some milliseconds, in which no stream is to wait

    async def drain(self, seconds: float, hurried: Callable[[], bool]) -> None:
        """Take no more requests; let those that run go on for so long, unless hurried, then end them with an error."""
        self.closing = True
        end = time.perf_counter() + seconds
        while self._open and time.perf_counter() < end and not hurried():
            await asyncio.sleep(POLL_SECONDS)
        for generation in self._open:
            generation.cut(shutting_down())

    @property
    def _open(self) -> list[Generation]:
        return [generation for generation in self._generations if not generation.closed]

    async def stop(self) -> None:
        """End the engine's thread."""
        self._encoders.shutdown(wait=False, cancel_futures=True)
        await self.worker.stop()
        if self.tracing:
            await asyncio.to_thread(self.tracing.shut_down)


def _tracing(config: ServeConfig) -> Tracing | None:
    """What keeps traces, if they are wanted. OpenTelemetry is imported only then."""
    env = os.environ
    named = any(env.get(name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))
    refused = env.get("OTEL_SDK_DISABLED", "").lower() == "true" or env.get("OTEL_TRACES_EXPORTER") == "none"
    if config.otlp_endpoint is None and (refused or not named):
        if config.trace_sample is not None and not refused:
            raise ConfigError("trace_sample needs a collector: give otlp_endpoint, or set OTEL_EXPORTER_OTLP_ENDPOINT")
        return None
    try:
        from specdec.serve.tracing import Tracing
    except ImportError as error:
        raise ConfigError(
            f"a collector of traces is named, but OpenTelemetry is not installed ({error}): "
            "pip install 'specdec[otel]', or set OTEL_SDK_DISABLED=true"
        ) from error
    return Tracing.connected(config.otlp_endpoint, config.trace_sample)


def _n_prompts(body: Body) -> int:
    if isinstance(body, CompletionBody) and isinstance(body.prompt, list) and not isinstance(body.prompt[0], int):
        return len(body.prompt)
    return 1
