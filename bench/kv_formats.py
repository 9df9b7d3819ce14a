"""What a pass takes by the format of keys and values and by the length of the context, and what a token takes in memory.

    python bench/kv_formats.py [--rows 1 8] [--tokens 128 1024 4096] [--seconds 40] [--json out.json]

Passes of all formats run in turns, on random keys and values; the fastest of each counts, since other programs only ever make
one slower. Medians are told too: where they lie far above, the machine was not quiet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from specdec import kernels
from specdec.bench.provenance import provenance
from specdec.kernels.base import Kernels
from specdec.kv.codec import DTYPES, bytes_of_row, encode
from specdec.kv.pool import Pool
from specdec.models.base import Model
from specdec.models.load import load_model
from specdec.models.source import resolve
from specdec.runner.measure import Passes


def passes(model: Model, ops: Kernels, n_tokens: int) -> Passes:
    """Passes over a pool whose slots hold random rows."""
    made, shape = Passes(model, ops, n_tokens), model.shape
    pool: Pool = made.pool
    for layer in range(pool.n_layers):
        for parts in (pool.key_parts, pool.value_parts):
            rows = torch.randn(pool.n_blocks, 16, shape.n_kv_heads, shape.head_dim)
            for part, held in zip(parts, encode(rows, model.kv_dtype), strict=True):
                part[layer] = held
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--format", action="append", choices=list(DTYPES), help="default: bf16, int8, int4")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--seconds", type=float, default=40, help="of measuring")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    formats = arguments.format or ["bf16", "int8", "int4"]
    device = torch.device("cpu")
    ops = kernels.select(device)
    model = load_model(resolve(arguments.model), "auto", ops, device)
    longest = max(arguments.tokens) + max(arguments.rows)
    made = {name: passes(model.holding(DTYPES[name]), ops, longest) for name in formats}
    steps = [(n, tokens, name) for n in arguments.rows for tokens in arguments.tokens for name in formats]
    seconds: dict[tuple[int, int, str], list[float]] = {step: [] for step in steps}
    ends = time.perf_counter() + arguments.seconds
    while time.perf_counter() < ends:
        for n, tokens, name in steps:
            step = made[name].burst(tokens, n)
            started = time.perf_counter()
            made[name].runner.forward(step)
            seconds[n, tokens, name].append(time.perf_counter() - started)
    rows = []
    print(f"{'rows':>4} {'tokens':>7} {'format':7} {'ms':>7} {'median':>7}")
    for n, tokens, name in steps:
        some = [1e3 * s for s in seconds[n, tokens, name]]
        rows.append({"rows": n, "tokens": tokens, "kv_format": name, "ms": min(some), "median_ms": statistics.median(some)})
        print(f"{n:4} {tokens:7} {name:7} {min(some):7.2f} {statistics.median(some):7.2f}")
    shape = model.shape
    per_token = {name: 2 * shape.n_layers * shape.n_kv_heads * bytes_of_row(DTYPES[name], shape.head_dim) for name in formats}
    print("bytes a token:", ", ".join(f"{name} {n:,}" for name, n in per_token.items()))
    if arguments.json:
        told = provenance(model=arguments.model, precision=model.precision, kernels=ops.name)
        result = {"provenance": told, "rows": rows, "bytes_per_token": per_token}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
