"""``specdec audit``: does speculation change anything, on this model and this machine, or on that server?"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from specdec.cli import render
from specdec.cli.options import ModelOptions, command, option
from specdec.config import ConfigError

if TYPE_CHECKING:
    from specdec.audit.report import Check, Report
    from specdec.models.base import Model

_SERVER = "Server"

STYLES = {"passed": "green", "failed": "bold red", "measured": "blue", "not reached": "yellow", "left out": "dim"}
VERDICTS = {"exact": "bold green", "different": "bold red", "inconclusive": "bold yellow"}

FOR_SERVERS = frozenset({"url", "api_key", "against", "against_key", "minutes", "max_tokens", "json", "html", "model"})
"""Options that an audit of a server has a use for."""


@command
def audit(
    ctx: typer.Context,
    minutes: Annotated[
        float, typer.Option(help="Time that the audit may take; what it does not reach is left out by name.")
    ] = 2,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 24,
    text: Annotated[Path | None, typer.Option(help="Text to measure the likelihood on, instead of the one that ships.")] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything that was found.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots.")] = None,
    model: ModelOptions = ModelOptions(),  # noqa: B008 - replaced by one option per field
    url: Annotated[
        str | None, option(_SERVER, help="Audit a server with OpenAI's routes, such as http://host:port/v1.")
    ] = None,
    api_key: Annotated[str | None, option(_SERVER, help="Its key.", envvar="SPECDEC_API_KEY")] = None,
    against: Annotated[str | None, option(_SERVER, metavar="URL", help="Another server, which must answer alike.")] = None,
    against_key: Annotated[str | None, option(_SERVER, help="The other server's key.")] = None,
) -> None:
    """Check that speculation changes no token here, and that the check would have noticed.

    Exit code 0: no difference was found; 1: one was; 2: there is no verdict, since something that must be checked
    could not run or the time was too short. docs/audit.md says what is tested and what that shows.
    """
    for file, name in ((json, "--json"), (html, "--html")):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise ConfigError(f"{name}: {file} cannot be written: it is a folder, or its folder does not exist")
    started = time.perf_counter()
    if url is not None:
        _refuse(ctx, lambda name: name not in FOR_SERVERS, "has no effect on the audit of a server (--url)")
        asked_for = model.model if _given(ctx, "model") else None
        report = _audit_server(asked_for, (url, api_key), (against, against_key), minutes, max_tokens)
    else:
        _refuse(ctx, lambda name: name in ("against", "against_key"), "needs --url")
        report = _audit_model(model, minutes, max_tokens, text)
    _show(report, time.perf_counter() - started)
    if json is not None:
        from specdec.audit.report import save

        save(report, json)
    if html is not None:
        from specdec.audit import html as page

        page.save(report, html)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def _audit_model(options: ModelOptions, minutes: float, max_tokens: int, text: Path | None) -> Report:
    from specdec.audit.session import Plan
    from specdec.audit.session import audit as run

    plan = Plan(minutes, max_tokens, text)
    llm = options.load(progress=True, self_test=False)  # the audit has its own

    def in_fp32() -> Model:
        from specdec.models.load import load_model
        from specdec.models.source import resolve

        source = resolve(options.model, revision=options.revision)
        return load_model(source, "fp32", llm.kernels, llm.engine.model.device)

    with _progress(minutes) as told:
        return run(llm, plan, in_fp32, told, functools.partial(options.load, progress=False, self_test=False))


def _audit_server(
    name: str | None, one: tuple[str, str | None], another: tuple[str | None, str | None], minutes: float, max_tokens: int
) -> Report:
    """Addresses with their keys."""
    from specdec.audit.client import Server
    from specdec.audit.server import audit as run

    url, key = another
    with Server(*one, name) as server, _progress(minutes) as told:
        if url is None:
            return run(server, None, minutes, max_tokens, told)
        with Server(url, key, name) as other:
            return run(server, other, minutes, max_tokens, told)


@contextmanager
def _progress(minutes: float) -> Iterator[Any]:
    """A bar on stderr that is gone afterwards: time spent, and what is being checked. Failures stay."""
    started = time.monotonic()
    columns = (TextColumn("{task.description:28.28}"), BarColumn(24), TimeElapsedColumn(), TextColumn("{task.fields[found]}"))
    counts = {"passed": 0, "failed": 0}
    with Progress(*columns, console=render.notes(), transient=True) as bar:
        running = bar.add_task("loading", total=60 * minutes, found="")

        def told(part: str, check: Check | None) -> None:
            if check is not None and check.status in counts:
                counts[check.status] += 1
            if check is not None and check.status == "failed":
                bar.console.print(f"{part}: {check.name}: {check.summary}", style="red")
            found = f"{counts['passed']} passed" + (f", {counts['failed']} failed" if counts["failed"] else "")
            bar.update(running, completed=time.monotonic() - started, description=part, found=found)

        yield told


def _show(report: Report, seconds: float) -> None:
    """What was found, section by section: failures in full, passed checks in one line each."""
    from specdec.audit.report import TITLES

    console = render.out()
    subject = report.subject
    console.print(", ".join(_words(value) for name, value in subject.items() if name != "kind"), style="bold")
    for section in report.sections:
        console.print(Text("\n" + TITLES[section], style="italic"))
        table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column()
        for check in report.of(section):
            table.add_row(Text(check.status, style=STYLES[check.status]), f"{check.name}: {check.summary}")
        console.print(table, soft_wrap=False)
    for note in report.notes:
        console.print(Text("\n" + note, style="dim"), soft_wrap=False)
    console.print(
        Text(f"\n{report.verdict.upper()} ", style=VERDICTS[report.verdict]).append(f"({seconds:.0f} s)", style="dim")
    )
    console.print(report.statement)


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


def _given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse(ctx: typer.Context, useless: Any, why: str) -> None:
    """Options that would have no effect are errors."""
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if useless(name) and _given(ctx, name):
            raise ConfigError(f"{parameter.opts[0]} {why}")
