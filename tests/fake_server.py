"""A small server with OpenAI's routes that misbehaves as it is told, for the audit to find out."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


class Fake:
    """Answers with a fixed sequence of words that depends on the prompt.

    Args:
        fault: ``none``, ``drift`` (every third answer differs), ``load`` (answers differ while others are in flight),
            ``seedless`` (sampled answers differ each time), ``stream`` (streams lose their last word), ``bare`` (takes no
            log-probabilities), ``other`` (differs from its siblings at the sixth word), ``broken`` (gives errors).
    """

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.asked = self.in_flight = 0
        self.lock = threading.Lock()

    def words(self, body: dict[str, Any], crowded: bool) -> list[str]:
        seed = sum(map(ord, json.dumps(body.get("messages") or body.get("prompt"))))
        words = [WORDS[(seed + i * i) % len(WORDS)] for i in range(min(10, body.get("max_tokens", 10)))]
        if self.fault == "drift" and self.asked % 3 == 0:
            words[-1] = "never"
        if self.fault == "load" and crowded:
            words[-1] = "crowded"
        if self.fault == "seedless" and body.get("temperature"):
            words[0] = f"random{self.asked}"
        if self.fault == "other" and len(words) > 5:
            words[5] = "otherwise"
        return words


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._send(200, {"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "nobody"}]})

    def do_POST(self) -> None:
        fake: Fake = self.server.fake  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if unknown := body.keys() & {"speculation", "stats", "return_token_ids"}:
            return self._send(400, {"error": {"message": f"unknown fields {sorted(unknown)}"}})
        if fake.fault == "broken":
            return self._send(500, {"error": {"message": "out of order"}})
        if fake.fault == "bare" and "logprobs" in body:
            return self._send(400, {"error": {"message": "log-probabilities are not served"}})
        with fake.lock:
            fake.asked += 1
            fake.in_flight += 1
        time.sleep(0.003)
        words = fake.words(body, fake.in_flight > 1)
        with fake.lock:
            fake.in_flight -= 1
        if body.get("stream"):
            return self._stream(words[:-1] if fake.fault == "stream" else words)
        likeliest = [[{"token": f" {w}", "logprob": -0.5}, {"token": " x", "logprob": -2.0}] for w in words]
        content = [{**top[0], "top_logprobs": top} for top in likeliest]
        message = {"role": "assistant", "content": " ".join(words)}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        if "logprobs" in body:
            choice["logprobs"] = {"content": content}
        return self._send(200, {"choices": [choice], "usage": {"completion_tokens": len(words)}})

    def _send(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, words: list[str]) -> None:
        frames = [{"choices": [{"index": 0, "delta": {"content": w if not i else f" {w}"}}]} for i, w in enumerate(words)]
        frames.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        data = "".join(f"data: {json.dumps(frame)}\n\n" for frame in frames) + "data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data.encode())


@contextmanager
def faking(fault: str) -> Iterator[str]:
    """The address of such a server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.fake = Fake(fault)  # type: ignore[attr-defined]
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
