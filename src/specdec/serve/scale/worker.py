"""A replica on this machine: an ordinary server in a process of its own, on a loopback port that it chooses."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from specdec.config import ConfigError, ServeConfig

if TYPE_CHECKING:
    from specdec.llm import LLM
    from specdec.serve.server import Server

Load = Callable[[], "LLM"]


@dataclass(frozen=True, slots=True)
class Ready:
    """A replica takes requests."""

    url: str
    model: str
    precision: str
    max_len: int
    drafters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """A replica cannot start, and would not if it were tried again."""

    message: str


def run(load: Load, config: ServeConfig, parent: Connection) -> None:
    """The process: load, tell the parent, serve until told to stop or until the parent is gone."""
    os.setsid()  # Ctrl-C is the parent's; it tells us when to stop
    from specdec.kernels.library import KernelError
    from specdec.models.errors import ModelError
    from specdec.serve.promptness import set_aside
    from specdec.serve.server import Server

    try:
        llm = load()
    except (ConfigError, ModelError, KernelError, OSError) as error:
        parent.send(Failed(str(error)))
        return

    def ready(url: str) -> None:
        engine = llm.engine
        names = tuple(drafter.name for drafter in engine.drafters)
        parent.send(Ready(url, config.model_name or llm.name, llm.precision, engine.max_len, names))

    server = Server(llm, config, "127.0.0.1", 0, ready)
    set_aside()
    threading.Thread(target=_follow, args=(parent, server), daemon=True).start()
    server.run()


def _follow(parent: Connection, server: Server) -> None:
    """Stop when the parent is gone: it never sends anything, so what comes is the end."""
    try:
        parent.recv()
    except (EOFError, OSError):
        server.should_exit = True
