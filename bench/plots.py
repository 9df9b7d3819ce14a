"""The plots of docs/benchmarks.md, as SVG files that are the same for the same results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from page import PEERS, alike, costs_image, own_results, peer_rows, peers_image, speed_image

from specdec.bench.result import MODES, Report

OFF, ON = "#9aa5b1", "#1f6f8b"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "specdec",  # else the names inside a file are random
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def draw(results: Mapping[str, Report], folder: Path) -> None:
    """Write every plot that the page shows, and remove those that it no longer does."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    own = own_results(results)
    with mpl.rc_context(STYLE):
        for name, report in own.items():
            for temperature in report.temperatures:
                _save(_speed(report, temperature), folder / speed_image(name, temperature))
            if report.v:
                _save(_costs(report), folder / costs_image(name))
        if peers := results.get(PEERS):
            for temperature in peers.temperatures:
                _save(_peers(peers, alike(peers, own), temperature), folder / peers_image(temperature))


def _speed(report: Report, temperature: float) -> Figure:
    """Two bars a task, with how much faster the second is."""
    figure = Figure(figsize=(7.2, 3.0))
    axes = figure.subplots()
    tasks = [task for task in report.tasks if report.row("on", task, temperature)]
    for mode, shift, colour in zip(MODES, (-0.2, 0.2), (OFF, ON), strict=True):
        rows = [report.row(mode, task, temperature) for task in tasks]
        heights = [row.tokens_per_second if row else 0.0 for row in rows]
        bars = axes.bar([i + shift for i in range(len(tasks))], heights, 0.38, color=colour, label=mode)
        if mode == "on":
            axes.bar_label(bars, [f"{row.speedup:.2f}×" if row and row.speedup else "" for row in rows], padding=2, fontsize=8)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_ylabel("tokens/s, prompt included")
    axes.margins(y=0.15)
    axes.grid(axis="y", alpha=0.3)
    axes.set_title(f"speculation off and on, temperature {temperature:g}", loc="left", fontsize=10)
    axes.legend(ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0))
    return figure


def _costs(report: Report) -> Figure:
    """v(M) beside what M separate passes would cost."""
    figure = Figure(figsize=(4.6, 3.0))
    axes = figure.subplots()
    rows = [int(m) for m in report.v]
    costs = list(report.v.values())
    axes.plot(rows, costs, "o-", color=ON, label="v(M), measured")
    axes.plot(rows, rows, ":", color=OFF, label="M passes of one row")
    for m, cost in zip(rows, costs, strict=True):
        axes.annotate(f"{cost:.2f}", (m, cost), textcoords="offset points", xytext=(5, -11), fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [str(m) for m in rows])
    axes.set_xlim(0.85, 1.6 * max(rows))
    axes.set_ylim(0, 1.35 * max(costs))
    axes.set_xlabel("rows of a pass, M")
    axes.set_ylabel("cost over one row")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    return figure


def _peers(peers: Report, own: Mapping[str, Report], temperature: float) -> Figure:
    """One bar a program, the fastest on top."""
    rows = peer_rows(peers, own, temperature)[::-1]
    figure = Figure(figsize=(7.2, 0.9 + 0.28 * len(rows)))
    axes = figure.subplots()
    colours = [ON if label.startswith("specdec ") else OFF for label, _ in rows]
    bars = axes.barh([label for label, _ in rows], [row.tokens_per_second for _, row in rows], color=colours)
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axes.set_xlabel("tokens/s, prompt included, all tasks")
    axes.margins(x=0.1)
    axes.grid(axis="x", alpha=0.3)
    return figure


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, bbox_inches="tight", facecolor="white", metadata={"Date": None})
