"""What one process takes on this machine: its start, its memory, passes against what bounds them, long contexts, busy cores.

    python bench/limits.py [--json bench/results/limits.json]

Wants a quiet machine and takes about two minutes. Starts and memory are those of processes of their own, with everything cached
that a first run leaves behind.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdec.bench.provenance import provenance
from specdec.bench.run import MOST_READ
from specdec.config import BLOCK_SIZE, SamplingParams
from specdec.kernels.library import load
from specdec.kernels.memory import read_rate
from specdec.llm import LLM
from specdec.runner.measure import Passes

ROWS = (1, 8, 16, 32)
CONTEXTS = (128, 1024, 4096)
ROUNDS = 30
STARTS = 5
TOKENS = 2000
"""Decoded by the process whose memory is looked at."""

START = """
import time
began = float(__import__("sys").argv[1])
marks = [("interpreter", time.time())]
import torch
marks.append(("torch", time.time()))
from specdec import LLM, SamplingParams
marks.append(("specdec", time.time()))
llm = LLM()
marks.append(("model, drafters and self-test", time.time()))
next(iter(llm.stream("Tell me a story.", SamplingParams(max_tokens=4, temperature=0))))
marks.append(("first token", time.time()))
seconds = {}
for name, at in marks:
    seconds[name], began = at - began, at
print(__import__("json").dumps(seconds))
"""

MEMORY = """
import sys
from specdec import LLM, SamplingParams
llm = LLM(speculation=sys.argv[1])
llm.generate("Tell me a story.", SamplingParams(max_tokens=int(sys.argv[2]), temperature=0, ignore_eos=True))
told = dict(line.split()[:2] for line in open("/proc/self/status") if line.startswith(("VmHWM", "RssFile")))
print(__import__("json").dumps({"peak_bytes": 1024 * int(told["VmHWM:"]), "file_bytes": 1024 * int(told["RssFile:"])}))
"""

SPIN = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    llm = LLM(speculation="off")
    found: dict[str, Any] = {
        "provenance": provenance(model=llm.name, precision=llm.precision, kernels=llm.kernels.name),
        "passes": passes(llm),
        "neighbour": neighbour(llm),
        "start": start(),
        "memory": {
            speculation: {"tokens": TOKENS, **json.loads(_run(MEMORY, speculation, str(TOKENS)))}
            for speculation in ("off", "auto")
        },
    }
    text = json.dumps(found, indent=2) + "\n"
    print(text)
    if arguments.json:
        arguments.json.write_text(text, encoding="utf-8")


def passes(llm: LLM) -> dict[str, Any]:
    """Milliseconds of passes by rows and context, in turns, the fastest of each; and what bounds one of a row."""
    model = llm.engine.model
    made = Passes(model, llm.kernels, max(CONTEXTS) + max(ROWS))
    sizes = [(CONTEXTS[0], rows) for rows in ROWS] + [(context, 1) for context in CONTEXTS[1:]]
    best = dict.fromkeys(sizes, float("inf"))
    rate = 0.0
    for turn in range(ROUNDS):
        for context, rows in sizes:
            step = made.burst(context, rows)
            started = time.perf_counter()
            made.runner.forward(step)
            best[context, rows] = min(best[context, rows], time.perf_counter() - started)
        if turn % 10 == 0:
            rate = max(rate, read_rate(load(), min(model.n_bytes, MOST_READ)))
    per_token = made.pool.n_bytes / (made.pool.n_blocks * BLOCK_SIZE)
    return {
        "weights_bytes": model.n_bytes,
        "bytes_per_second": rate,
        "kv_bytes_per_token": per_token,
        "passes": [{"context": context, "rows": rows, "ms": 1e3 * s} for (context, rows), s in best.items()],
    }


def neighbour(llm: LLM) -> dict[str, float]:
    """Seconds of the same work alone and beside as many busy processes as there are cores, in turns."""
    alone, beside = [], []
    for _ in range(3):
        alone.append(_seconds(llm))
        with busy():
            beside.append(_seconds(llm))
    return {"alone_seconds": statistics.median(alone), "beside_seconds": statistics.median(beside)}


def start() -> dict[str, Any]:
    """Seconds from the start of a process to its first token, and where they go: the median of some starts, part by part."""
    found = [json.loads(_run(START, str(time.time()))) for _ in range(STARTS)]
    totals = [sum(parts.values()) for parts in found]
    return {
        "seconds": statistics.median(totals),
        "least_seconds": min(totals),
        "parts": {name: statistics.median(parts[name] for parts in found) for name in found[0]},
    }


def _seconds(llm: LLM) -> float:
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    started = time.perf_counter()
    llm.generate("Tell me a story.", params)
    return time.perf_counter() - started


@contextmanager
def busy() -> Iterator[None]:
    """As many processes that do nothing but compute as there are cores."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(os.cpu_count() or 1)]
    try:
        time.sleep(0.2)
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def _run(script: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", script, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    main()
