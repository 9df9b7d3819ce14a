"""The parts of docs/guide.md that come from results: its tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from specdec.bench import planning, roofline
from specdec.bench.result import load
from specdec.cli import figures
from specdec.plan import Prices
from specdec.runner.cost import Costs

ROOFLINE, BENCH = "roofline.json", "specdec.json"
BATCHES = [1, 2, 4, 8, 16, 32]
BUDGET = 16
ALPHA, COST = 0.8, 0.05
"""The textbook's case."""


def draw(results: Path, images: Path) -> None:
    """The figures, as the commands under them draw them."""
    made = roofline.load(results / ROOFLINE)
    figures.drawer(images / "guide-roofline.svg")(lambda: figures.roofline(made))
    book = planning.make([(ALPHA,)] * BUDGET, Prices(draft=COST), budget=BUDGET, batches=BATCHES)
    figures.drawer(images / "guide-textbook.svg")(lambda: figures.plan(book, None, []))
    plan, costs, checked = _plan(results)
    figures.drawer(images / "guide-plan.svg")(lambda: figures.plan(plan, costs, checked))


def _plan(results: Path) -> tuple[planning.Plan, Costs, list[planning.Checked]]:
    """What ``specdec plan --bench`` makes."""
    report = load(results / BENCH)
    seen, costs = planning.observe(report), planning.costs_of(report)
    prices = Prices(ask=seen.ask, host=seen.host, cost=costs.seconds)
    plan = planning.make([(alpha,) for alpha in seen.acceptance], prices, budget=BUDGET, batches=BATCHES)
    return plan, costs, planning.check(report, costs)


def _machine(results: Path) -> str:
    made = roofline.load(results / ROOFLINE)
    told, machine, sizes, first = made.provenance, made.machine, made.sizes, made.passes[0]
    return (
        f"{told['model']}, precision {told['precision']}, kernels {told['kernels']}, {told['threads']} threads, {told['cpu']} "
        f"([{ROOFLINE}](../bench/results/{ROOFLINE}), {told['date'][:10]}, `{told['command']}`):\n\n"
        "| | |\n|---|--:|\n"
        f"| bytes of all weights | {sizes.weight_bytes / 1e6:.1f} MB |\n"
        f"| bytes that memory gives in a second | {machine.bytes_per_second / 1e9:.1f} GB |\n"
        f"| so a token takes at least | {1e3 * sizes.weight_bytes / machine.bytes_per_second:.1f} ms |\n"
        f"| and takes | {1e3 * first.seconds:.1f} ms |\n"
        f"| operations for each byte | {first.intensity:.1f} |\n"
        f"| operations that the machine could do for each byte: the *ridge* | {machine.ridge:.1f} |\n"
    )


def _passes(results: Path) -> str:
    made = roofline.load(results / ROOFLINE)
    first = made.passes[0].seconds
    lines = [
        f"| {one.kind} | {one.rows} | {one.intensity:.1f} | {1e3 * one.seconds:.2f} | {one.share(made.machine):.0%} "
        f"| {one.seconds / first:.2f} | {one.seconds / first / one.rows:.2f} |\n"
        for one in made.passes
    ]
    head = "| pass | rows | operations a byte | ms | share of what the roof allows | over one row | of that, each row |\n"
    return head + "|---|--:|--:|--:|--:|--:|--:|\n" + "".join(lines)


def _free(results: Path) -> str:
    made = roofline.load(results / ROOFLINE)
    rows = made.nearly_free
    if rows == 1:
        return f"Here already two rows cost more than {roofline.NEARLY:g} times what one costs.\n"
    return f"Here bursts of up to {rows} rows cost at most {roofline.NEARLY:g} times what one costs.\n"


def _textbook(results: Path) -> str:
    """Computed, not measured."""
    book = planning.make([(ALPHA,)] * BUDGET, Prices(draft=COST), budget=BUDGET, batches=[1])
    lines = [f"| {c.depth} | {c.tokens:.2f} | {c.ratio:.2f} | {c.speedup:.2f} |\n" for c in book.chains if c.depth in range(9)]
    return "| drafted | tokens a pass | time of a step | speed-up |\n|--:|--:|--:|--:|\n" + "".join(lines)


def _throttle(results: Path) -> str:
    plan, _, _ = _plan(results)
    lines = [
        f"| {row.batch} | {row.depth} | {row.speedup:.2f} | {f'{row.least:.2f}' if row.least <= 1 else 'never'} |\n"
        for row in plan.throttle
    ]
    head = (
        "| sequences in a pass | best length | speed-up while there is a draft | one token pays from α |\n|--:|--:|--:|--:|\n"
    )
    return head + "".join(lines)


def _checked(results: Path) -> str:
    _, _, checked = _plan(results)
    told = load(results / BENCH).provenance
    lines = [
        f"| {row.task} | {row.temperature:g} | {row.tokens:.2f} "
        f"| {row.expected:.2f} | {row.measured:.2f} | {row.error:+.1%} |\n"
        for row in checked
    ]
    return (
        f"[{BENCH}](../bench/results/{BENCH}), {told['date'][:10]}, `{told['command']}`:\n\n"
        "| task | temperature | τ | speed-up planned | measured | difference |\n|---|--:|--:|--:|--:|--:|\n" + "".join(lines)
    )


PARTS: Mapping[str, Callable[[Path], str]] = {
    "machine": _machine,
    "passes": _passes,
    "free": _free,
    "textbook": _textbook,
    "throttle": _throttle,
    "checked": _checked,
}
