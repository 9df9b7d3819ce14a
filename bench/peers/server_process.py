"""A server in a process of its own: its start, its turns, and an error that says what went wrong."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.2
ANSWER_SECONDS = 240.0
"""Longest wait for an answer: the slowest server, with 32 requests at once, takes less than half of it."""
LAST_SECONDS = 2.0
"""For a process to end whose connections have broken off."""
LOG_LINES = 3


class ServerError(Exception):
    """A server that did not come up, or did not answer; the message says why and shows its last words."""


class Server:
    """A server that runs while it is entered and is halted otherwise, so that it takes no time from one that is measured.

    Args:
        command: what to run.
        port: where it will listen.
        log: where its output goes.
        seconds: longest wait until it is ready.

    Raises:
        ServerError: it did not come up.
    """

    def __init__(self, command: Sequence[str], port: int, log: Path, seconds: float) -> None:
        self._port, self._log = port, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            self._process = subprocess.Popen(
                list(command),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a group of processes, to halt and end a server with all its own
            )
        try:
            self._wait(time.monotonic() + seconds)
        except BaseException:
            self.close()
            raise
        self.__exit__()

    def __enter__(self) -> Server:
        self._signal(signal.SIGCONT)
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGSTOP)

    def answer(self, body: Mapping[str, Any]) -> tuple[int, float]:
        """How many tokens came, and after how many seconds.

        Raises:
            ServerError: none did.
        """
        began = time.perf_counter()
        try:
            status, data = self._ask("POST", "/v1/completions", json.dumps(body))
        except TimeoutError:
            raise ServerError(f"it gave no answer within {ANSWER_SECONDS:.0f} s{self._last_words()}") from None
        except (OSError, http.client.HTTPException) as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=LAST_SECONDS)
            died = self._process.returncode
            how = f"it ended with status {died}" if died is not None else f"the connection broke off ({error})"
            raise ServerError(f"{how}{self._last_words()}") from error
        if status != http.client.OK:
            raise ServerError(f"it answered {status}: {data.decode(errors='replace'):.300}")
        return int(json.loads(data)["usage"]["completion_tokens"]), time.perf_counter() - began

    def close(self) -> None:
        """End the process."""
        self._signal(signal.SIGCONT)
        for kind in (signal.SIGTERM, signal.SIGKILL):
            self._signal(kind)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
                return

    def _wait(self, end: float) -> None:
        while True:
            if self._process.poll() is not None:
                status = self._process.returncode
                raise ServerError(f"it ended with status {status} before it was ready{self._last_words()}")
            with suppress(OSError, http.client.HTTPException):
                if self._ask("GET", "/health", None)[0] == http.client.OK:
                    return
            if time.monotonic() > end:
                raise ServerError(f"it was not ready in time{self._last_words()}")
            time.sleep(POLL_SECONDS)

    def _signal(self, kind: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it is gone already
            os.killpg(self._process.pid, kind)

    def _ask(self, method: str, route: str, body: str | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS)
        try:
            connection.request(method, route, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return "; its last words: " + " | ".join(lines[-LOG_LINES:])[-600:] if lines else ""
