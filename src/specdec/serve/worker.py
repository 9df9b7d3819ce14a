"""The engine's thread. It owns the engine and never waits for a request.

Commands go in through a queue that is emptied between passes, so whoever hangs up has freed his blocks before the next one.
Deltas come out once per pass, in one call on the event loop's thread. Nothing here encodes, decodes, or writes to a socket;
only where a request has stop strings does the engine see text, since where they end it decides what is computed next.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVarTuple

from specdec.config import SamplingParams
from specdec.engine import Engine, RequestError
from specdec.metrics.snapshot import Snapshot
from specdec.metrics.watch import Watch
from specdec.serve.errors import ApiError, engine_failed
from specdec.serve.promptness import ask_for_short_turns
from specdec.types import Delta, Speculation, Stopper, Times

_log = logging.getLogger(__name__)

SWITCH_SECONDS = 5e-5
"""Python's default lets one thread keep the other waiting for 5 ms, which is a whole pass of a small model."""

OBSERVE_SECONDS = 0.05
"""Most by which the copy of the engine's numbers lags behind, and a pass: to make one costs as much as some tokens' frames."""


class Listener(Protocol):
    """Whoever waits for a sequence. Called on the event loop's thread only."""

    def started(self) -> None:
        """The engine has the sequence."""
        ...

    def receive(self, delta: Delta, computed: float) -> None:
        """Take what a pass added; ``computed`` is the time (perf_counter) at which the pass ended."""
        ...

    def flush(self) -> None:
        """Everything that the pass added has been received, by all listeners."""
        ...

    def failed(self, error: ApiError) -> None:
        """The sequence has ended without an answer."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to run, as the engine takes it."""

    prompt: list[int]
    params: SamplingParams
    end_tokens: frozenset[int]
    seed: int
    stopper: Stopper | None
    salt: str
    speculation: Speculation
    times: Times


@dataclass(frozen=True, slots=True)
class _Add:
    jobs: Many[Job]
    listeners: Many[Listener]
    started: asyncio.Future[list[int]]


@dataclass(frozen=True, slots=True)
class _Abort:
    ids: Many[int]


_Given = TypeVarTuple("_Given")

_Command: TypeAlias = _Add | _Abort | None
"""None ends the thread."""


class Worker:
    """Runs an engine in a thread of its own.

    All methods are for the event loop's thread, whose loop must run as long as the worker does.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._listeners: dict[int, Listener] = {}
        self._starting: set[asyncio.Future[list[int]]] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.failed = False
        """The engine has raised what it must never raise; nothing runs any more."""
        self._watch = Watch()
        self.snapshot = Snapshot.of(engine, self._watch)
        """The engine's numbers: of a moment ago while it runs, its latest ones once it rests. Replaced whole, so any thread may
        read it."""
        self._observed = 0.0
        """When that was."""

    @property
    def n_open(self) -> int:
        """Sequences that wait or run."""
        return len(self._listeners)

    def start(self) -> None:
        """Begin; the running event loop is the one that listeners are called on."""
        self._loop = asyncio.get_running_loop()
        sys.setswitchinterval(SWITCH_SECONDS)
        self._thread.start()  # before this thread asks for short turns, which threads that it starts then would get too
        ask_for_short_turns()

    async def stop(self) -> None:
        """End the thread after its present pass; what still runs is dropped."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def add(self, jobs: Many[Job], listeners: Many[Listener]) -> list[int]:
        """Give sequences to the engine, all or none; when cancelled, none.

        Returns:
            Their ids, for ``abort``.

        Raises:
            RequestError: one of them cannot be served as it stands.
            ApiError: the engine has failed.
        """
        if self.failed:
            raise engine_failed()
        assert self._loop is not None
        started: asyncio.Future[list[int]] = self._loop.create_future()
        self._starting.add(started)
        started.add_done_callback(self._starting.discard)
        self._commands.put(_Add(jobs, listeners, started))
        try:
            return await started
        except asyncio.CancelledError:
            if not started.cancelled() and started.exception() is None:  # it started while this was being cancelled
                self.abort(started.result())
            raise

    def abort(self, ids: Many[int]) -> None:
        """End sequences before the next pass. Their listeners hear nothing more."""
        for sequence_id in ids:
            self._listeners.pop(sequence_id, None)
        self._commands.put(_Abort(ids))

    # On the engine's thread.

    def _run(self) -> None:
        try:
            while self._obey():
                self._advance()
        except BaseException:
            _log.exception("the engine has failed; all requests end with an error")
            self.snapshot = self.snapshot.at_rest()
            self._tell(self._fail)

    def _advance(self) -> None:
        """Run a pass. The engine's numbers are copied now and then while tokens are on their way, and before an answer that is
        whole: whoever has that finds it counted."""
        deltas = self._engine.step()
        computed = time.perf_counter()
        ended = any(delta.finish_reason for delta in deltas)
        if ended:
            self._observe()
        if deltas:
            self._tell(self._deliver, deltas, computed)
        if not ended and computed > self._observed + OBSERVE_SECONDS:
            self._observe()

    def _obey(self) -> bool:
        """Carry out what was asked since the last pass, waiting while there is nothing to compute; False ends the thread."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            match command:
                case None:
                    return False
                case _Add():
                    self._add(command)
                case _Abort():
                    for sequence_id in command.ids:
                        self._engine.abort(sequence_id)
            self._observe()

    def _add(self, command: _Add) -> None:
        ids: list[int] = []
        try:
            for job in command.jobs:
                ids.append(self._run_job(job))  # noqa: PERF401 - those before one that is refused are to be ended
        except RequestError as error:
            for sequence_id in ids:
                self._engine.abort(sequence_id)
            self._tell(self._refused, command, error)
        else:
            self._tell(self._started, command, ids)

    def _run_job(self, job: Job) -> int:
        return self._engine.add(
            job.prompt,
            job.params,
            job.end_tokens,
            job.seed,
            job.stopper,
            salt=job.salt,
            speculation=job.speculation,
            times=job.times,
        )

    def _observe(self) -> None:
        self.snapshot = Snapshot.of(self._engine, self._watch)
        self._observed = time.perf_counter()

    def _tell(self, call: Callable[[*_Given], object], *given: *_Given) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *given)
        except RuntimeError:
            _log.debug("nobody listens any more: the event loop has ended")

    # On the event loop's thread.

    def _started(self, command: _Add, ids: list[int]) -> None:
        if command.started.done():  # whoever asked has gone
            self.abort(ids)
            return
        self._listeners.update(zip(ids, command.listeners, strict=True))
        for listener in command.listeners:
            listener.started()
        command.started.set_result(ids)

    def _refused(self, command: _Add, error: RequestError) -> None:
        if not command.started.done():
            command.started.set_exception(error)

    def _deliver(self, deltas: list[Delta], computed: float) -> None:
        heard = []
        for delta in deltas:
            listener = self._listeners.get(delta.sequence_id)
            if listener is None:
                continue  # it was aborted while this pass ran
            if delta.finish_reason is not None:
                del self._listeners[delta.sequence_id]
            listener.receive(delta, computed)
            heard.append(listener)
        for listener in heard:
            listener.flush()

    def _fail(self) -> None:
        self.failed = True
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.failed(engine_failed())
        for started in list(self._starting):
            if not started.done():
                started.set_exception(engine_failed())
