"""A router with replicas for tests, and the loads that it and the Ray application are given."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from loading import load  # type: ignore[import-not-found]
from serving import Asking, error_of, frames_of, in_thread, until

from specdec.config import ServeConfig
from specdec.serve.scale.server import ScaledServer

START_SECONDS = 120


class Scaled(Asking):
    """A router that runs, and a client for it."""

    def __init__(self, server: ScaledServer) -> None:
        super().__init__(server.address, patience=60)
        self.server = server

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
    settings = ServeConfig(**{"shutdown_seconds": 1.0, **config})
    server = ScaledServer(
        functools.partial(load, str(folder), seconds), settings, n, "127.0.0.1", 0, lambda address, ready: None
    )
    with in_thread(server, START_SECONDS, 40):
        running = Scaled(server)
        try:
            yield running
        finally:
            running.http.close()
    assert not any(replica.process and replica.process.is_alive() for replica in server.supervisor.replicas)


def cached(to: Asking, turns: int) -> int:
    """Tokens found in prefix caches by five families of prompts that begin alike, one request at a time."""
    found = 0
    for turn in range(turns):
        for family in "PQRST":
            prompt = f"{family}: " + f"{family.lower()} shared beginning " * 8 + f"and turn {turn}"
            answer = to.ask(prompt=prompt, max_tokens=2, temperature=0, cache_salt="hits")
            found += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


class Client(threading.Thread):
    """Asks again and again until it is to stop, and keeps what came of each request."""

    def __init__(self, url: str, bodies: list[dict[str, Any]], *, stream: bool) -> None:
        super().__init__(daemon=True)
        self.url, self.bodies, self.stream = url, bodies, stream
        self.over = threading.Event()
        self.right = self.failed = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as http:
            for body in itertools.cycle(self.bodies):
                if self.over.is_set():
                    return
                self.take(http, body)

    def stop(self) -> None:
        """When its present request has ended."""
        self.over.set()
        self.join(100)
        assert not self.is_alive(), "a client hangs"

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


@contextlib.contextmanager
def under_load(to: Asking, n: int) -> Iterator[list[Client]]:
    """Clients that ask during the block, every other one for streams. Every answer that ends well must be the right one and
    every other a proper error, and none of those that are not streamed may fail."""
    bodies = [{"prompt": f"{i} abcabc", "max_tokens": 30, "temperature": 0.8, "seed": i, "ignore_eos": True} for i in range(12)]
    for body in bodies:
        body["expected"] = to.ask(**body)["choices"][0]["text"]
    clients = [Client(to.url, bodies[i:] + bodies[:i], stream=i % 2 == 0) for i in range(n)]
    for client in clients:
        client.start()
    until(lambda: all(client.right or client.wrong for client in clients), 60)
    try:
        yield clients
    finally:
        for client in clients:
            client.over.set()
        for client in clients:
            client.stop()
    right, broken = sum(client.right for client in clients), sum(client.failed for client in clients)
    print(f"{right} right answers, {broken} streams broken off")
    assert [client.wrong for client in clients if client.wrong] == []
    assert sum(client.failed for client in clients if not client.stream) == 0
