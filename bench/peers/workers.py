"""Worker processes as the comparison sees them: start, ask, and an error that says what went wrong where."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protocol import Request

START_SECONDS = 900.0
"""Longest wait for all modes to be loaded and, with vLLM, compiled: one mode took 457 s on a busy machine."""
ANSWER_SECONDS = 600.0
LOG_LINES = 5


class WorkerError(Exception):
    """A worker that died, hung, or answered something else than an answer; the message says which and shows its last words."""


class UnavailableError(Exception):
    """A worker that says itself that it cannot run here; the message is its reason."""


class Worker:
    """One engine: a process that has one for each mode.

    Args:
        title: what the engine is called in messages.
        command: what to run.
        log: where its standard error goes.

    Raises:
        UnavailableError: it says that it cannot run here.
        WorkerError: it did not come up.
    """

    def __init__(self, title: str, command: Sequence[str], log: Path) -> None:
        self._title = title
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # a group of processes, to end a hanging mode together with its worker
            )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            hello = self._next("while it was loading", START_SECONDS)
            if "skipped" in hello:
                raise UnavailableError(hello["skipped"])
            if not hello.get("ready"):
                raise WorkerError(f"{title} began with {hello!r}, which is no greeting of a worker")
        except BaseException:
            self.close()
            raise
        self.modes: list[str] = hello["modes"]
        self.versions: dict[str, str] = hello["versions"]

    def ask(self, request: Request) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            WorkerError: there is none.
        """
        where = f"at prompt {request.id} ({request.mode})"
        record = {name: getattr(request, name) for name in ("id", "prompt", "token_ids", "max_tokens", "mode")}
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(record) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death(where) from None
        answer = self._next(where, ANSWER_SECONDS)
        if "error" in answer:
            raise WorkerError(f"{self._title} answered an error {where}: {answer['error']}")
        if answer.get("id") != request.id or not answer.get("tokens"):
            raise WorkerError(f"{self._title} gave no answer {where}, but {answer!r:.200}")
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):  # it is gone already, with something still unsent
                self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")  # the end, which no line is

    def _next(self, where: str, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self._kill()
            raise WorkerError(f"{self._title} said nothing for {seconds:.0f} s {where}{self._last_words()}") from None
        if not line:
            raise self._death(where)
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = line
        if not isinstance(record, dict):
            raise WorkerError(f"{self._title} said {line.strip()!r:.200} {where}, which is no JSON object")
        return record

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it is gone already
            os.killpg(self._process.pid, signal.SIGKILL)

    def _death(self, where: str) -> WorkerError:
        status = self._process.wait(timeout=10)
        return WorkerError(f"{self._title} ended with status {status} {where}{self._last_words()}")

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return "; its last words: " + " | ".join(lines[-LOG_LINES:]) if lines else ""
