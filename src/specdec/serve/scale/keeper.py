"""A process that keeps one replica for an owner that may die.

Where a cluster's own process is the engine, its death costs a new process, all imports and the loading of the model. So the
replica, its supervisor, and the process that it is forked from belong to a keeper, and the cluster's process only owns it. When
that one dies, the next takes the keeper over, with the replica as it is. A keeper that nobody owns ends after a while, and the
replica ends with its keeper, however that went.

To own is to hold a connection to the keeper's socket. Whoever does is told the replica's state, in a line of JSON each time it
changes. A byte from it ends the keeper in good order; its end without one leaves the replica to the next.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.config import ConfigError, ServeConfig
from specdec.serve.logs import configure
from specdec.serve.scale.supervisor import LAST_SECONDS, Supervisor
from specdec.serve.scale.worker import Load

if TYPE_CHECKING:
    from specdec.llm import LLM

_log = logging.getLogger(__name__)

LINGER_SECONDS = 30.0
"""For how long a keeper waits for its next owner: longer than a new process of a cluster takes to start on a busy machine."""
TAKEN, STOP = "taken", b"."
"""What a keeper says to a second owner, and what an owner says to end it."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """A function in its pickle, which is opened where it is called: who only passes it on need not import what it needs."""

    pickled: bytes

    def __call__(self) -> LLM:
        llm: LLM = pickle.loads(self.pickled)()
        return llm


@dataclass(frozen=True, slots=True)
class Errand:
    """What a keeper is to keep.

    Args:
        load: loads the model, in the replica's process; it must be picklable.
        config: of the replica's server.
        name: keepers are only taken over for an errand of the same name.
        linger: seconds that a keeper waits for its next owner.
    """

    load: Load
    config: ServeConfig
    name: str
    linger: float = LINGER_SECONDS


class Keeper:
    """Keeps a replica, and tells its owner of it."""

    def __init__(self, errand: Errand) -> None:
        self._errand = errand
        self._supervisor = Supervisor(errand.load, errand.config, 1, changed=lambda _: self._tell())
        self._replica = self._supervisor.replicas[0]
        self._owner: asyncio.StreamWriter | None = None
        self._error: str | None = None
        """Why the replica cannot be started."""
        self._over = asyncio.Event()
        self._grace = 0.0
        """Seconds that the replica may take to end."""

    async def run(self, listening: socket.socket, path: Path) -> None:
        """Until the owner says so, or there has been none for too long, or the replica cannot be started.

        Args:
            listening: where owners connect.
            path: of that socket; it is removed at the end.
        """
        server = await asyncio.start_unix_server(self._owned, sock=listening)
        self._linger()
        starting = asyncio.create_task(self._start())
        try:
            await self._over.wait()
        finally:
            path.unlink(missing_ok=True)
            server.close()
            starting.cancel()
            await self._supervisor.stop(self._grace)

    async def _start(self) -> None:
        try:
            await self._supervisor.start()
        except ConfigError as error:
            self._error = str(error)
            self._tell()
            self._over.set()

    def _linger(self) -> None:
        self._lingering = asyncio.get_running_loop().call_later(self._errand.linger, self._over.set)

    async def _owned(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._owner or self._over.is_set():
            writer.write(json.dumps({"state": TAKEN}).encode() + b"\n")
            writer.close()
            return
        self._lingering.cancel()
        self._owner = writer
        self._tell()
        try:
            said = await reader.read(1)
        except ConnectionError:
            said = b""
        if said == STOP:  # the owner's connection stays until the end, which tells it that all has ended
            self._grace = self._errand.config.shutdown_seconds + LAST_SECONDS
            self._over.set()
            return
        self._owner = None
        writer.close()
        _log.warning("the owner is gone: the replica is kept for another one for %g s", self._errand.linger)
        self._linger()

    def _tell(self) -> None:
        if self._owner:
            replica = self._replica
            told = {
                "state": replica.state,
                "ready": asdict(replica.ready) if replica.ready else None,
                "restarts": replica.restarts,
                "failures": replica.failures,
                "error": self._error,
            }
            self._owner.write(json.dumps(told).encode() + b"\n")


def main() -> None:
    """The process. Its arguments are the number and the path of the socket; the errand comes on its standard input."""
    number, path = sys.argv[1:]
    configure("text")
    errand: Errand = pickle.load(sys.stdin.buffer)

    async def keep() -> None:
        await Keeper(errand).run(socket.socket(fileno=int(number)), Path(path))

    asyncio.run(keep())
