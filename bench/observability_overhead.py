"""What metrics, a log line per request, and traces of a tenth of the requests cost in tokens per second.

Two servers in one process share the model's weights and are asked the same: one sees everything, the other nothing. They take
turns pass by pass on a single thread, in an order that changes from pass to pass, and each pass is compared with its twin of a
moment before or after. So a change of the machine's pace meets both. What is compared is the time beside the forward, in which
nothing is seen and whose own time would drown the difference; the cost is a share of the whole. In the second half of a round
they change roles, for one server may be faster than its twin by where its memory lies. All that a pass causes ends within its
turn: frames for every stream, ends of requests. What runs beside the engine elsewhere stands in line here, which makes the cost
rather too large than too small. Requests come without sockets, straight into the application.

To see nothing means: no latency is noted, drafters are not watched, no estimate of the speed-up, no log, no trace, no scrape.
The other is scraped every so many seconds that it has worked, and its traces go, as often, over HTTP to a collector in a
process of its own that throws them away; the time of both counts whole.

    python bench/observability_overhead.py --streams 8 --rounds 6 --json bench/results/observability_overhead.json
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import serve_clients
from starlette.types import ASGIApp, Message

from specdec.bench.provenance import provenance
from specdec.config import DEFAULT_MODEL, ServeConfig
from specdec.llm import LLM
from specdec.serve.account import Account
from specdec.serve.app import create_app
from specdec.serve.generation import Generation
from specdec.serve.logs import TextFormatter
from specdec.serve.promptness import set_aside
from specdec.serve.service import Service
from specdec.serve.stream import STRAIGHT
from specdec.types import Forward, Step

BLIND, SEEING = "blind", "seeing"

COLLECTOR = """
import http.server
class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def collector() -> Iterator[str]:
    """The address of a collector that throws everything away."""
    with subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.terminate()


class Side:
    """A server without sockets or a thread of its own, and how long its turns take."""

    def __init__(self, llm: LLM, config: ServeConfig, every: float) -> None:
        self._llm, self._every = llm, every
        self._role = BLIND
        if llm.engine.budget:  # both are to draft the same, so neither may see how long drafting takes
            llm.engine.budget._clock = lambda: 0.0
            llm.engine.budget.follow = lambda host: None  # type: ignore[method-assign]
        self._app: ASGIApp = create_app(llm, config)
        self.service: Service = self._app.state.service
        self.worker = self.service.worker
        self.worker._loop = asyncio.get_running_loop()
        self._due = every
        self._waiting: list[int] = []
        self._running: set[asyncio.Task[None]] = set()
        self._streams = 0
        self.turns: list[float] = []
        """Seconds of each turn in this half of a round."""
        self.beside: list[float] = []
        """Of each, those that were not spent in the forward."""
        self._forward = 0.0
        """Those that were, in all turns."""
        llm.engine._runner.forward = self._timed(llm.engine._runner.forward)  # type: ignore[method-assign, assignment]
        self.apart = 0.0
        """Seconds of scrapes and of sending traces in this round, which belong to no turn."""
        self._worked = 0.0
        self.texts: dict[int, str] = {}
        """What its clients got in this round, by seed."""

    def ask(self, role: str, seeds: list[int], streams: int, tokens: int) -> None:
        """So many requests are to be answered, a number of them at once."""
        self._llm.engine.forget()
        self._role, self._waiting, self._streams, self._tokens = role, list(seeds), streams, tokens
        self.turns, self.beside, self.apart, self.texts = [], [], 0.0, dict.fromkeys(seeds, "")

    @property
    def done(self) -> bool:
        return not self._waiting and not self._running

    async def turn(self) -> None:
        """One pass and all that follows from it."""
        began, forward = time.perf_counter(), self._forward
        asked = 0
        while self._waiting and len(self._running) < self._streams:
            self._running.add(asyncio.ensure_future(self._request(self._waiting.pop(0))))
            asked += 1
        while self.worker._commands.qsize() < asked:
            await asyncio.sleep(0)  # prompts are encoded on other threads
        if asked or self._llm.engine.has_work:
            self.worker._obey()
            self.worker._advance()
        for _ in range(8):  # what a pass causes on the event loop goes through a few hands
            await asyncio.sleep(0)
        self._running = {task for task in self._running if not task.done() or task.result()}
        self.turns.append(time.perf_counter() - began)
        self.beside.append(self.turns[-1] - (self._forward - forward))
        if self._role == SEEING:
            self._worked += self.turns[-1]
            if self._worked > self._due and self._llm.engine.has_work:
                self._due += self._every
                await self._show()

    def _timed(self, forward: Callable[[Step], Forward]) -> Callable[[Step], Forward]:
        def timed(step: Step) -> Forward:
            began = time.perf_counter()
            result = forward(step)
            self._forward += time.perf_counter() - began
            return result

        return timed

    async def _show(self) -> None:
        """A scrape, and what traces there are to the collector."""
        began = time.perf_counter()
        scrape = asyncio.ensure_future(self.service.figures())
        await asyncio.sleep(0)
        self.worker._obey()
        await scrape
        assert self.service.tracing is not None
        self.service.tracing._provider.force_flush()
        self.apart += time.perf_counter() - began

    async def _request(self, seed: int) -> None:
        body = {"prompt": f"{seed}. {serve_clients.PROMPT}", "max_tokens": self._tokens, "seed": seed, "ignore_eos": True}
        data = [json.dumps({**body, "stream": True}).encode()]
        gone = asyncio.get_running_loop().create_future()

        async def receive() -> Message:
            if data:
                return {"type": "http.request", "body": data.pop(), "more_body": False}
            await gone
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            for line in message.get("body", b"").decode().splitlines():
                if line.startswith("data: {"):
                    self.texts[seed] += json.loads(line[6:])["choices"][0]["text"]

        headers = [(b"x-request-id", f"{self._role}-{seed}".encode())]
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
        }
        scope |= {"path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": ""}
        scope |= {"headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 1), "state": {STRAIGHT: send}}
        await self._app(scope, receive, send)


@contextmanager
def unseen(side: Side) -> Iterator[None]:
    """Have a server see nothing."""
    metrics, end = side.service.metrics, Account.end
    delivered, measure = Generation.delivered, Generation.measure

    def nothing(*given: Any) -> None:
        return None

    def delivering(self: Generation) -> None:
        if self._metrics is not metrics:
            delivered(self)

    def measuring(self: Generation) -> None:
        if self._metrics is not metrics:
            measure(self)

    def ending(self: Account) -> None:
        if not self.request_id.startswith(BLIND):
            end(self)

    with (
        patch.object(side.worker._watch, "look", nothing),
        patch.object(side.service.llm.engine, "_record_seconds", nothing),
        patch.object(side.service.tracing, "begin", nothing),
        patch.object(Generation, "delivered", delivering),
        patch.object(Generation, "measure", measuring),
        patch.object(Account, "end", ending),
    ):
        yield


async def half(blind: Side, seeing: Side, seeds: list[int], options: argparse.Namespace) -> tuple[float, float]:
    """Half a round: seconds of a pass of the server that saw nothing, and how many more the other one took."""
    sides = [blind, seeing]
    for side, role in zip(sides, (BLIND, SEEING), strict=True):
        side.ask(role, seeds, options.streams, options.tokens)
    with unseen(blind):
        while not all(side.done for side in sides):
            for side in sides:
                await side.turn()
            sides.reverse()
    if blind.texts != seeing.texts:
        raise SystemExit("the two servers gave different texts")
    more = statistics.mean(b - a for a, b in zip(blind.beside, seeing.beside, strict=True))
    return statistics.mean(blind.turns), more + seeing.apart / len(seeing.turns)


async def compare(llms: list[LLM], endpoint: str, options: argparse.Namespace) -> list[float]:
    """The share of its tokens per second that seeing everything cost a server in each round."""
    config = ServeConfig(otlp_endpoint=endpoint, trace_sample=0.1)
    one, other = (Side(llm, config, options.scrape_seconds) for llm in llms)
    costs = []
    for i in range(-1, options.rounds):  # the first one warms up
        seeds = [abs(seed) for seed in range(i * options.requests, (i + 1) * options.requests)]
        halves = [await half(blind, seeing, seeds, options) for blind, seeing in ((one, other), (other, one))]
        usual, more = (statistics.mean(seconds) for seconds in zip(*halves, strict=True))
        if i >= 0:
            costs.append(more / (usual + more))
            each = ", ".join(f"{1e6 * more:+.0f}" for _, more in halves)
            print(f"{1e3 * usual:.2f} ms a pass, in either half {each} us more: cost {costs[-1]:+.2%}", flush=True)
    for side in (one, other):
        side.service._encoders.shutdown()
        assert side.service.tracing is not None
        side.service.tracing.shut_down()
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--speculation", default="auto")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--requests", type=int, default=16, help="of half a round")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--scrape-seconds", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    handler = logging.StreamHandler(Path("/dev/null").open("w"))  # noqa: SIM115 - open to the end
    handler.setFormatter(TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "3600000"  # spans are sent in turns that are timed
    one = LLM(options.model, speculation=options.speculation, max_sequences=64, self_test=False)
    # Both by the same costs, which follow nothing: what either drafts must not depend on how fast it happens to be.
    config = dataclasses.replace(one.config, pass_seconds=one.engine.costs.points)
    llms = [
        LLM.of(one.engine.model, one.kernels, config, one.tokenizer, end_tokens=one.end_tokens, name=one.name) for _ in range(2)
    ]
    set_aside()
    with collector() as endpoint:
        costs = asyncio.run(compare(llms, endpoint, options))
    cost = statistics.median(costs)
    spread = statistics.stdev(costs) if len(costs) > 1 else 0.0
    print(f"cost {cost:+.2%} of tokens per second (median of {len(costs)} rounds, standard deviation of one {spread:.2%})")
    if options.json:
        kept = {name: value for name, value in vars(options).items() if name != "json"}
        result = {"provenance": provenance(), "settings": kept, "costs": costs, "cost": cost, "deviation": spread}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
