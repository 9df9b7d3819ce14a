"""The paths of an accelerator, measured: steps of 1 to 64 rows, a prompt, and tokens per second with speculation off and on.

    python bench/gpu.py [--precision auto] [--json bench/results/gpu.json] [--device cuda]

A step is what the engine waits for: packing, the pass, and the logits on the host. Steps are timed recorded and launched
kernel by kernel, in turns; the median counts. Without a device the program says so and ends well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specdec import attention
from specdec.bench.prompts import DEFAULT, load, select
from specdec.bench.provenance import provenance
from specdec.config import DEFAULT_MODEL, SamplingParams
from specdec.history import History
from specdec.kernels.base import Kernels
from specdec.kv.blocks import BlockAllocator, BlockTable, blocks_for
from specdec.kv.pool import Pool
from specdec.llm import LLM
from specdec.metrics.stats import Stats
from specdec.models.base import Model
from specdec.runner.compiled import ROWS, make_runner
from specdec.runner.runner import Runner
from specdec.tree import chain
from specdec.types import Draft, Sequence, Span, Step

CACHED = (128, 2048)
"""Tokens before the rows of a step, as far as the model's context allows."""
PROMPT = 1000


class Bench:
    """One sequence in a pool of its own, and the runners that are compared."""

    def __init__(self, model: Model, kernels: Kernels, n_slots: int) -> None:
        shape = model.shape
        pool = Pool(shape.n_layers, blocks_for(n_slots), shape.n_kv_heads, shape.head_dim, model.kv_dtype, model.device)
        table = BlockTable(BlockAllocator(pool.n_blocks))
        table.reserve(n_slots)
        tokens = [(7919 * (i + 1)) % shape.vocab_size for i in range(n_slots)]
        history = History.of(tokens, n_slots)
        self.sequence = Sequence(0, tokens, n_slots, SamplingParams(), 0, n_slots, frozenset(), table, history, Stats())
        attend = attention.select(pool, kernels)
        self.runners = {"recorded": make_runner(model, attend), "launched": Runner(model, attend)}

    def prompt(self, n: int, chunk: int) -> None:
        """Read n tokens; the last row's logits are on the host afterwards."""
        for start in range(0, n, chunk):
            self.runners["launched"].forward(Step((Span(self.sequence, start, min(start + chunk, n)),)))

    def step(self, name: str, cached: int, drafted: list[int]) -> Callable[[], object]:
        """A step whose pending token follows ``cached`` tokens, with a chain of drafted ones."""
        step = Step((Span(self.sequence, cached, cached + 1, Draft(chain(drafted), ("bench",) * len(drafted))),))
        runner = self.runners[name]
        return lambda: runner.forward(step)


def milliseconds(work: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The median of each, run in turns for about ``seconds`` in all, after a first run that compiles and records."""
    for one in work.values():
        one()
    times: dict[str, list[float]] = {name: [] for name in work}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 3:
        for name, one in work.items():
            started = time.perf_counter()
            one()
            times[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(some) for name, some in times.items()}


def steps(model: Model, kernels: Kernels, seconds: float) -> list[dict[str, Any]]:
    """What a step of each number of rows costs, and v(M): that over a step of one row."""
    print(f"{'cached':>7} {'rows':>5} {'recorded ms':>12} {'v(M)':>6} {'launched ms':>12}")
    rows = []
    for cached in CACHED:
        if cached + ROWS[-1] > model.shape.context:
            print(f"{cached:7} tokens do not fit the model's context of {model.shape.context}: left out")
            continue
        bench = Bench(model, kernels, cached + ROWS[-1])
        tokens = bench.sequence.tokens
        bench.prompt(cached, 128)
        bench.sequence.tokens = tokens[: cached + 1]  # the pending token is the last; what follows is drafted
        first = 0.0
        for n in ROWS:
            made = {name: bench.step(name, cached, tokens[cached + 1 : cached + n]) for name in bench.runners}
            found = milliseconds(made, seconds)
            first = first or found["recorded"]
            rows.append({"cached": cached, "rows": n, "v": found["recorded"] / first, **found})
            print(f"{cached:7} {n:5} {found['recorded']:12.3f} {rows[-1]['v']:6.2f} {found['launched']:12.3f}", flush=True)
    return rows


def reading(model: Model, kernels: Kernels, chunk: int) -> dict[str, float]:
    """A prompt of 1,000 tokens, or as long as the model takes, in the engine's chunks."""
    n = min(PROMPT, model.shape.context)
    bench = Bench(model, kernels, n)
    found = milliseconds({"prompt": lambda: bench.prompt(n, chunk)}, 1.0)["prompt"]
    print(f"a prompt of {n} tokens in chunks of {chunk}: {found:.1f} ms, {1e3 * n / found:.0f} tokens/s")
    return {"tokens": n, "milliseconds": found, "tokens_per_second": 1e3 * n / found}


def answers(on: LLM, n_prompts: int, n_tokens: int) -> list[dict[str, Any]]:
    """Tokens per second over some prompts, off and on in turns, at temperatures 0 and 1. The tokens must be the same."""
    off = on.without_speculation()
    chosen = select(load(DEFAULT), [], n_prompts)
    found = []
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=n_tokens, seed=0)
        seconds, tokens, passes, changed = {"off": 0.0, "on": 0.0}, 0, {"off": 0, "on": 0}, 0
        for prompt in chosen:
            messages = [{"role": "user", "content": prompt.request}]
            emitted = {}
            for name, llm in (("off", off), ("on", on)):
                runs = []
                for _ in range(2):
                    llm.engine.forget()  # no drafter may remember the answer from the turn before
                    runs += llm.chat(messages, params)
                seconds[name] += min(run.seconds for run in runs)
                passes[name] += runs[0].stats["target_passes"]
                emitted[name] = runs[0].tokens
            changed += emitted["off"] != emitted["on"]
            tokens += len(emitted["on"])
        rates = {name: tokens / some for name, some in seconds.items()}
        found.append({"temperature": temperature, "tokens": tokens, "tokens_per_second": rates, "passes": passes,
                      "prompts": len(chosen), "changed": changed})  # fmt: skip
        print(
            f"temperature {temperature:g}: {rates['off']:.0f} tokens/s off, {rates['on']:.0f} on, "
            f"{tokens / passes['on']:.2f} tokens a pass; {changed} of {len(chosen)} answers changed"
        )
    return found


def bandwidth(device: torch.device) -> float:
    """Bytes read per second by a sum over a buffer that no cache holds."""
    buffer = torch.ones(2**28 if device.type == "cuda" else 2**24, device=device)
    found = milliseconds({"sum": lambda: float(buffer.sum().cpu())}, 0.3)["sum"]
    return 1e3 * buffer.nbytes / found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each number of rows")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: the paths of an accelerator were not measured")
        return

    on = LLM(arguments.model, precision=arguments.precision, device=arguments.device, speculation="auto")
    model, found = on.engine.model, on.engine.invariance
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    read = bandwidth(device)
    bound = 1e3 * model.n_bytes / read
    print(f"{name}, kernels {on.kernels.name}, {on.precision}; {found.describe() if found else 'no self-test'}")
    print(f"weights {model.n_bytes / 1e6:.0f} MB at {read / 1e9:.0f} GB/s: no step below {bound:.3f} ms")
    with torch.inference_mode():
        result: dict[str, Any] = {
            "steps": steps(model, on.kernels, arguments.seconds),
            "prompt": reading(model, on.kernels, on.config.prefill_rows),
        }
    result["answers"] = answers(on, arguments.prompts, arguments.max_tokens)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    if peak:
        print(f"peak memory of the device {peak / 1e6:.0f} MB")
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key != "json"}
        settings |= {"kernels": on.kernels.name, "precision": on.precision, "device_name": name}
        result |= {"bound_ms": bound, "peak_bytes": peak, "exact": bool(found and found.exact)}
        arguments.json.write_text(json.dumps({"provenance": provenance(), "settings": settings, **result}, indent=2) + "\n")
    if found and found.exact and any(some["changed"] for some in result["answers"]):
        raise SystemExit("speculation changed tokens although rows are independent of their company: this is a fault")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
