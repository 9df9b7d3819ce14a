"""The engine's thread. It owns the engine and never waits for a request.

Commands go in through a queue that is emptied between passes, so whoever hangs up has freed his blocks before the next one.
Deltas come out once per pass, in one call on the event loop's thread. Nothing here encodes, decodes, or writes to a socket;
only where a request has stop strings does the engine see text, since where they end it decides what is computed next.

Where passes keep all cores busy, the event loop has its turn before the next one, for a few milliseconds at most: what is to be
sent goes out at once. That costs no time on two cores: otherwise either thread would wait for Python's lock again and again
while the other holds it, and the event loop for a core, which Linux hands over at its next tick.
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
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVarTuple

import torch

from specdec.config import SamplingParams
from specdec.engine import Engine, RequestError
from specdec.metrics.snapshot import Snapshot
from specdec.metrics.watch import Watch
from specdec.serve.errors import ApiError, engine_failed
from specdec.serve.promptness import ask_for_short_turns, turn_seconds
from specdec.types import Delta, Speculation, Stopper, Times

_log = logging.getLogger(__name__)

SWITCH_SECONDS = 5e-5
"""Python's default lets one thread keep the other waiting for 5 ms, which is a whole pass of a small model."""

WATCH_SECONDS = 0.25
"""Between two looks at how often drafters are right, and a pass."""
LOOK_SECONDS = 1.0
"""Longest that whoever wants to see the engine's numbers waits for the end of a pass."""


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


@dataclass(frozen=True, slots=True)
class _Look:
    seen: asyncio.Future[None]


_Given = TypeVarTuple("_Given")

_Command: TypeAlias = _Add | _Abort | _Look | None
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
        self._looking: set[asyncio.Future[None]] = set()
        self._sent = threading.Event()
        """The event loop has done what a pass gave it to do."""
        self.turn_seconds = turn_seconds(torch.get_num_threads() if engine.model.device.type == "cpu" else 0)
        """Longest that the next one waits for that."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.failed = False
        """The engine has raised what it must never raise; nothing runs any more."""
        self._watch = Watch()
        self._watched = 0.0
        """When it last looked."""
        self.snapshot = Snapshot.of(engine, self._watch)
        """The engine's numbers when ``look`` was last called. Replaced whole, so any thread may read it."""

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

    async def look(self) -> None:
        """Have the engine's numbers copied to ``snapshot``, between two passes, so that all are of one moment. Where that would
        take too long, an earlier copy stays."""
        if self.failed:
            return
        seen = asyncio.get_running_loop().create_future()
        self._looking.add(seen)
        seen.add_done_callback(self._looking.discard)
        self._commands.put(_Look(seen))
        with suppress(TimeoutError):
            await asyncio.wait_for(seen, LOOK_SECONDS)

    # On the engine's thread.

    def _run(self) -> None:
        try:
            while self._obey():
                self._sent.clear()
                if self._advance():
                    self._sent.wait(self.turn_seconds)
        except BaseException:
            _log.exception("the engine has failed; all requests end with an error")
            self._tell(self._fail, self._last())

    def _last(self) -> Snapshot:
        try:
            now = Snapshot.of(self._engine, self._watch)
        except Exception:  # it may have failed in the middle of anything
            now = self.snapshot
        return now.at_rest()

    def _advance(self) -> bool:
        """Run a pass; is there something to send?"""
        deltas = self._engine.step()
        computed = time.perf_counter()
        if deltas:
            self._tell(self._deliver, deltas, computed)
        if computed > self._watched + WATCH_SECONDS:
            self._watch.look(self._engine.stats)
            self._watched = computed
        return bool(deltas)

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
                case _Look():
                    self._tell(self._seen, command.seen, Snapshot.of(self._engine, self._watch))

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

    def _seen(self, seen: asyncio.Future[None], snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        if not seen.done():  # nobody has given up waiting
            seen.set_result(None)

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
        assert self._loop is not None
        self._loop.call_soon(self._sent.set)  # behind the tasks that have just been woken

    def _fail(self, snapshot: Snapshot) -> None:
        self.failed = True
        self.snapshot = snapshot
        for seen in list(self._looking):
            if not seen.done():
                seen.set_result(None)
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.failed(engine_failed())
        for started in list(self._starting):
            if not started.done():
                started.set_exception(engine_failed())
