"""``specdec plan``: how much drafting pays, from acceptance and the cost of passes."""

from __future__ import annotations

import dataclasses
import json as js
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from specdec.cli import figures, plan_tables, render
from specdec.cli.options import TargetOptions, command, given, option, writable
from specdec.config import ConfigError
from specdec.plan import Prices, free

if TYPE_CHECKING:
    from specdec.bench.planning import Checked, Plan
    from specdec.draft.shape import Accuracy
    from specdec.runner.cost import Costs

_ACCEPTANCE, _COSTS, _MEMORY = "Acceptance (one of alpha, acceptance, bench)", "Costs", "Memory of keys and values"


@dataclass(frozen=True)
class AcceptanceOptions:
    """How often drafts are right."""

    alpha: Annotated[float | None, option(_ACCEPTANCE, help="Of every drafted token, where those before it were right.")] = None
    gamma: Annotated[int | None, option(_ACCEPTANCE, help="Tokens drafted at a time, to see what these give.")] = None
    acceptance: Annotated[
        str | None,
        option(_ACCEPTANCE, metavar="LIST", help="By depth, as 0.7,0.8; further candidates behind +, as 0.6+0.1,0.7+0.1."),
    ] = None
    bench: Annotated[
        Path | None, option(_ACCEPTANCE, metavar="FILE", help="What a result of specdec bench says, its costs included.")
    ] = None
    task: Annotated[str | None, option(_ACCEPTANCE, help="Of that result; all of them by default.")] = None
    temperature: Annotated[
        float | None, option(_ACCEPTANCE, "--temperature", "-t", help="Of that result; the first by default.")
    ] = None

    @property
    def given(self) -> bool:
        return any(value is not None for value in (self.alpha, self.acceptance, self.bench))


@dataclass(frozen=True)
class CostOptions:
    """What drafting and rows cost."""

    cost: Annotated[float | None, option(_COSTS, help="A pass of the drafter over a pass of the model.")] = None
    v: Annotated[str | None, option(_COSTS, metavar="LIST", help="Costs of passes by rows, as 1:1,2:1.1,8:2.4.")] = None
    roofline: Annotated[Path | None, option(_COSTS, metavar="FILE", help="From a result of specdec roofline.")] = None
    measure: Annotated[bool, option(_COSTS, "--measure", help="Measure them now, with a model.")] = False


@dataclass(frozen=True)
class MemoryOptions:
    """A model's keys and values."""

    kv: Annotated[str | None, option(_MEMORY, metavar="MODEL", help="A config.json, folder, .gguf, alias or hub id.")] = None
    kv_format: Annotated[str, option(_MEMORY, help="fp32, bf16, int8 or int4; fp16 and fp8 of other engines.")] = "bf16"
    tokens: Annotated[int | None, option(_MEMORY, help="Of each sequence; the model's context by default.")] = None


@command
def plan(
    ctx: typer.Context,
    acceptance: AcceptanceOptions = AcceptanceOptions(),
    costs: CostOptions = CostOptions(),
    target: TargetOptions = TargetOptions(),  # noqa: B008
    memory: MemoryOptions = MemoryOptions(),
    budget: Annotated[int, typer.Option(help="Most drafted tokens of a pass, for each sequence.", min=1, max=64)] = 16,
    batch: Annotated[str, typer.Option(metavar="LIST", help="Numbers of sequences to look at.")] = "1,2,4,8,16,32",
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the plan.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it, as .png or .svg.")] = None,
) -> None:
    """Tokens per pass, speed-up, the best length and tree, and how many sequences make drafting pointless.

    `specdec plan --alpha 0.8 --gamma 5 --cost 0.05` is the textbook's case, in which rows are free. With --bench, the plan of
    each task is compared with the speed that was measured.
    """
    from specdec.bench import planning
    from specdec.bench.memory import Memory

    _refuse(given(ctx))
    writable("--json", json)
    draw = None if plot is None else figures.drawer(plot)
    batches = _batches(batch)
    facts: dict[str, Any] = {}
    if not acceptance.given and memory.kv is None:
        raise ConfigError("nothing to plan: give --alpha, --acceptance or --bench, or --kv for memory alone")
    if acceptance.given:
        made, rows, checked = _plan(acceptance, costs, target, budget, batches)
        facts |= planning.as_dict(made, rows, checked)
        _print(plan_tables.plan(made, acceptance.gamma, rows, checked))
        if draw is not None:
            draw(lambda: figures.plan(made, rows, checked))
    if memory.kv is not None:
        kept = Memory.of(memory.kv, memory.kv_format, memory.tokens)
        facts["memory"] = kept.as_dict(batches)
        _print(plan_tables.memory(kept, batches))
    if json is not None:
        json.write_text(js.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _print(parts: Iterable[RenderableType]) -> None:
    for part in parts:
        render.out().print(part, soft_wrap=False)


_NEEDS: dict[str, tuple[str, ...]] = {
    "gamma": ("alpha",),
    **dict.fromkeys(("task", "temperature"), ("bench",)),
    **dict.fromkeys((f.name for f in dataclasses.fields(TargetOptions)), ("measure",)),
    **dict.fromkeys(("kv_format", "tokens"), ("kv",)),
    **dict.fromkeys(("cost", "v", "roofline", "measure", "budget", "plot"), ("alpha", "acceptance", "bench")),
}
"""Options that have no effect unless one of some others is there."""

_ONE_OF = ("alpha", "acceptance", "bench"), ("v", "roofline", "measure"), ("cost", "bench")
"""Options that contradict each other: a result of specdec bench knows what drafting took."""


def _refuse(written: Mapping[str, str]) -> None:
    """Raise where options on the command line have no effect or contradict each other."""
    for name, needs in _NEEDS.items():
        if name in written and not any(need in written for need in needs):
            raise ConfigError(f"{written[name]} has no effect without {' or '.join(f'--{need}' for need in needs)}")
    for group in _ONE_OF:
        if len(several := [written[name] for name in group if name in written]) > 1:
            raise ConfigError(f"{' and '.join(several)} contradict each other: give one of them")


def _plan(
    acceptance: AcceptanceOptions, costs: CostOptions, target: TargetOptions, budget: int, batches: list[int]
) -> tuple[Plan, Costs | None, list[Checked]]:
    """The plan, the costs of passes that it rests on, None where rows are free, and how far it agrees with measured runs."""
    from specdec.bench import planning

    rows = _rows(costs, target)
    if acceptance.bench is not None:
        from specdec.bench.result import ALL, load

        report = load(acceptance.bench)
        seen = planning.observe(report, acceptance.task or ALL, acceptance.temperature)
        rows = rows or planning.costs_of(report)
        prices = Prices(ask=seen.ask, host=seen.host, cost=rows.seconds)
        accuracy: Accuracy = [(alpha,) for alpha in seen.acceptance]
        checked = planning.check(report, rows)
    else:
        prices = Prices(draft=_share("--cost", costs.cost or 0.0, 1e6), cost=free if rows is None else rows.seconds)
        if acceptance.acceptance is not None:
            accuracy = _accuracy(acceptance.acceptance)
        else:
            accuracy = [(_share("--alpha", acceptance.alpha or 0.0, 1.0),)] * budget
        checked = []
    if acceptance.gamma is not None and not 0 <= acceptance.gamma <= budget:
        raise ConfigError(f"--gamma must be in [0, {budget}], which is the --budget, got {acceptance.gamma}")
    return planning.make(accuracy, prices, budget=budget, batches=batches), rows, checked


def _rows(costs: CostOptions, target: TargetOptions) -> Costs | None:
    """What passes cost, where an option tells."""
    from specdec.runner.cost import Costs

    if costs.v is not None:
        try:
            return Costs({int(m): float(v) for m, _, v in (pair.partition(":") for pair in costs.v.split(","))}, fixed=True)
        except ValueError as error:
            raise ConfigError(f"--v needs rows and costs above 0, such as 1:1,2:1.1,8:2.4: {error}") from None
    if costs.roofline is not None:
        from specdec.bench.roofline import load

        return load(costs.roofline).costs
    if costs.measure:
        from specdec.runner.measure import SIZES, WIDE, measure

        llm = target.load()
        found, steady = measure(llm.engine.model, llm.kernels, [*SIZES, WIDE])
        if not steady:
            render.notes().print("warning: other programs ran meanwhile: the costs are not steady", style="yellow")
        return found
    return None


def _share(name: str, value: float, most: float) -> float:
    if not 0 <= value <= most:
        raise ConfigError(f"{name} must be in [0, {most:g}], got {value:g}")
    return value


def _accuracy(text: str) -> Accuracy:
    """By depth and rank."""
    try:
        accuracy = [[float(word) for word in depth.split("+")] for depth in text.split(",")]
    except ValueError:
        raise ConfigError(f"--acceptance needs numbers such as 0.7,0.8 or 0.6+0.1,0.7+0.1, got {text!r}") from None
    for depth, ranks in enumerate(accuracy, start=1):
        if not all(0 <= share <= 1 for share in ranks) or sum(ranks) > 1 + 1e-9:
            raise ConfigError(f"--acceptance at depth {depth} must be shares of 1 together at most, got {ranks}")
    return accuracy


def _batches(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"--batch needs numbers of sequences joined by commas, such as 1,4,16, got {text!r}")
    return found
