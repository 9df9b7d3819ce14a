"""What ``specdec plan`` prints, within eighty columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree as Drawing

from specdec.types import ROOT

if TYPE_CHECKING:
    from specdec.bench.memory import Memory
    from specdec.bench.planning import Checked, Plan, Tree
    from specdec.runner.cost import Costs


def plan(made: Plan, gamma: int | None, costs: Costs | None, checked: Sequence[Checked]) -> Iterator[RenderableType]:
    """What was asked first, then the lengths, the tree, the batch, and what was measured."""
    if gamma is not None:
        asked = made.chains[gamma]
        yield Text(f"{gamma} drafted: {asked.tokens:.2f} tokens a pass, {asked.speedup:.2f} times the speed", style="bold")
    best = made.best
    if best.depth:
        yield Text(f"best length: {best.depth}, {best.tokens:.2f} tokens a pass, {best.speedup:.2f} times the speed")
    else:
        yield Text("best length: 0, for drafting does not pay here")
    if costs is None:
        yield Text("rows are free in this plan: --v, --roofline, --measure or --bench says what they cost", style="dim")
    else:
        points = "  ".join(f"{rows}: {cost:.2f}" for rows, cost in costs.relative().items())
        yield Text(f"v(M), cost of M rows: {points}", style="dim")
    yield ""
    yield _chains(made)
    if made.tree is not None:
        yield ""
        yield from _tree(made.tree)
    if costs is not None:
        yield ""
        yield _throttle(made)
        if made.stops is None:
            yield Text("drafting pays at every number of sequences that was looked at")
        else:
            yield Text(f"drafting stops paying at {made.stops} sequences")
    if checked:
        yield ""
        yield _checked(checked)


def memory(kept: Memory, batches: Sequence[int]) -> Iterator[RenderableType]:
    """Bytes for a token, and for whole sequences."""
    yield ""
    shared = f", {kept.unshared:g} query heads to a key head" if kept.unshared > 1 else ""
    yield Text(f"keys and values of {kept.model}, {kept.kv_format}:\n{kept.per_token:,} bytes a token{shared}")
    table = _table("sequences", "tokens each", "memory")
    for n in batches:
        table.add_row(str(n), f"{kept.tokens:,}", _size(n * kept.tokens * kept.per_token))
    yield table


def _chains(made: Plan) -> Table:
    table = _table("drafted", "chance of the last", "tokens a pass", "time of a step", "speed-up")
    for before, chain in zip([None, *made.chains], made.chains, strict=False):
        table.add_row(
            str(chain.depth),
            "" if before is None else f"{chain.tokens - before.tokens:.3f}",
            f"{chain.tokens:.2f}",
            f"{chain.ratio:.2f}",
            f"{chain.speedup:.2f}",
            style="bold" if chain is made.best else "",
        )
    return table


def _tree(tree: Tree) -> Iterator[RenderableType]:
    """Which candidates of which nodes: the best of a node is its candidate 1."""
    shape = tree.shape
    yield Text(f"best tree: {len(shape)} nodes, {tree.tokens:.2f} tokens a pass, {tree.speedup:.2f} times the speed")
    places = {ROOT: Drawing("pending token")}
    for node, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
        places[node] = places[parent].add(f"candidate {rank + 1}")
    if len(shape):
        yield places[ROOT]


def _throttle(made: Plan) -> Table:
    table = _table("sequences", "best length", "speed-up", "one token pays from α")
    for row in made.throttle:
        table.add_row(str(row.batch), str(row.depth), f"{row.speedup:.2f}", f"{row.least:.2f}" if row.least <= 1 else "never")
    return table


def _checked(checked: Sequence[Checked]) -> Table:
    table = _table("task", "temperature", "τ", "speed-up planned", "measured", "difference")
    for row in checked:
        figures = f"{row.temperature:g}", f"{row.tokens:.2f}", f"{row.expected:.2f}", f"{row.measured:.2f}", f"{row.error:+.1%}"
        table.add_row(row.task, *figures)
    return table


def _table(*labels: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for i, label in enumerate(labels):
        table.add_column(label, justify="right" if i else "left")
    return table


def _size(n: int) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"
