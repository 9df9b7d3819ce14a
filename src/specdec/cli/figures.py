"""The pictures of ``specdec roofline`` and ``specdec plan``. Matplotlib is loaded when one is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli.options import writable
from specdec.config import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from specdec.bench.planning import Checked, Plan
    from specdec.bench.roofline import Roofline
    from specdec.runner.cost import Costs

FORMATS = (".png", ".svg")

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "specdec",  # else the names inside a file are random
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
GREY, BLUE, ORANGE, GREEN = "#9aa5b1", "#1f6f8b", "#d97b29", "#4c8c4a"


def drawer(path: Path) -> Callable[[Callable[[], Figure]], None]:
    """What draws a figure and saves it, checked before anything is measured.

    Raises:
        ConfigError: the file has another ending or no folder, or matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--plot must end in {' or '.join(FORMATS)}, got {path.name}")
    writable("--plot", path)
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'specdec[bench]'") from None

    def draw(make: Callable[[], Figure]) -> None:
        with mpl.rc_context(STYLE):
            make().savefig(path, bbox_inches="tight", facecolor="white", dpi=150, metadata=_undated(path))

    return draw


def _undated(path: Path) -> dict[str, None]:
    """Metadata with which the same figures give the same file."""
    return {"Date": None} if path.suffix.lower() == ".svg" else {"Software": None}


def roofline(result: Roofline) -> Figure:
    """Passes by intensity and rate under the machine's roof, and v(M) beside what the two rates allow."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, 3.6), layout="constrained")
    roof, costs = figure.subplots(1, 2, width_ratios=(1.35, 1))
    _roof(roof, result)
    _costs(costs, result)
    return figure


def _roof(axes: Axes, result: Roofline) -> None:
    machine, passes = result.machine, result.passes
    low = min(one.intensity for one in passes) / 2
    high = 2 * max(machine.ridge, *(one.intensity for one in passes))
    corners = sorted((low, machine.ridge, high))
    axes.plot(corners, [machine.roof(x) / 1e9 for x in corners], "-", color=GREY, label="what the machine allows")
    axes.axvline(machine.ridge, color=GREY, linestyle=":", linewidth=1)
    axes.annotate(f"ridge {machine.ridge:.0f}", (machine.ridge, 0), xycoords=("data", "axes fraction"), xytext=(3, 4),
                  textcoords="offset points", color="#5f6b78", fontsize=8)  # fmt: skip
    for kind, colour in (("decode", ORANGE), ("verify", BLUE), ("prefill", GREEN)):
        some = [one for one in passes if one.kind == kind]
        axes.plot([one.intensity for one in some], [one.rate / 1e9 for one in some], "o", color=colour, label=kind)
        for one in some:
            axes.annotate(str(one.rows), (one.intensity, one.rate / 1e9), xytext=(0, -12), textcoords="offset points",
                          ha="center", fontsize=7, color=colour)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="G operations/s", title="passes by their rows")
    axes.margins(y=0.15)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _costs(axes: Axes, result: Roofline) -> None:
    from specdec.bench.roofline import NEARLY

    bursts = [one for one in result.passes if one.kind != "prefill"]
    rows, first = [one.rows for one in bursts], bursts[0].seconds
    least = [one.seconds * one.share(result.machine) for one in bursts]
    axes.plot(rows, [one.seconds / first for one in bursts], "o-", color=BLUE, label="v(M), measured")
    axes.plot(rows, [seconds / least[0] for seconds in least], "--", color=GREY, label="by the two rates alone")
    axes.plot(rows, rows, ":", color=GREY, label="M passes of one row")
    axes.axhspan(1, NEARLY, color=GREEN, alpha=0.2, linewidth=0, label=f"nearly free: to M = {result.nearly_free}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(rows, [str(m) for m in rows])
    ticks = [2**i for i in range(max(rows).bit_length()) if 2**i <= max(rows)]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(0.9, 1.2 * max(one.seconds / first for one in bursts))
    axes.set(xlabel="rows of a pass, M", ylabel="cost over one row", title="what rows cost")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")


def plan(made: Plan, costs: Costs | None, checked: Sequence[Checked]) -> Figure:
    """Speed-up over the drafted length for several batches, the throttle, and the plan beside what was measured."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = 1 + (costs is not None) + bool(checked)
    figure = Figure(figsize=(0.8 + 3.4 * panels, 3.2), layout=ConstrainedLayoutEngine(wspace=0.06))
    axes = iter(figure.subplots(1, panels, squeeze=False)[0])
    _lengths(next(axes), made, costs)
    if costs is not None:
        _throttle(next(axes), made)
    if checked:
        _agreement(next(axes), checked)
    return figure


def _lengths(axes: Axes, made: Plan, costs: Costs | None) -> None:
    from specdec.plan import best, chains

    alone = [ranks[0] for ranks in made.accuracy][: made.budget]
    for batch, colour in zip((1, 4, 16) if costs else (1,), (BLUE, GREEN, ORANGE), strict=False):
        found = chains(alone, made.prices, batch)
        label = f"{batch} sequence{'s' if batch > 1 else ''}" if costs else "rows free"
        axes.plot([c.depth for c in found], [c.speedup for c in found], ".-", color=colour, label=label)
        top = best(found)
        axes.plot([top.depth], [top.speedup], "o", color=colour, markerfacecolor="white", markersize=8)
    axes.axhline(1, color=GREY, linewidth=1, linestyle=":")
    step = -(-len(alone) // 8)
    axes.set_xticks(range(0, len(alone) + 1, step))
    axes.set(xlabel="drafted tokens", ylabel="speed-up", title="length of a chain")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _throttle(axes: Axes, made: Plan) -> None:
    from matplotlib.ticker import MaxNLocator

    batches = [row.batch for row in made.throttle]
    places = range(len(batches))
    axes.bar(places, [row.depth for row in made.throttle], color=BLUE, alpha=0.35, label="best length")
    axes.set_xticks(places, [str(batch) for batch in batches])
    axes.set_ylim(0, max(row.depth for row in made.throttle) + 1)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="sequences in a pass", ylabel="drafted tokens", title="how far drafting pays")
    right = axes.twinx()
    right.plot(places, [row.speedup for row in made.throttle], "o-", color=ORANGE, label="speed-up")
    right.set_ylim(bottom=0.9)
    right.set_ylabel("speed-up")
    right.spines["right"].set_visible(True)
    handles = [*axes.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    axes.legend(handles, ["best length", "speed-up"], loc="upper right")


def _agreement(axes: Axes, checked: Sequence[Checked]) -> None:
    most = 1.1 * max(max(row.expected, row.measured) for row in checked)
    least = 0.9 * min(min(row.expected, row.measured) for row in checked)
    ends = [least, most]
    axes.plot(ends, ends, color=GREY, linewidth=1)
    axes.fill_between(ends, [0.95 * x for x in ends], [1.05 * x for x in ends], color=GREY, alpha=0.25, label="within 5 %")
    for temperature, colour in zip(dict.fromkeys(row.temperature for row in checked), (BLUE, ORANGE, GREEN), strict=False):
        some = [row for row in checked if row.temperature == temperature]
        axes.plot(
            [r.measured for r in some], [r.expected for r in some], "o", color=colour, label=f"temperature {temperature:g}"
        )
    axes.set(
        xlabel="speed-up measured", ylabel="speed-up planned", title="the plan beside the clock", xscale="log", yscale="log"
    )
    axes.set(xlim=ends, ylim=ends)
    ticks = [tick for tick in (0.5, 0.75, 1, 1.5, 2, 3, 4, 6) if least <= tick <= most]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
