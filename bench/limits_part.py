"""The part of docs/benchmarks.md that says what one process takes, from the file of bench/limits.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = "limits.json"
MEGABYTE = 1e6


def read_limits(folder: Path) -> dict[str, Any] | None:
    """The result, if there is one."""
    path = folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def limits_part(result: dict[str, Any]) -> str:
    """Tables of passes by rows and context, of a process's start and memory, and what a busy neighbour costs."""
    told, found = result["provenance"], result["passes"]
    ms = {(row["context"], row["rows"]): row["ms"] for row in found["passes"]}
    short = min(context for context, _ in ms)
    one, megabytes = ms[short, 1], found["weights_bytes"] / MEGABYTE
    bound = 1e3 * found["weights_bytes"] / found["bytes_per_second"]
    start, neighbour = result["start"], result["neighbour"]
    times = neighbour["beside_seconds"] / neighbour["alone_seconds"]
    lines = [
        f"\n## What one process takes\n\nFile [{FILE}](../bench/results/{FILE}), made on {told['date'][:10]} by "
        f"`{told['command']}`; commit {told['commit'][:12]}, {told['threads']} threads, {told['cpu']}.\n",
        f"\nA pass of one row at {short:,} cached tokens takes {one:.2f} ms, **{one / bound:.2f} times its bound**: reading "
        f"{megabytes:.1f} MB of weights at the {found['bytes_per_second'] / 1e9:.1f} GB/s of this run takes {bound:.2f} ms.\n",
        "\n| rows of a pass | " + " | ".join(str(rows) for context, rows in ms if context == short) + " |\n",
        "|---|" + "--:|" * sum(context == short for context, _ in ms) + "\n",
        "| ms | " + " | ".join(f"{value:.2f}" for (context, _), value in ms.items() if context == short) + " |\n",
        "| v(M) | " + " | ".join(f"{value / one:.2f}" for (context, _), value in ms.items() if context == short) + " |\n",
        "\n| cached tokens, one row | ms | keys and values, MB | over the shortest |\n|---|--:|--:|--:|\n",
    ]
    for (context, rows), value in ms.items():
        if rows == 1:
            held = context * found["kv_bytes_per_token"] / MEGABYTE
            lines.append(f"| {context:,} | {value:.2f} | {held:.1f} | {value / one:.2f} |\n")
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in start["parts"].items())
    lines.append(
        f"\nFrom the start of a process to its first token, with everything cached: **{start['seconds']:.1f} s** in the "
        f"median, {start['least_seconds']:.1f} s at least. Of it, in seconds: {parts}.\n"
    )
    for name, held in result["memory"].items():
        peak, files = held["peak_bytes"] / MEGABYTE, held["file_bytes"] / MEGABYTE
        lines.append(
            f"\nMemory of a process that decodes {held['tokens']:,} tokens, at its peak, speculation {name}: "
            f"**{peak:.0f} MB**, {files:.0f} of them pages of files such as torch's libraries, which other processes share.\n"
        )
    lines.append(
        f"\nBeside as many busy processes as there are cores, decoding takes **{times:.1f} times** as long as alone.\n"
    )
    return "".join(lines)
