"""A real server on a real port for tests: its life, strict readers of what it sends, and engines that draft as told."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import httpx
import torch
import uvicorn
from checkpoints import chain, path_law
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from specdec.config import ServeConfig
from specdec.draft.base import Drafter
from specdec.engine import Engine
from specdec.llm import LLM
from specdec.serve.server import Server
from specdec.testing import Adversary, Oracle

ROUTES = ("/v1/completions", "/v1/chat/completions")

PATIENCE = 20.0
"""Seconds within which what must happen has happened, on a machine however busy; that it happened in time, where that is the
point, is told by what came of it."""


class Asking:
    """A client of a server, wherever that runs."""

    def __init__(self, address: str, key: str = "", patience: float = PATIENCE) -> None:
        self.url = address
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=address, timeout=patience, headers=headers, verify=False)

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.http.post(route, json=body)

    def ask(self, route: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        """The whole answer."""
        response = self.post(route, **body)
        assert response.status_code == 200, response.text
        return strict(response.text)

    def stream(self, route: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        """The frames of a stream that must end well."""
        with self.http.stream("POST", route, json={**body, "stream": True}) as response:
            data = b"".join(response.iter_raw())
        assert response.status_code == 200, data
        assert response.headers["content-type"].startswith("text/event-stream")
        return frames_of(data)

    def refused(self, route: str = "/v1/completions", status: int = 400, **body: Any) -> dict[str, Any]:
        """The error of a request that must be refused."""
        response = self.post(route, **body)
        assert response.status_code == status, response.text
        return error_of(response)

    def metrics(self) -> dict[str, float]:
        """Every sample, by its name and what labels it has beside the model's name."""
        text = self.http.get("/metrics").text
        return {
            name + "".join(f"{{{v}}}" for label, v in labels.items() if label != "model_name"): value
            for family in text_string_to_metric_families(text)
            for name, labels, value, *_ in family.samples
            if "_bucket" not in name
        }


class Running(Asking):
    """A server that runs here, and a client for it."""

    def __init__(self, server: Server) -> None:
        self.server, self.llm = server, server.service.llm
        super().__init__(server.address, next(iter(server.service.config.api_keys), ""))

    def openai(self) -> OpenAI:
        keys = self.server.service.config.api_keys
        return OpenAI(base_url=f"{self.url}/v1", api_key=keys[0] if keys else "none", max_retries=0)

    def settled(self, seconds: float = PATIENCE) -> dict[str, float]:
        """The metrics once nothing runs any more."""
        return until(
            lambda: (now := self.metrics())["specdec:num_requests_running"] + now["specdec:num_requests_waiting"] == 0 and now,
            seconds,
        )

    def busy(self, running: int) -> None:
        """Wait until so many sequences run; they must go on long enough to be seen."""
        until(lambda: self.metrics()["specdec:num_requests_running"] == running)


@contextlib.contextmanager
def in_thread(server: uvicorn.Server, start: float = PATIENCE, end: float = PATIENCE) -> Iterator[None]:
    """Run a server for the time of the block; it must take requests and stop within so many seconds."""
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started, start)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(end)
        assert not thread.is_alive(), "the server did not stop"


@contextlib.contextmanager
def serving(llm: LLM, *, tracing: Any = None, **config: Any) -> Iterator[Running]:
    """Serve a model for the time of the block; afterwards nothing may be held."""
    settings = ServeConfig(**{"shutdown_seconds": 0.2, **config})
    server = Server(llm, settings, "127.0.0.1", 0, tracing=tracing)
    with in_thread(server):
        running = Running(server)
        try:
            yield running
        finally:
            running.http.close()
    if not server.service.worker.failed:
        llm.engine.check()
        assert not llm.engine.has_work, "sequences were left behind"


def call(server: Running, route: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and keep the bare connection, unread."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)))
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def poisoned(folder: Path, token: int) -> Path:
    """The same model whose embedding of one token is NaN."""
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def strict(text: str) -> Any:
    """JSON as the standard has it: one value, and neither NaN nor Infinity."""

    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def frames_of(data: bytes) -> list[dict[str, Any]]:
    """The JSON of each frame; every frame one ``data:`` line and an empty one, the last one [DONE], all of it UTF-8."""
    text = data.decode()
    assert text.endswith("data: [DONE]\n\n"), text[-200:]
    frames = text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [strict(frame.removeprefix("data: ")) for frame in frames[:-1]]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error in OpenAI's shape."""
    error = strict(response.text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice of either route, whole or in a frame."""
    return choice["text"] if "text" in choice else (choice.get("message") or choice.get("delta"))["content"]


def joined(frames: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices of a stream as they would have come whole: text, finish reason, log-probabilities, ids, sources."""
    choices: dict[int, dict[str, Any]] = {}
    for frame in frames:
        assert "error" not in frame, frame
        for new in frame["choices"]:
            choice = choices.setdefault(new["index"], {"text": "", "finish_reason": None, "logprobs": None})
            assert choice["finish_reason"] is None, "a choice went on after its end"
            choice["text"] += new["text"] if "text" in new else new["delta"].get("content", "")
            choice["finish_reason"] = new["finish_reason"]
            for name in ("token_ids", "token_sources", "token_texts"):
                if name in new:
                    choice[name] = choice.get(name, []) + new[name]
            if new["logprobs"]:
                choice["logprobs"] = _extended(choice["logprobs"], new["logprobs"])
            if "stats" in new:
                choice["stats"] = new["stats"]
    return choices


def _extended(logprobs: dict[str, Any] | None, more: dict[str, Any]) -> dict[str, Any]:
    if logprobs is None:
        return more
    return {name: value if value is None else value + more[name] for name, value in logprobs.items()}


def one_of(answer: dict[str, Any]) -> dict[str, Any]:
    """What ``joined`` gives, of a whole answer with one choice."""
    (choice,) = answer["choices"]
    kept = ("finish_reason", "logprobs", "token_ids", "token_sources", "token_texts")
    return {"text": text_of(choice), **{name: choice[name] for name in kept if name in choice}}


def asking(route: str, text: str, **body: Any) -> dict[str, Any]:
    """A body for either route, whose prompt is this text under a template that adds nothing to it."""
    if route == "/v1/completions":
        return {"prompt": text, **body}
    return {"messages": [{"role": "user", "content": text}], **body}


def words_llm(folder: Path, pieces: Sequence[str], *, eos: bool = False, **settings: Any) -> LLM:
    """CHAIN that says its pieces in order; with ``eos`` the last piece is the end token."""
    n = len(pieces)
    chain(folder, path_law(range(n), n), pieces, eos=n - 1 if eos else None)
    return LLM(str(folder), precision="fp32", self_test=False, **settings)


def with_drafter(llm: LLM, drafter: Drafter, k: int) -> LLM:
    """The same model with another drafter, of at most k nodes."""
    speculation = replace(llm.config.speculation, max_nodes=k)
    other = LLM.of(
        llm.engine.model, llm.kernels, replace(llm.config, speculation=speculation), llm.tokenizer,
        end_tokens=llm.end_tokens, name=llm.name,
    )  # fmt: skip
    other.engine = Engine(llm.engine.model, llm.kernels, other.config, drafter)
    return other


def copy(llm: LLM, k: int, truth: Callable[[Any], Sequence[int]]) -> LLM:
    """Drafts that are always right."""
    return with_drafter(llm, Oracle(truth), k)


def wrong(llm: LLM, k: int, truth: Callable[[Any], Sequence[int]]) -> LLM:
    """Drafts that are always wrong."""
    return with_drafter(llm, Adversary(truth, llm.engine.model.shape.vocab_size), k)


def along(n: int) -> Callable[[Any], Sequence[int]]:
    """The truth of ``words_llm`` with n pieces."""
    return lambda sequence: [(sequence.tokens[-1] + 1 + i) % n for i in range(min(n, sequence.room))]


def slowed(llm: LLM, seconds: float) -> LLM:
    """Every pass takes at least so long."""
    step = llm.engine.step

    def slowly() -> Any:
        time.sleep(seconds)
        return step()

    llm.engine.step = slowly  # type: ignore[method-assign]
    return llm


def held(llm: LLM, seconds: float, *, tokens: int = 100, let_go: threading.Event | None = None) -> LLM:
    """Every pass takes at least so long; and no answer gets far beyond so many tokens until it is let go, so that one that is
    to be longer goes on until its client leaves, however fast the machine and however slow the client is."""
    step, scheduler, places = slowed(llm, seconds).engine.step, llm.engine.scheduler, llm.config.max_sequences

    def some() -> Any:
        begins = scheduler.waiting and len(scheduler.running) < places
        if begins or any(not sequence.n_output for sequence in scheduler.running) or (let_go and let_go.is_set()):
            return step()
        if all(sequence.n_output < tokens for sequence in scheduler.running):
            return step()
        time.sleep(seconds)
        return []

    llm.engine.step = some  # type: ignore[method-assign]
    return llm


def until(ready: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """What ``ready`` gives once that is true."""
    end = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)
    return found
