"""Who owns a keeper: takes over one that has lost its owner, or starts one, and knows the state of its replica."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import pickle
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from specdec.config import ConfigError
from specdec.serve.scale.keeper import STOP, TAKEN, Errand
from specdec.serve.scale.supervisor import Replica
from specdec.serve.scale.worker import Ready

_log = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
"""For a keeper that is found to say whether it can be taken over; one that does not is left alone."""
FAILURES = 3
"""Starts of the replica that fail one after the other, after which it is not expected to come back."""


class Owner:
    """The owner of a keeper. Of its replica it knows what ``LocalReplicas`` has to be told by a supervisor.

    Args:
        errand: what is to be kept.
        name: of the replica.
        place: what else must be the same for a keeper to be taken over: which accelerators it was given, say.
        changed: called when the replica takes requests, and when it no longer does.
    """

    def __init__(
        self, errand: Errand, name: str, place: str = "", changed: Callable[[Replica], None] = lambda replica: None
    ) -> None:
        self._errand = errand
        self._kind = hashlib.blake2b(json.dumps([errand.name, place]).encode(), digest_size=8).hexdigest()
        self._changed = changed
        self.replica = Replica(name)
        self.process: subprocess.Popen[bytes] | None = None
        """The keeper; None where it was taken over."""
        self._error: str | None = None
        self._ended = False
        """The keeper is gone."""
        self._news = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._hearing: asyncio.Task[None] | None = None

    @property
    def replicas(self) -> list[Replica]:
        return [self.replica]

    @property
    def ready(self) -> list[Replica]:
        """The replica, if it takes requests."""
        return [self.replica] if self.replica.state == "ready" else []

    async def start(self) -> None:
        """Take a keeper over or start one, and wait until the replica takes requests.

        Raises:
            ConfigError: it cannot.
        """
        for path in sorted(_folder().glob(f"{self._kind}-*")):
            if await self._take(path, ANSWER_SECONDS):
                _log.warning("a replica that has lost its owner is taken over")
                break
        else:
            self.process, path = await asyncio.to_thread(self._begin)
            self._ended = not await self._take(path, None)
        while not (self.ready or self._error or self._ended):
            await self._news.wait()
        if not self.ready:
            await self.stop()
            raise ConfigError(self._error or "the replica's keeper has ended; the log says more")

    async def until_ready(self, seconds: float) -> None:
        """Wait until the replica takes requests, but not longer than that."""
        try:
            async with asyncio.timeout(seconds):
                while not (self.ready or self._ended):
                    await self._news.wait()
        except TimeoutError:
            pass  # who asks it learns that

    def check(self) -> None:
        """Raise RuntimeError where the replica is not expected to come back."""
        if self._ended:
            raise RuntimeError("the replica's keeper is gone")
        if self.replica.failures >= FAILURES:
            raise RuntimeError(f"the replica could not be started {self.replica.failures} times in a row; its log says more")

    async def stop(self) -> None:
        """End the replica and its keeper, in good order."""
        if self._writer and self._hearing:
            self._writer.write(STOP)
            await self._hearing
            self._writer.close()
        if self.process:
            await asyncio.to_thread(self.process.wait)

    def _begin(self) -> tuple[subprocess.Popen[bytes], Path]:
        """A new keeper's process, and the path of its socket."""
        path = _folder() / f"{self._kind}-{secrets.token_hex(4)}"
        hidden = path.with_name(f".{path.name}")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(hidden))
            listening.listen()
            hidden.rename(path)  # it is found only now, when it can be connected to
            code = "from specdec.serve.scale.keeper import main; main()"
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(listening.fileno()), str(path)],
                stdin=subprocess.PIPE,
                pass_fds=[listening.fileno()],
                start_new_session=True,  # what ends a whole group of processes is not to end this one
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        assert process.stdin
        with process.stdin as stdin:
            pickle.dump(self._errand, stdin)
        return process, path

    async def _take(self, path: Path, seconds: float | None) -> bool:
        """Become the owner of the keeper at this socket; False where it has one, or is gone, or silent for so long."""
        try:
            reader, writer = await asyncio.open_unix_connection(str(path))
        except OSError:  # its process is gone, and may have left its socket
            path.unlink(missing_ok=True)
            return False
        try:
            async with asyncio.timeout(seconds):
                line = await reader.readline()
        except (OSError, TimeoutError):
            line = b""
        if not line or json.loads(line)["state"] == TAKEN:
            writer.close()
            return False
        self._writer = writer
        self._hear(line)
        self._hearing = asyncio.create_task(self._follow(reader))
        return True

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        """Until the keeper is gone."""
        try:
            async for line in reader:
                self._hear(line)
        except ConnectionError:
            pass  # it went while this one spoke
        self._ended = True
        self.replica.state = "stopping"
        self._spread()

    def _hear(self, line: bytes) -> None:
        told = json.loads(line)
        replica = self.replica
        replica.state, replica.restarts, replica.failures = told["state"], told["restarts"], told["failures"]
        replica.ready = Ready(**told["ready"]) if told["ready"] else None
        self._error = told["error"]
        self._spread()

    def _spread(self) -> None:
        self._changed(self.replica)
        self._news.set()
        self._news.clear()  # whoever waited for it has been woken


def _folder() -> Path:
    """Where keepers' sockets are: a folder of this user's alone, since who connects to one owns it."""
    path = Path(tempfile.gettempdir()) / f"specdec-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{path} must be a folder that only this user can enter: remove it, or set TMPDIR")
    return path
