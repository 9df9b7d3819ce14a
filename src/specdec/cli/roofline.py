"""``specdec roofline``: what bounds a pass on this machine, and how wide a burst is nearly free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from specdec.cli import figures, render
from specdec.cli.options import TargetOptions, command, refuse_beside, writable

if TYPE_CHECKING:
    from specdec.bench.roofline import Roofline


@command
def roofline(
    ctx: typer.Context,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Show an earlier result (--json) instead of measuring.")
    ] = None,
    target: TargetOptions = TargetOptions(),  # noqa: B008 - replaced by one option per field
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it, as .png or .svg.")] = None,
) -> None:
    """Measure memory and arithmetic of this machine, and place decoding, verification and prompts under the two.

    Nothing else should run meanwhile. `specdec plan --roofline FILE` takes the costs of passes from a result.
    """
    from specdec.bench import roofline as bench

    writable("--json", json)
    draw = None if plot is None else figures.drawer(plot)
    if source is not None:
        refuse_beside(ctx, "--from", TargetOptions)
        result = bench.load(source)
    else:
        llm = target.load()
        with render.notes().status("measuring"):
            result = bench.measure_roofline(llm)
        if not result.steady:
            render.notes().print("warning: other programs ran meanwhile: the figures are not steady", style="yellow")
    for part in tables(result):
        render.out().print(part, soft_wrap=False)
    if json is not None:
        bench.save(result, json)
    if draw is not None:
        draw(lambda: figures.roofline(result))


def tables(result: Roofline) -> Iterator[RenderableType]:
    """The machine, the passes, and what follows."""
    from specdec.bench.roofline import NEARLY
    from specdec.roofline import widest_within

    told, machine, sizes = result.provenance, result.machine, result.sizes
    yield Text(f"{told['model']}, {told['precision']}, {told['kernels']}, {told['threads']} threads, {told['cpu']}\n")
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    facts.add_column(style="bold")
    facts.add_column()
    facts.add_row("memory", f"{machine.bytes_per_second / 1e9:.1f} GB/s")
    facts.add_row("arithmetic", f"{machine.operations_per_second / 1e9:,.0f} G operations/s, the model's products, many rows")
    facts.add_row("ridge", f"{machine.ridge:.1f} operations a byte")
    facts.add_row("weights", f"{sizes.weight_bytes / 1e6:,.1f} MB; keys and values {sizes.kv_bytes:,} bytes a token")
    yield facts

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("pass", "rows", "cached", "ops/byte", "ms", "bound", "share", "v(M)", "bound by"):
        table.add_column(name, justify="left" if name in ("pass", "bound by") else "right")
    first = result.costs.seconds(1)
    for one in result.passes:
        share = one.share(machine)
        table.add_row(
            one.kind,
            str(one.rows),
            str(one.cached),
            f"{one.intensity:.1f}",
            f"{one.seconds * 1e3:.2f}",
            f"{one.seconds * share * 1e3:.2f}",
            f"{share:.0%}",
            f"{one.seconds / first:.2f}" if one.kind != "prefill" else "",
            "memory" if one.intensity < machine.ridge else "arithmetic",
        )
    yield ""
    yield table
    cached, widest = result.passes[0].cached, max(one.rows for one in result.passes)
    ideal = widest_within(machine, sizes, cached, widest)
    yield ""
    rows = result.nearly_free
    yield Text(
        f"nearly free: {'no second row' if rows == 1 else f'up to {rows} rows'}, at {NEARLY:g} times a pass of one at most.\n"
        f"By the two rates alone, {'more than ' if ideal == widest else ''}{ideal} rows are bound by memory."
    )
