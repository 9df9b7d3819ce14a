"""What ``specdec bench`` prints, within eighty columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from specdec.bench.result import ALL
from specdec.cli.render import accepted_by

if TYPE_CHECKING:
    from specdec.bench.compare import Pair
    from specdec.bench.result import Report, Summary

DEPTHS = 8
"""Depths whose acceptance is shown; the file has them all."""

NOTHING = "–"


def tables(report: Report) -> Iterator[RenderableType]:
    """Speed, waiting times and what is behind them, for each temperature."""
    yield _heading(report)
    for temperature in report.temperatures:
        each = " of each request" if report.settings["concurrency"] > 1 else ""
        yield _title(f"tokens per second{each}, temperature {temperature:g}")
        yield _speed(report, temperature)
        yield _title("milliseconds to the first token, and between tokens")
        yield _waiting(report, temperature)
        yield ""
        yield _drafts(report, temperature)
    yield ""
    yield _facts(report)


def ratios(found: list[Pair], a: str, b: str) -> Iterator[RenderableType]:
    """One row per mode and task of two results."""
    others = dict.fromkeys(pair.a.mode for pair in found if pair.a.mode != pair.b.mode)
    yield _title(f"a: {a}" + (f", its fastest mode: {', '.join(others)}" if others else ""))
    yield Text(f"b: {b}; ratios are b over a", style="italic")
    table = _table("mode", "task")
    for name in ("tokens/s a", "b", "ratio", "decoding", "1st token"):
        table.add_column(name, justify="right")
    several = len({pair.a.temperature for pair in found}) > 1
    section = None
    for pair in found:
        mode = pair.b.mode + (f" T={pair.a.temperature:g}" if several else "")
        if section not in (None, mode):
            table.add_section()
        speed = f"{pair.a.tokens_per_second:.1f}", f"{pair.b.tokens_per_second:.1f}", f"{pair.speed:.2f}"
        table.add_row(
            mode if section != mode else "",
            pair.a.task,
            *speed,
            number(pair.decoding),
            number(pair.first_token),
            style=_style(pair.a),
        )
        section = mode
    yield table


def _heading(report: Report) -> Text:
    facts, settings = report.provenance, report.settings
    n_prompts = sum(row.prompts for row in report.summary if row.task == ALL and row.mode == report.modes[0]) // len(
        report.temperatures
    )
    text = Text(f"{facts['model']}, {facts['precision']}, {facts['kernels']}, {facts['threads']} threads, {facts['cpu']}\n")
    text.append(
        f"{n_prompts} prompts, up to {settings['max_tokens']} tokens, {settings['concurrency']} in flight, "
        f"repeats {settings['repeats']}, speculation {', '.join(settings['speculation'])}\n"
    )
    if (rule := accepted_by(settings)) and any(report.temperatures):
        return text.append(f"{rule}: sampled tokens are not plain decoding's", style="bold yellow")
    return text.append(f"identical: all {len(report.runs)} runs gave the tokens of plain decoding", style="bold green")


def _speed(report: Report, temperature: float) -> Table:
    table = _table("task", "n")
    for name in ("off", "on", "faster", "decode off", "on", "S", "τ", "S/τ"):
        table.add_column(name, justify="right")
    for off, on in _rows(report, temperature):
        table.add_row(
            on.task,
            str(on.prompts),
            number(off.tokens_per_second, 1),
            number(on.tokens_per_second, 1),
            number(on.speedup),
            number(off.decode_tokens_per_second, 1),
            number(on.decode_tokens_per_second, 1),
            number(on.speedup_decoding),
            number(on.tau),
            number(on.speedup_decoding / on.tau if on.speedup_decoding and on.tau else None),
            style=_style(on),
        )
    return table


def _waiting(report: Report, temperature: float) -> Table:
    table = _table("task")
    for name in ("first off", "on", "p50 off", "on", "p99 off", "on"):
        table.add_column(name, justify="right")
    for off, on in _rows(report, temperature):
        values = (
            (off.first_token_seconds, on.first_token_seconds),
            (off.gap_p50, on.gap_p50),
            (off.gap_p99, on.gap_p99),
        )
        cells = [number(None if value is None else value * 1e3, 1) for both in values for value in both]
        table.add_row(on.task, *cells, style=_style(on))
    return table


def _drafts(report: Report, temperature: float) -> Table:
    """Acceptance by depth, the worst task, and all requests together where several are in flight."""
    grid = _facts_grid()
    rows = [on for _, on in _rows(report, temperature)]
    total, by_task = rows[-1], [row for row in rows[:-1] if row.speedup is not None]
    depths = total.acceptance_by_depth or ()
    more = "" if len(depths) <= DEPTHS else f" … to depth {len(depths)}"
    grid.add_row("accepted by depth", (" ".join(f"{share:.2f}" for share in depths[:DEPTHS]) + more) or NOTHING)
    if by_task:
        worst = min(by_task, key=lambda row: row.speedup or 0.0)
        grid.add_row("worst task", f"{worst.task}, {number(worst.speedup)} times the speed of off")
    if report.settings["concurrency"] > 1:
        off, on = (report.throughput(mode, temperature) for mode in report.modes)
        if off and on:
            grid.add_row("all together", f"{off:.1f} tokens/s off, {on:.1f} on: {on / off:.2f} times as fast")
    return grid


def _facts(report: Report) -> Table:
    grid = _facts_grid()
    context = report.settings.get("context")  # older results do not tell
    costs = "  ".join(f"{rows}: {cost:.2f}" for rows, cost in report.v.items())
    grid.add_row("v(M), cost of M rows", costs + (f", at {context} cached tokens" if context else ""))
    if report.one_row:
        facts, over = report.one_row, report.over_bound
        bound = f", {over:.2f} times the reading of its {facts['weights_bytes'] / 1e6:.0f} MB of weights" if over else ""
        grid.add_row("pass of one row", f"{facts['seconds'] * 1e3:.2f} ms{bound}")
    memory = report.peak_memory_bytes
    grid.add_row("peak memory", "not told here" if memory is None else f"{memory / 1e6:,.0f} MB, both engines together")
    return grid


def _rows(report: Report, temperature: float) -> list[tuple[Summary, Summary]]:
    """Per task the rows of both modes, the total last."""
    both = [[report.row(mode, task, temperature) for mode in report.modes] for task in report.tasks]
    return [(off, on) for off, on in both if off and on]


def _title(text: str) -> Text:
    return Text("\n" + text, style="italic")


def _table(*labels: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for label in labels:
        table.add_column(label)
    return table


def _facts_grid() -> Table:
    grid = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(style="bold")
    grid.add_column()
    return grid


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash where it is not known."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def _style(row: Summary) -> str:
    return "bold" if row.task == ALL else ""
