"""What the native kernels cost: every product of the default model with cold weights, and attention for all its layers.

    python bench/kernels.py [--json FILE] [--repeat N] [--threads 1,2]

A timing is one pass over all layers, so that weights come from memory as they do in a step of the model; attention reads a
pool that is as large as the real one. On a shared machine the minimum says most: it is what the code costs undisturbed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from specdec import kernels
from specdec.bench.provenance import provenance
from specdec.config import BLOCK_SIZE
from specdec.kernels.base import GROUP, LANES, BlockWeight, DenseWeight, Kernels, Rows

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
HEAD = (49152, 576)
ROWS = [1, 2, 4, 8, 16, 32, 128]
ATTENTION = [(1, 128), (1, 512), (1, 1024), (1, 4096), (8, 128), (8, 1024), (16, 256), (128, 128), (128, 1024), (512, 1024)]
"""Rows and the keys that the first of them sees."""
BYTES = {"q4": 20, "q8": 34}
"""Bytes of 32 weights."""

Step = Callable[[], None]


def block_weight(n: int, k: int, kind: str) -> BlockWeight:
    """Random codes, scales of about 0.01: what a product costs does not depend on the numbers."""
    data = torch.randint(0, 256, (n // LANES, k // GROUP, LANES * BYTES[kind]), dtype=torch.uint8)
    halves = LANES * 2 * (2 if kind == "q4" else 1)
    data[..., -halves:] = torch.tensor([0x1F, 0x21], dtype=torch.uint8).repeat(halves // 2)
    return BlockWeight(data, "q4" if kind == "q4" else "q8", n, k)


def block_products(run: Kernels, head: bool) -> Callable[[int], Step]:
    layers = [] if head else [block_weight(n, k, "q4") for _ in range(LAYERS) for n, k in SHAPES]
    weights = [block_weight(*HEAD, "q8")] if head else layers

    def of(rows: int) -> Step:
        x = {k: torch.randn(rows, k) for k in (576, 1536)}

        def step() -> None:
            for weight in weights:
                run.block_linear(x[weight.k], weight)

        return step

    return of


def dense_products(run: Kernels, dtype: torch.dtype) -> Callable[[int], Step]:
    """One layer of float weights after another until 60 MB are out of cache: a third of the model's in bfloat16."""
    layers = 10 if dtype is torch.bfloat16 else 5
    weights = [DenseWeight(torch.randn(n // LANES, k, LANES).to(dtype), n, k) for _ in range(layers) for n, k in SHAPES]

    def of(rows: int) -> Step:
        x = {k: torch.randn(rows, k) for k in (576, 1536)}

        def step() -> None:
            for weight in weights:
                run.dense_linear(x[weight.k], weight)

        return step

    return of


def attention(run: Kernels, rows: int, keys: int) -> Step:
    """A burst of consecutive rows, the first of which sees ``keys`` keys, through every layer's own pool."""
    blocks = -(-(keys + rows) // BLOCK_SIZE)
    pools = [
        (
            torch.randn(blocks, KV_HEADS, HEAD_DIM, BLOCK_SIZE).bfloat16(),
            torch.randn(blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM).bfloat16(),
        )
        for _ in range(LAYERS)
    ]
    positions = torch.arange(keys - 1, keys - 1 + rows, dtype=torch.int32)
    where = Rows(
        tables=torch.randperm(blocks, dtype=torch.int32)[None],
        sequence=torch.zeros(rows, dtype=torch.int32),
        slot=positions,
        prefix=positions + 1,
        path=torch.empty(rows, 0, dtype=torch.int32),
        n_path=torch.zeros(rows, dtype=torch.int32),
    )
    q: Tensor = torch.randn(rows, HEADS, HEAD_DIM)

    def step() -> None:
        for k, v in pools:
            run.attend(q, k, v, where, HEAD_DIM**-0.5, 0)

    return step


def measure(step: Step, repeat: int) -> dict[str, float]:
    """Milliseconds of ``repeat`` passes after one that is not counted."""
    step()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return {"min_ms": round(min(times), 3), "median_ms": round(statistics.median(times), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result, with its provenance, to FILE")
    parser.add_argument("--repeat", type=int, default=15, help="passes of each kind (default 15)")
    parser.add_argument("--threads", default="1,2", help="numbers of threads to try (default 1,2)")
    arguments = parser.parse_args()

    run = kernels.select("cpu")
    what = {
        "q4 products, 30 layers": block_products(run, head=False),
        "q8 head 49152 x 576": block_products(run, head=True),
        "bf16 products, 10 layers": dense_products(run, torch.bfloat16),
        "fp32 products, 5 layers": dense_products(run, torch.float32),
    }
    cases = [(name, f"{rows} rows", of(rows)) for name, of in what.items() for rows in ROWS]
    cases += [("attention, 30 layers", f"{rows} rows, {keys} keys", attention(run, rows, keys)) for rows, keys in ATTENTION]

    results = []
    print(kernels.describe("cpu"))
    print(f"{'':26} {'':20} threads   min ms  median ms")
    for name, size, step in cases:
        for threads in map(int, arguments.threads.split(",")):
            kernels.set_threads(threads)
            timing = measure(step, arguments.repeat)
            results.append({"what": name, "size": size, "threads": threads, **timing})
            print(f"{name:26} {size:20} {threads:7} {timing['min_ms']:8.2f} {timing['median_ms']:10.2f}", flush=True)
    if arguments.json:
        record = {
            "provenance": provenance(),
            "kernels": kernels.describe("cpu"),
            "repeat": arguments.repeat,
            "results": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
