"""The start-up measurement of what a pass costs by its number of rows, on the loaded model and this machine.

It runs in a key and value pool of its own, once: the figures are kept in a file for the next start.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import specdec
from specdec import attention
from specdec.config import BLOCK_SIZE, SamplingParams
from specdec.history import History
from specdec.kernels.base import Kernels
from specdec.kernels.cpu import NativeKernels
from specdec.kernels.library import load
from specdec.kv.blocks import BlockAllocator, BlockTable, blocks_for
from specdec.kv.pool import Pool
from specdec.metrics.stats import Stats
from specdec.models.base import Model
from specdec.models.source import cache_folder
from specdec.runner.compiled import make_runner
from specdec.runner.cost import Costs
from specdec.runner.probe import probe_text
from specdec.tree import chain
from specdec.types import Draft, Sequence, Span, Step

CONTEXT = 128
"""Cached tokens that a measured pass attends to."""

SIZES = (1, 8, 32, 2, 4, 16)
"""Rows of the measured passes, in the order of a round: where time runs out after two, the rest is a straight line."""

WIDE = 64
"""Measured as well where bursts may be wider than the sizes above."""

ROUNDS = 12
LIMIT = 1.2
"""Most rounds, and seconds after which no further pass is begun."""

STEADY = 1.5
"""Where the two fastest passes of a size differ by more than this, the machine was busy: the figures are not kept."""

CHECKED = 1, 8
CHECKS, CHECK_LIMIT = 4, 0.25
"""Rows of the passes that check kept figures; most rounds of them, and seconds that they may take in all."""

FASTER = 1.15
"""Where a pass takes less than its kept figure by more than this, the machine was busy when that was measured."""


def pass_costs(model: Model, kernels: Kernels, max_rows: int) -> Costs:
    """The costs of this model here, for passes of about ``max_rows`` rows.

    They are read from the cache folder where they have been measured before, unless the machine was busy then, as a few passes
    show. A file that is damaged, or was written for something else, is measured anew; a folder that cannot be written to costs
    the measurement at every start, and so does a machine too busy to measure on.
    """
    sizes = [*SIZES, WIDE] if max_rows > max(SIZES) else list(SIZES)
    key = identity(model, kernels, sizes)
    path = cache_folder() / "costs" / (hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24] + ".json")
    known = _read(path, key)
    if known and not outdone(model, kernels, known):
        return known
    costs, steady = measure(model, kernels, sizes)
    if known:  # the faster figure of each size is the truer one, whenever it was measured
        costs = Costs({rows: min(s, known.points.get(rows, s)) for rows, s in costs.points.items()})
    if steady:
        _write(path, {"of": key, "seconds": costs.points})
    return costs


def outdone(model: Model, kernels: Kernels, costs: Costs) -> bool:
    """Do passes take notably less time than these costs say? A model too slow for a short check is believed."""
    sizes = [rows for rows in CHECKED if rows in costs.points]
    rounds = min(CHECKS, int(CHECK_LIMIT / sum(costs.points[rows] for rows in sizes))) if sizes else 0
    if not rounds:
        return False
    now, _ = measure(model, kernels, sizes, rounds=rounds)
    return any(FASTER * seconds < costs.points[rows] for rows, seconds in now.points.items())


def identity(model: Model, kernels: Kernels, sizes: list[int]) -> dict[str, Any]:
    """Everything that changes the costs, as plain values."""
    return {
        "specdec": specdec.__version__,
        "torch": torch.__version__,
        "model": {"kind": type(model).__name__, **dataclasses.asdict(model.shape)},
        "precision": model.precision,
        "weights_bytes": model.n_bytes,
        "kv": str(model.kv_dtype),
        "kernels": kernels.name,
        "library": [load().sources, load().compiler] if isinstance(kernels, NativeKernels) else None,
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "context": CONTEXT,
        "rows": sizes,
    }


class Passes:
    """Steps to be timed, in a pool of their own; what its slots hold takes no part in the time."""

    def __init__(self, model: Model, kernels: Kernels, n_tokens: int) -> None:
        """``n_tokens``: room for so many, drafted ones among them."""
        shape = model.shape
        blocks = blocks_for(n_tokens)
        pool = Pool(shape.n_layers, blocks, shape.n_kv_heads, shape.head_dim, model.kv_dtype, model.device)
        pool.keys.zero_()  # numbers that are none would take part in the time
        pool.values.zero_()
        self.pool = pool
        self.runner = make_runner(model, attention.select(pool, kernels))
        self._table = BlockTable(BlockAllocator(pool.n_blocks))
        self._table.reserve(pool.n_blocks * BLOCK_SIZE)
        self._tokens = probe_text(n_tokens, shape.vocab_size)

    def burst(self, context: int, rows: int) -> Step:
        """The last of ``context`` committed tokens, and a chain of ``rows`` - 1 drafted ones; all logits are wanted."""
        tree = chain(self._tokens[context : context + rows - 1])
        return Step((Span(self._sequence(context), context - 1, context, Draft(tree, ("cost",) * len(tree))),))

    def prompt(self, rows: int) -> Step:
        """The first ``rows`` tokens of a text; the last one's logits are wanted."""
        return Step((Span(self._sequence(rows), 0, rows),))

    def _sequence(self, n: int) -> Sequence:
        tokens = self._tokens[:n]
        history, limit = History.of(tokens, n), len(self._tokens)
        return Sequence(0, tokens, n, SamplingParams(), 0, limit, frozenset(), self._table, history, Stats())


def measure(
    model: Model,
    kernels: Kernels,
    sizes: list[int],
    *,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
    limit: float = LIMIT,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Costs, bool]:
    """Time passes of each size in turns; the fastest of each counts, since other programs only ever make one slower.

    Args:
        sizes: rows of the passes.
        context: cached tokens that a pass attends to, or as many as the model has room for.
        rounds: most of them.
        limit: seconds after which no further pass is begun, once there are two sizes.

    Returns:
        The costs, and whether the figures are steady enough to be kept.
    """
    started = clock()
    sizes = [size for size in sizes if size < model.shape.context]
    context = min(context, model.shape.context - max(sizes))
    passes = Passes(model, kernels, context + max(sizes))
    steps = {size: passes.burst(context, size) for size in sizes}

    times: dict[int, list[float]] = {}
    for size in sizes * rounds:
        if len(times) >= min(2, len(sizes)) and clock() - started > limit:
            break
        begun = clock()
        passes.runner.forward(steps[size])
        times.setdefault(size, []).append(clock() - begun)
    for some in times.values():
        some.sort()
    steady = len(times) == len(sizes) and all(len(some) > 1 and some[1] <= STEADY * some[0] for some in times.values())
    return Costs({size: some[0] for size, some in times.items()}), steady


def cpu_name() -> str:
    """The processor's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or os.name


def _read(path: Path, key: dict[str, Any]) -> Costs | None:
    """What a file holds; None where there is none, or it is not what was written for ``key``."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["of"] != json.loads(json.dumps(key)):
            return None
        return Costs({int(rows): float(seconds) for rows, seconds in record["seconds"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(path: Path, record: dict[str, Any]) -> None:
    """Put a whole file in place or none: other processes may be reading it, or writing the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".part", delete=False) as file:
            json.dump(record, file, indent=1)
        os.replace(file.name, path)  # noqa: PTH105 - both names are plain strings here
    except OSError:
        return
