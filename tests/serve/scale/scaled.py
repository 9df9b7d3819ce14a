"""A router with replicas for tests, and clients that keep asking."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from loading import load  # type: ignore[import-not-found]
from serving import error_of, frames_of

from specdec.config import ServeConfig
from specdec.serve.scale.server import ScaledServer

START_SECONDS = 120


class Scaled:
    """A router that runs, and a client for it."""

    def __init__(self, server: ScaledServer, url: str) -> None:
        self.server, self.url = server, url
        self.http = httpx.Client(base_url=url, timeout=60)

    def ask(self, route: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        response = self.http.post(route, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.http.get("/health").json()["replicas"]
        return found

    def whole(self) -> bool:
        return all(replica["state"] == "ready" for replica in self.replicas())

    def process(self, at: int) -> Any:
        return self.server.supervisor.replicas[at].process


@contextlib.contextmanager
def scaled(folder: Path, n: int = 2, seconds: float = 0.0, **config: Any) -> Iterator[Scaled]:
    """Serve with n replicas for the time of the block; afterwards no process may be left."""
    addresses: list[str] = []
    up = threading.Event()

    def ready(address: str, _: object) -> None:
        addresses.append(address)
        up.set()

    settings = ServeConfig(**{"shutdown_seconds": 1.0, **config})
    server = ScaledServer(functools.partial(load, str(folder), seconds), settings, n, "127.0.0.1", 0, ready)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert up.wait(START_SECONDS), "the replicas did not start"
    running = Scaled(server, addresses[0])
    try:
        yield running
    finally:
        running.http.close()
        server.should_exit = True
        thread.join(40)
        assert not thread.is_alive(), "the router did not stop"
        assert not any(replica.process and replica.process.is_alive() for replica in server.supervisor.replicas)


class Client(threading.Thread):
    """Asks again and again, and keeps what came of each request."""

    def __init__(self, url: str, bodies: list[dict[str, Any]], stop: threading.Event, *, stream: bool) -> None:
        super().__init__(daemon=True)
        self.url, self.bodies, self.stop_asking, self.stream = url, bodies, stop, stream
        self.right = self.failed = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as http:
            while not self.stop_asking.is_set():
                for body in self.bodies:
                    self.take(http, body)

    def take(self, http: httpx.Client, body: dict[str, Any]) -> None:
        expected, asked = body["expected"], {key: value for key, value in body.items() if key != "expected"}
        try:
            response = http.post("/v1/completions", json={**asked, "stream": self.stream})
            if response.status_code != 200:
                error_of(response)
                self.failed += 1
                return
            if not self.stream:
                text, error = response.json()["choices"][0]["text"], None
            else:
                frames = frames_of(response.content)
                error = frames.pop()["error"] if "error" in frames[-1] else None
                text = "".join(frame["choices"][0]["text"] for frame in frames)
        except Exception as problem:
            self.wrong.append(repr(problem))
            return
        if error is not None and expected.startswith(text):
            self.failed += 1
        elif text == expected:
            self.right += 1
        else:
            self.wrong.append(text)
