"""The measurement behind ``specdec roofline``: two rates of this machine, and passes of the loaded model placed under them."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from specdec.bench.provenance import model_name, provenance
from specdec.bench.run import MOST_READ
from specdec.config import ConfigError
from specdec.kernels.base import Kernels
from specdec.kernels.cpu import NativeKernels
from specdec.kernels.library import load as load_library
from specdec.kernels.memory import read_rate
from specdec.kv import codec
from specdec.llm import LLM
from specdec.models.decoder import Decoder
from specdec.quant.linear import Linear
from specdec.roofline import Machine, Sizes, Work
from specdec.runner.cost import Costs
from specdec.runner.measure import CONTEXT, SIZES, WIDE, Passes, measure

LAYOUT = "specdec roofline 1"
"""What a file says of itself in its key ``layout``."""

NEARLY = 1.2
"""A pass that costs at most this many times one of one row counts as nearly free."""

PROMPTS = (128, 512)
"""Rows of the measured prompts: what the engine reads in one step by default, and a wide pass."""

PRODUCT_ROWS = 256
"""Rows at which products are timed for the rate of arithmetic: wide enough that weights are read for next to nothing."""

REPEATS = 5
LIMIT = 6.0
"""Most seconds of timing bursts, and of timing products and prompts each."""

Kind = Literal["decode", "verify", "prefill"]


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass that was timed."""

    kind: Kind
    rows: int
    cached: int
    """Tokens in the cache before it."""
    seconds: float
    work: Work

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.work.intensity

    @property
    def rate(self) -> float:
        """Operations a second."""
        return self.work.operations / self.seconds

    def share(self, machine: Machine) -> float:
        """How much of what the machine allows at this intensity was reached."""
        return machine.seconds(self.work) / self.seconds


@dataclass(frozen=True, slots=True)
class Roofline:
    """One measurement."""

    provenance: Mapping[str, Any]
    machine: Machine
    sizes: Sizes
    passes: tuple[Pass, ...]
    steady: bool
    """False where other programs ran beside it: the figures are worth little then."""

    @property
    def costs(self) -> Costs:
        """Seconds of decoding and verifying passes by their rows."""
        return Costs({p.rows: p.seconds for p in self.passes if p.kind != "prefill"}, fixed=True)

    @property
    def nearly_free(self) -> int:
        """Rows of the widest burst that costs at most ``NEARLY`` passes of one row."""
        costs = self.costs
        return costs.rows(NEARLY * costs.seconds(1))


def measure_roofline(llm: LLM) -> Roofline:
    """Measure; takes some seconds, in which nothing else should run.

    Raises:
        ConfigError: the model is none whose products can be counted.
    """
    model = llm.engine.model
    if not isinstance(model, Decoder):
        raise ConfigError(f"the roofline counts the products of a decoder, and {type(model).__name__} is none")
    sizes = sizes_of(model)
    rates = [_rates(model, llm.kernels)]
    costs, steady = measure(model, llm.kernels, [*SIZES, WIDE], limit=LIMIT)
    # The pending token is the last of the context, so one token less lies in the cache.
    cached = min(CONTEXT, model.shape.context - max(costs.points)) - 1
    passes = []
    for rows, seconds in costs.points.items():
        kind: Kind = "decode" if rows == 1 else "verify"
        passes.append(Pass(kind, rows, cached, seconds, sizes.work(rows, cached, rows)))
    for rows, seconds in _prompts(model, llm.kernels).items():
        passes.append(Pass("prefill", rows, 0, seconds, sizes.work(rows, 0, 1)))
    rates.append(_rates(model, llm.kernels))  # once before and once after: other programs only ever make them lower
    told = provenance(
        model=model_name(llm.name),
        precision=llm.precision,
        kv_format=llm.kv_format,
        kernels=llm.kernels.name,
    )
    return Roofline(told, Machine(*map(max, zip(*rates, strict=True))), sizes, tuple(passes), steady)


def sizes_of(model: Decoder) -> Sizes:
    """What the products of a loaded decoder amount to; the embedding is looked up row by row and does not count."""
    a = model.architecture
    layers = [linear for layer in model.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    return Sizes(
        n_layers=a.n_layers,
        n_heads=a.n_heads,
        n_kv_heads=a.n_kv_heads,
        head_dim=a.head_dim,
        layer_weights=sum(linear.n * linear.k for linear in layers),
        head_weights=model.head.n * model.head.k,
        weight_bytes=sum(linear.n_bytes for linear in [*layers, model.head]),
        kv_entry_bytes=codec.bytes_of_row(model.kv_dtype, a.head_dim) / a.head_dim,
    )


def _rates(model: Decoder, kernels: Kernels) -> tuple[float, float]:
    """Bytes read, and operations of products, a second."""
    return _read_rate(kernels, model), _product_rate(model)


def _read_rate(kernels: Kernels, model: Decoder) -> float:
    """Bytes a second, over memory that no cache holds and that lies like the weights where kernels of ours read them."""
    if isinstance(kernels, NativeKernels):
        return read_rate(load_library(), min(model.n_bytes, MOST_READ))
    buffer = torch.ones(MOST_READ // 4, device=model.device)
    return buffer.nbytes / _fastest({0: lambda: buffer.sum()}, model.device)[0]


@torch.inference_mode()
def _product_rate(model: Decoder) -> float:
    """Operations a second of the products of all layers, on many rows, in the precision that is loaded."""
    linears: list[Linear] = [m for layer in model.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    x = {k: torch.randn(PRODUCT_ROWS, k, device=model.device) for k in {linear.k for linear in linears}}  # [M, k]

    def run() -> None:
        for linear in linears:
            linear(x[linear.k])

    operations = 2 * PRODUCT_ROWS * sum(linear.n * linear.k for linear in linears)
    return operations / _fastest({0: run}, model.device)[0]


def _prompts(model: Decoder, kernels: Kernels) -> dict[int, float]:
    """Seconds of reading prompts in one pass, by their length."""
    lengths = [rows for rows in PROMPTS if rows <= model.shape.context] or [model.shape.context]
    passes = Passes(model, kernels, max(lengths))
    run = passes.runner.forward
    return _fastest({rows: functools.partial(run, passes.prompt(rows)) for rows in lengths}, model.device)


def _fastest(work: Mapping[int, Callable[[], object]], device: torch.device) -> dict[int, float]:
    """The least seconds of each, in turns, after a run that does not count; at least two turns, then until time is up."""
    best = dict.fromkeys(work, math.inf)
    for run in work.values():
        run()
    started = time.perf_counter()
    for turn in range(REPEATS):
        if turn > 1 and time.perf_counter() - started > LIMIT:
            break
        for name, run in work.items():
            _wait(device)
            begun = time.perf_counter()
            run()
            _wait(device)
            best[name] = min(best[name], time.perf_counter() - begun)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def save(result: Roofline, path: Path) -> None:
    """Write a result."""
    path.write_text(json.dumps({"layout": LAYOUT, **dataclasses.asdict(result)}, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Roofline:
    """Read a result.

    Raises:
        ConfigError: the file is no result of this layout.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.pop("layout", None) != LAYOUT:
            raise ConfigError(f"{path} is no result of specdec roofline: its layout is not {LAYOUT!r}")
        passes = tuple(Pass(**{**row, "work": Work(**row["work"])}) for row in data.pop("passes"))
        machine, sizes = Machine(**data.pop("machine")), Sizes(**data.pop("sizes"))
        result = Roofline(data.pop("provenance"), machine, sizes, passes, **data)
        result.costs  # noqa: B018 - there must be passes to make a line of
        return result
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is no result of specdec roofline: {error}") from error
