"""specdec's server inside this process, for measurements of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from specdec.config import ServeConfig
from specdec.llm import LLM
from specdec.serve.promptness import set_aside
from specdec.serve.server import Server


@contextmanager
def serving(llm: LLM) -> Iterator[Server]:
    """A server with its defaults on a free port, in a thread of its own."""
    set_aside()
    up = threading.Event()
    server = Server(llm, ServeConfig(), "127.0.0.1", 0, lambda address: up.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    up.wait()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join()
