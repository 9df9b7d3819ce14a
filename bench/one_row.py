"""Where the time of a pass of one row goes, by Linux's perf.

    python bench/one_row.py [--seconds 12]

It runs itself under ``perf record`` and prints, for the thread that calls and for the worker that helps it, the share of each
function in the passes' time.
"""

from __future__ import annotations

import argparse
import collections
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from specdec import LLM
from specdec.runner.measure import Passes

CONTEXT = 128
LEAST = 0.005
"""Functions of a smaller share of a thread's time are added up."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--run", action="store_true", help="only run passes, and print when they began and what one took")
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.seconds)
        return
    if not shutil.which("perf"):
        sys.exit("perf is not installed (Debian: linux-perf)")
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder, "perf.data"))
        itself = [sys.executable, __file__, "--run", "--seconds", str(arguments.seconds)]
        # Its samples carry the time of time.monotonic, so that those of the loading before the first pass can be left out.
        record = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "2000", "-k", "CLOCK_MONOTONIC", "-o", data, *itself]
        began, milliseconds = map(float, subprocess.run(record, check=True, capture_output=True, text=True).stdout.split())
        script = ["perf", "script", "-i", data, "-F", "tid,time,ip,sym"]
        lines = subprocess.run(script, check=True, capture_output=True, text=True).stdout.splitlines()
    print(f"{milliseconds:.2f} ms a pass")
    for title, shares in zip(("the caller", "the worker"), by_thread(lines, began), strict=False):
        print(f"\n{title}")
        for name, share in shares:
            print(f"  {share:6.1%}  {name}")


def run(seconds: float) -> None:
    """Passes, one after the other."""
    llm = LLM(speculation="off", progress=False)
    made = Passes(llm.engine.model, llm.kernels, 2 * CONTEXT)
    step = made.burst(CONTEXT, 1)
    made.runner.forward(step)
    began, n = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        made.runner.forward(step)
        n += 1
    print(began, 1e3 * (time.monotonic() - began) / n)


def by_thread(lines: list[str], began: float) -> list[list[tuple[str, float]]]:
    """Of each thread, the busiest first, functions and their shares of its samples, from the lines of ``perf script``."""
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for line in lines:
        thread, at, _, *name = line.split()
        if float(at.rstrip(":")) >= began:
            found[thread][name[0] if name else "?"] += 1
    shares = []
    for counts in sorted(found.values(), key=lambda counts: -counts.total()):
        ranked = [(name, n / counts.total()) for name, n in counts.most_common()]
        large = [(name, share) for name, share in ranked if share >= LEAST]
        shares.append([*large, ("others", 1 - sum(share for _, share in large))])
    return shares


if __name__ == "__main__":
    main()
