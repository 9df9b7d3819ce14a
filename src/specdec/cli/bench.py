"""``specdec bench``: how fast speculation makes this model on this machine, and what two measurements differ in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specdec.cli import bench_tables, render
from specdec.cli.options import ModelOptions, command, given, writable
from specdec.config import ConfigError, SamplingParams

if TYPE_CHECKING:
    from specdec.bench.prompts import Prompt
    from specdec.bench.result import Report
    from specdec.llm import LLM

FAILED = 1


@command
def bench(
    ctx: typer.Context,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines (perhaps .gz) with prompt, messages, turns or text, and id, task; HumanEval's too."),
    ] = None,
    tasks: Annotated[list[str] | None, typer.Option(help="Only these tasks, joined by commas; repeatable.")] = None,
    limit: Annotated[int | None, typer.Option(help="At most this many prompts, taken from the tasks in turn.")] = None,
    temperature: Annotated[
        list[str] | None, typer.Option("--temperature", "-t", help="One or several, joined by commas; repeatable.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 1,
    repeats: Annotated[int, typer.Option(help="Turns; a prompt's median over them counts.")] = 4,
    seed: Annotated[int, typer.Option(help="Same seed, same tokens.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Always emit the most tokens.")] = False,
    model: ModelOptions = ModelOptions(),  # noqa: B008 - replaced by one option per field
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write every run and the summary.")] = None,
) -> None:
    """Measure the engine with speculation off and on, in turns, over prompts of several tasks.

    The tokens of all runs of a prompt must be the same: if speculation changed one, the exit code is 1 (rules of --acceptance
    that decide by chance may change them above temperature 0). A smaller --limit or
    --repeats takes less time. `specdec bench compare A.json B.json` puts two results side by side.
    """
    if ctx.invoked_subcommand:
        _refuse_options(ctx)
        return
    from specdec.bench import prompts as files

    path = prompts or files.DEFAULT
    chosen = files.select(files.load(path), _words(tasks), limit)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos)
    writable("--json", json)
    report = _measure(model, chosen, _numbers(temperature), params, concurrency, repeats)
    console = render.out()
    for table in bench_tables.tables(report):
        console.print(table, soft_wrap=False)
    if json is not None:
        from specdec.bench.result import save

        save(report, json)


@command
def compare(
    a: Annotated[Path, typer.Argument(help="A result file.")],
    b: Annotated[Path, typer.Argument(help="Another one, of this engine or of another program.")],
) -> None:
    """Put two result files side by side: the speed of B over that of A, by mode and task.

    Modes of the same name are compared; where there is none, every mode of B with the fastest of A.
    """
    from specdec.bench.compare import differences, pairs
    from specdec.bench.result import load

    first, second = load(a), load(b)
    found = pairs(first, second)
    if not found:
        raise ConfigError(f"{a} and {b} have no task at the same temperature in common")
    for line in differences(first, second):
        render.notes().print(f"warning: not measured alike: {line}", style="yellow")
    for part in bench_tables.ratios(found, a.name, b.name):
        render.out().print(part, soft_wrap=False)


def _measure(
    model: ModelOptions,
    prompts: list[Prompt],
    temperatures: list[float],
    params: SamplingParams,
    concurrency: int,
    repeats: int,
) -> Report:
    from specdec.bench.run import Changed, Plan, measure

    plan = Plan(tuple(temperatures), params, concurrency, repeats)
    llm = model.load(progress=True)
    try:
        with _progress(plan.n_requests(prompts)) as served:
            return measure(llm, prompts, plan, served)
    except Changed as error:
        typer.echo(f"FAILED: {error}. {_why(llm)}", err=True)
        raise typer.Exit(FAILED) from error


def _why(llm: LLM) -> str:
    invariance = llm.engine.invariance
    if invariance is not None and not invariance.exact:
        return f"The self-test had found that rows are {invariance.describe()}"
    return "Speculation must never do this: please report it"


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Prompt], None]]:
    """A bar on stderr that is gone afterwards; the function given is told of each request served."""
    columns = (TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=render.notes(), transient=True) as bar:
        running = bar.add_task("warming up", total=total)
        yield lambda prompt: bar.update(running, advance=1, description=prompt.id)


def _words(texts: list[str] | None) -> list[str]:
    """What is named in options that may be repeated, each with several names joined by commas."""
    return [word.strip() for text in texts or () for word in text.split(",") if word.strip()]


def _numbers(texts: list[str] | None) -> list[float]:
    """Temperatures; plain greedy decoding where none is given."""
    try:
        return [float(word) for word in _words(texts)] or [0.0]
    except ValueError as error:
        raise ConfigError(f"--temperature needs numbers joined by commas: {error}") from None


def _refuse_options(ctx: typer.Context) -> None:
    """Options before a verb of ``bench`` would have no effect."""
    for option in given(ctx).values():
        raise ConfigError(f"{option} has no effect on specdec bench {ctx.invoked_subcommand}: leave it out")


app = typer.Typer(name="bench", callback=bench, invoke_without_command=True)
app.command()(compare)
