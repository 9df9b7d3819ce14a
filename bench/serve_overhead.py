"""How long the server holds a token back: from the end of the pass that computed it to its arrival at a client.

Clients run in a process of their own on the same machine and share its clock, so what is measured includes waking the event
loop, detokenising, JSON, the HTTP server, and the kernel's loopback. What of it is work, and not waiting for a core, is
``cpu_us_per_frame``: the CPU time of the event loop's thread, requests included.

    python bench/serve_overhead.py --streams 1,8,32 --json bench/results/serve_overhead.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from specdec.bench.provenance import provenance
from specdec.config import DEFAULT_MODEL, ServeConfig
from specdec.llm import LLM
from specdec.serve.generation import Generation
from specdec.serve.server import Server

CLIENTS = Path(__file__).with_name("serve_clients.py")


def _record(computed: dict[int, list[float]]) -> None:
    """Have every generation note, by its seed, when what it sends was computed."""
    delivered = Generation.delivered

    def noting(self: Generation) -> None:
        if self._sending is not None:
            computed[self.seed].append(self._sending)
        delivered(self)

    Generation.delivered = noting  # type: ignore[method-assign]


def _cpu_seconds(server: Server) -> float:
    """CPU time of the event loop's thread so far."""

    async def read() -> float:
        return time.thread_time()

    return asyncio.run_coroutine_threadsafe(read(), server.servers[0].get_loop()).result()


def measure(server: Server, computed: dict[int, list[float]], streams: int, tokens: int) -> dict[str, Any]:
    """Milliseconds from computed to received, and the event loop's CPU time, over all frames of so many streams at once."""
    computed.clear()
    address, before = server.address, _cpu_seconds(server)
    command = [sys.executable, str(CLIENTS), address, str(streams), str(tokens)]
    arrivals = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    used = _cpu_seconds(server) - before
    waits = [
        1e3 * (arrived - began)
        for seed, times in enumerate(arrivals)
        for began, arrived in zip(computed[seed], times, strict=True)
    ]
    cuts = statistics.quantiles(waits, n=100)
    return {
        "streams": streams,
        "frames": len(waits),
        "p50_ms": cuts[49],
        "p90_ms": cuts[89],
        "p99_ms": cuts[98],
        "max_ms": max(waits),
        "cpu_us_per_frame": 1e6 * used / len(waits),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", default="1,8,32", help="numbers of streams at once, joined by commas")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--speculation", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    computed: dict[int, list[float]] = defaultdict(list)
    _record(computed)
    up = threading.Event()
    llm = LLM(options.model, speculation=options.speculation, max_sequences=64, self_test=False)
    server = Server(llm, ServeConfig(), "127.0.0.1", 0, lambda address: up.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    up.wait()
    try:
        measure(server, computed, 2, 8)  # warm
        rows = [measure(server, computed, int(streams), options.tokens) for streams in options.streams.split(",")]
    finally:
        server.should_exit = True
        thread.join()
    for row in rows:
        print(
            "  ".join(f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items())
        )
    if options.json:
        options.json.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
