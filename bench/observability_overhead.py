"""What metrics, a log line per request, and traces of a tenth of the requests cost in tokens per second.

One server in one process; the same load in turns with all of it and with none of it, in an order that changes from round to
round. With none of it means: no snapshot of the engine's numbers after a pass, no observation of latencies, no estimate of the
speed-up, no log, no trace, no scrape. Traces go over HTTP to a collector in a process of its own that throws them away.

    python bench/observability_overhead.py --streams 8 --rounds 10 --json bench/results/observability_overhead.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import serve_clients

from specdec.bench.provenance import provenance
from specdec.config import DEFAULT_MODEL, ServeConfig
from specdec.engine import Engine
from specdec.llm import LLM
from specdec.metrics.watch import Watch
from specdec.serve.account import Account
from specdec.serve.generation import Generation
from specdec.serve.server import Server
from specdec.serve.worker import Worker

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


@contextmanager
def blind(server: Server) -> Iterator[None]:
    """With none of it."""

    def nothing(*given: Any, **named: Any) -> None:
        return None

    tracing = server.service.tracing
    assert tracing is not None
    with (
        patch.object(Worker, "_observe", nothing),
        patch.object(Watch, "look", nothing),
        patch.object(Generation, "measure", nothing),
        patch.object(Generation, "_measure_end", nothing),
        patch.object(Engine, "_record_seconds", nothing),
        patch.object(Account, "end", nothing),
        patch.object(tracing, "begin", nothing),
    ):
        yield


@contextmanager
def scraping(address: str, every: float) -> Iterator[None]:
    """A scrape now and then, as Prometheus would."""
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(every):
            urllib.request.urlopen(f"{address}/metrics").read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--speculation", default="auto")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10, help="pairs of runs")
    parser.add_argument("--scrape-seconds", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    logging.basicConfig(stream=Path("/dev/null").open("w"), level=logging.INFO)  # noqa: SIM115 - open to the end
    up = threading.Event()
    llm = LLM(options.model, speculation=options.speculation, max_sequences=64, self_test=False)
    with collector() as endpoint:
        config = ServeConfig(otlp_endpoint=endpoint, trace_sample=0.1)
        server = Server(llm, config, "127.0.0.1", 0, lambda address: up.set())
        thread = threading.Thread(target=server.run)
        thread.start()
        up.wait()
        try:

            def rate() -> float:
                """Tokens per second of so many streams at once."""
                llm.engine.forget()
                began = time.perf_counter()
                asyncio.run(serve_clients.streams(server.address, options.streams, options.tokens))
                return float(options.streams * options.tokens / (time.perf_counter() - began))

            rate()  # warm
            ratios = []
            for i in range(options.rounds):
                rates = {}
                for seen in (True, False) if i % 2 else (False, True):
                    with scraping(server.address, options.scrape_seconds) if seen else blind(server):
                        rates[seen] = rate()
                ratios.append(rates[True] / rates[False])
                print(f"with {rates[True]:.1f}  without {rates[False]:.1f} tokens/s  ratio {ratios[-1]:.4f}")
        finally:
            server.should_exit = True
            thread.join()
    cost = 1 - statistics.median(ratios)
    print(f"cost {cost:+.2%} of tokens per second (median of {len(ratios)} pairs)")
    if options.json:
        kept = {name: value for name, value in vars(options).items() if name != "json"}
        result = {"provenance": provenance(), "settings": kept, "ratios": ratios, "cost": cost}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
