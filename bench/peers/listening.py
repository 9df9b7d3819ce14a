"""For engines that have no server of their own: one OpenAI-compatible route over a loop that batches continuously.

It needs nothing but Python, as it runs in the engines' environments. Each request waits in a thread of its own until its
answer is whole.

    POST /v1/completions {"prompt": [ids], "max_tokens": n} -> {"usage": {"completion_tokens": n}}
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SLOT_CONTEXT = 2048
"""Tokens of prompt and answer together that every server makes room for, for each request in flight."""
BACKLOG = 128
"""Connections that may wait to be taken. With Python's five, of many that come at once some are reset."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a server was started."""

    model: Path
    """The GGUF file, or the exported folder for engines that read no GGUF."""
    threads: int
    end_tokens: tuple[int, ...]
    port: int
    slots: int
    """Most requests in flight."""
    speculation: bool


def options() -> Options:
    """From the command line, which is the same for all servers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--end-tokens", type=int, nargs="*", default=[])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--speculation", action="store_true")
    given = parser.parse_args()
    return Options(given.model, given.threads, tuple(given.end_tokens), given.port, given.slots, given.speculation)


@dataclass(slots=True)
class Asked:
    """A request in flight."""

    ids: list[int]
    max_tokens: int
    answer: queue.SimpleQueue[list[int] | Exception] = field(default_factory=queue.SimpleQueue)
    """Its tokens, an end token included, or why there are none."""


class Batching(ABC):
    """An engine that takes requests while others run. All methods are called on one thread."""

    @abstractmethod
    def add(self, asked: Asked) -> None:
        """Begin a request."""

    @abstractmethod
    def advance(self) -> int:
        """Go on for a little while, put what has finished into its ``answer``, and tell how many still run."""


class Listener(ThreadingHTTPServer):
    """Takes connections, each in a thread of its own."""

    request_queue_size = BACKLOG
    daemon_threads = True


def serve(engine: Batching, port: int) -> None:
    """Answer requests for ever."""
    inbox: queue.SimpleQueue[Asked] = queue.SimpleQueue()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, {"status": "ok"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked = Asked(body["prompt"], body["max_tokens"])
            inbox.put(asked)
            answer = asked.answer.get()
            if isinstance(answer, Exception):
                self._send(500, {"error": {"message": f"{type(answer).__name__}: {answer}"}})
            else:
                self._send(200, {"usage": {"completion_tokens": len(answer)}})

        def _send(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = Listener(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    running = 0
    while True:
        while not running or not inbox.empty():
            engine.add(inbox.get())
            running += 1
        running = engine.advance()
