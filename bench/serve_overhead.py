"""How long the server holds a token back: from the end of the pass that computed it to the socket, and to a client.

The first includes waking the event loop, detokenising, JSON and the HTTP server. Clients run in a process of their own on the
same machine, whose cores the passes keep busy, and share its clock, so the second includes their waiting for a core too. What
of it is work, and not waiting, is ``cpu_us_per_frame``: the CPU time of the event loop's thread, requests included.

    python bench/serve_overhead.py --streams 1,8,32 --json bench/results/serve_overhead.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from serve_here import serving

from specdec.bench.provenance import provenance
from specdec.config import DEFAULT_MODEL
from specdec.llm import LLM
from specdec.serve.generation import Generation
from specdec.serve.server import Server

CLIENTS = Path(__file__).with_name("serve_clients.py")


Sent = dict[int, list[tuple[float, float]]]
"""Of each seed's frames: when what is in them was computed, and when they were written to the socket."""


def _record(sent: Sent) -> None:
    """Have every generation note, by its seed, when it sends what."""
    delivered = Generation.delivered

    def noting(self: Generation) -> None:
        if (began := self._sending) is not None:
            # An event loop may write what it was given only once all that is ready has run: uvloop does.
            asyncio.get_running_loop().call_soon(lambda: sent[self.seed].append((began, time.perf_counter())))
        delivered(self)

    Generation.delivered = noting  # type: ignore[method-assign]


def _cpu_seconds(server: Server) -> float:
    """CPU time of the event loop's thread so far."""

    async def read() -> float:
        return time.thread_time()

    return asyncio.run_coroutine_threadsafe(read(), server.servers[0].get_loop()).result()


def measure(server: Server, sent: Sent, streams: int, tokens: int) -> dict[str, Any]:
    """Milliseconds from computed to written and to received, and the event loop's CPU time, over all frames of so many streams
    at once."""
    sent.clear()
    address, before = server.address, _cpu_seconds(server)
    command = [sys.executable, str(CLIENTS), address, str(streams), str(tokens)]
    arrivals = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    used = _cpu_seconds(server) - before
    frames = [(*at, arrived) for seed, times in enumerate(arrivals) for at, arrived in zip(sent[seed], times, strict=True)]
    return {
        "streams": streams,
        "frames": len(frames),
        # The event loop may do other things between writing and looking at the clock; what has arrived had been written.
        "to_socket": _spread([1e3 * (min(written, arrived) - began) for began, written, arrived in frames]),
        "to_client": _spread([1e3 * (arrived - began) for began, _, arrived in frames]),
        "cpu_us_per_frame": 1e6 * used / len(frames),
    }


def _spread(waits: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(waits, n=100, method="inclusive")
    return {"p50_ms": cuts[49], "p90_ms": cuts[89], "p99_ms": cuts[98], "max_ms": max(waits)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", default="1,8,32", help="numbers of streams at once, joined by commas")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--speculation", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    sent: Sent = defaultdict(list)
    _record(sent)
    llm = LLM(options.model, speculation=options.speculation, max_sequences=64, self_test=False)
    with serving(llm) as server:
        measure(server, sent, 2, 8)  # warm
        rows = [measure(server, sent, int(streams), options.tokens) for streams in options.streams.split(",")]
    for row in rows:
        print(f"{row['streams']} streams, {row['frames']} frames, {row['cpu_us_per_frame']:.0f} us of CPU a frame")
        for name in ("to_socket", "to_client"):
            print(f"    {name}:", "  ".join(f"{key} {value:.2f}" for key, value in row[name].items()))
    if options.json:
        options.json.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
