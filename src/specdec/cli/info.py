"""``specdec info``: what would run, and whether it is exact here."""

from __future__ import annotations

import dataclasses
import json
import platform
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from specdec.cli import render
from specdec.cli.options import GenerationConfig, ModelOptions, command
from specdec.config import AUTO, BLOCK_SIZE, ConfigError

if TYPE_CHECKING:
    from specdec.llm import LLM


@command
def info(
    name: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Same as --model.")] = None,
    model: ModelOptions = ModelOptions(),  # noqa: B008 - replaced by one option per field
    generation_config: GenerationConfig = AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")] = False,
) -> None:
    """Load a model and show its precision, memory and kernels, and whether rows are exact here."""
    if name is not None:
        if model.model not in (name, ModelOptions.model):
            raise ConfigError(f"two models are given, {name!r} and --model {model.model!r}: give one")
        model = dataclasses.replace(model, model=name)
    facts = _facts(model.load(progress=not as_json, generation_config=generation_config))
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False, allow_nan=False))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    for label, value in _lines(facts):
        table.add_row(label, value)
    render.out().print(table, soft_wrap=False)


def _facts(llm: LLM) -> dict[str, Any]:
    import psutil
    import torch

    from specdec import kernels
    from specdec.runner.measure import cpu_name

    engine = llm.engine
    shape, invariance, device = engine.model.shape, engine.invariance, engine.model.device
    return {
        **render.run_json(llm),
        "layers": shape.n_layers,
        "vocabulary": shape.vocab_size,
        "context": engine.max_len,
        "chat_template": llm.tokenizer.has_chat_template,
        "generation_defaults": dict(llm.generation_defaults),
        "invariance": None
        if invariance is None
        else {"exact": invariance.exact, "differences": invariance.differences, "seconds": invariance.seconds},
        "invariance_text": "not tested" if invariance is None else invariance.describe(),
        "kernels_text": kernels.describe(device),
        "drafter": next((drafter.card for drafter in engine.drafters if drafter.card), None),
        "weights_bytes": engine.model.n_bytes,
        "pool_bytes": engine.pool.n_bytes,
        "pool_tokens": engine.pool.n_blocks * BLOCK_SIZE,
        "resident_bytes": psutil.Process().memory_info().rss,
        "machine": {
            "cpu": cpu_name(),
            "cores": psutil.cpu_count(logical=False),
            "threads": torch.get_num_threads(),
            "memory_bytes": psutil.virtual_memory().total,
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    machine, nodes = facts["machine"], facts["max_nodes"]
    speculation = f"{', '.join(facts['speculation'])}, up to {nodes} tokens a pass" if nodes else "off"
    size = f"{facts['layers']} layers, vocabulary {facts['vocabulary']:,}, context {facts['context']:,}"
    system = f"{machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}"
    return [
        ("model", f"{facts['model']}: {size}"),
        ("precision", f"{facts['precision']}, weights {_megabytes(facts['weights_bytes'])}"),
        ("speculation", ", ".join(filter(None, (speculation, render.accepted_by(facts))))),
        *_drafter(facts["drafter"]),
        ("sampling defaults", render.defaults(facts["generation_defaults"]) or "none of the model's own"),
        ("cost of rows", _costs(facts["pass_seconds"], facts["pass_costs"])),
        ("exactness", facts["invariance_text"]),
        ("cache", f"{facts['pool_tokens']:,} tokens in {facts['kv_format']}, {_megabytes(facts['pool_bytes'])}"),
        ("resident", _megabytes(facts["resident_bytes"])),
        ("kernels", facts["kernels_text"]),
        ("machine", f"{machine['cpu']}, {system}"),
        ("software", f"Python {machine['python']}, torch {machine['torch']}"),
    ]


def _drafter(card: dict[str, Any] | None) -> list[tuple[str, str]]:
    """What a trained drafter is, how it was made and what was measured of it."""
    if card is None:
        return []
    counted = "" if card["parameters"] is None else f"{card['parameters']:,} parameters, "
    size = f"{counted}{_megabytes(card['bytes'])} with what it keeps"
    known = {label: _figures(card[label]) for label in ("provenance", "measured")}
    return [
        ("drafter", f"{card['name']}: {card['kind']}, {size}, drafts {card['vocabulary']:,} tokens"),
        *((f"  {label}", ", ".join(figures)) for label, figures in known.items() if figures),
    ]


def _figures(values: dict[str, Any], before: str = "") -> list[str]:
    """Names and values, those of inner tables too; lists are for --json."""
    figures = []
    for name, value in values.items():
        if isinstance(value, dict):
            figures += _figures(value, f"{before}{name} ")
        elif isinstance(value, str | int | float):
            figures.append(f"{before}{name} {value:.4g}" if isinstance(value, float) else f"{before}{name} {value}")
    return figures


def _costs(seconds: dict[int, float] | None, relative: dict[int, float] | None) -> str:
    """Of the narrowest pass in milliseconds, of the others relative to it."""
    if not seconds or not relative:
        return "not measured"
    (rows, first), *_ = seconds.items()
    others = ", ".join(f"v({m}) = {v:.2f}" for m, v in relative.items() if m != rows)
    return f"a pass of {rows} takes {first * 1e3:.1f} ms; {others}"


def _megabytes(n: int) -> str:
    return f"{n / 1e6:,.0f} MB"
