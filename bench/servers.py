"""The part of docs/benchmarks.md that compares servers under load, from the file of bench/peers/under_load.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = "serving.json"
OWN = "specdec"


def read_servers(folder: Path) -> dict[str, Any] | None:
    """The result, if there is one."""
    path = folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def servers_part(result: dict[str, Any]) -> str:
    """A table of tokens per second by requests in flight, one of this server's rates over the best of the others', and the
    longest waits."""
    told, rows, settings = result["provenance"], result["rows"], result["settings"]
    levels = list(dict.fromkeys(row["in_flight"] for row in rows))
    found = {(row["server"], row["in_flight"]): row for row in rows}
    names = list(dict.fromkeys(row["server"] for row in rows))
    requests = ", ".join(f"{n} at {level}" for level, n in {row["in_flight"]: row["requests"] for row in rows}.items())
    parts = [
        f"\n## Servers under load\n\nFile [{FILE}](../bench/results/{FILE}), made on {told['date'][:10]} by "
        f"`{told['command']}`; commit {told['commit'][:12]}, {told['threads']} threads, {told['cpu']}.\n\n"
        f"Tokens per second of all requests together, prompts included: so many in flight, the next one sent as soon as one is "
        f"answered. {settings['prompts']} prompts, {settings['max_tokens']} tokens at most; requests: {requests}; medians of "
        f"{max(row['turns'] for row in rows)} turns. No server makes use of earlier requests.\n\n",
        _table("server", levels, {name: [_rate(found.get((name, level))) for level in levels] for name in names}),
    ]
    if ratios := _ratios(found, names, levels):
        parts.append("\n" + _table("ratio", levels, ratios))
    waits = {name: [_wait(found.get((name, level))) for level in levels] for name in names}
    parts.append("\n" + _table("seconds of a request, median / longest", levels, waits))
    parts += [f"\nNot measured: {skip['server']}: {skip['reason']}.\n" for skip in result["skipped"]]
    return "".join(parts)


def _ratios(found: dict[tuple[str, int], Any], names: list[str], levels: list[int]) -> dict[str, list[str]]:
    def rate(names: list[str], level: int) -> float | None:
        return max((found[n, level]["tokens_per_second"] for n in names if (n, level) in found), default=None)

    on, off = [f"{OWN} on"], [f"{OWN} off"]
    others = [name for name in names if not name.startswith(OWN)]
    pairs = {"specdec on over off": (on, off), "specdec on over the best other": (on, others)}
    ratios = {}
    for label, (mine, theirs) in pairs.items():
        both = [(rate(mine, level), rate(theirs, level)) for level in levels]
        if all(a and b for a, b in both):
            ratios[label] = [f"{a / b:.2f}" for a, b in both if a and b]
    return ratios


def _rate(row: dict[str, Any] | None) -> str:
    return "–" if row is None else f"{row['tokens_per_second']:.1f}"


def _wait(row: dict[str, Any] | None) -> str:
    return "–" if row is None else f"{row['request_seconds_p50']:.1f} / {row['request_seconds_max']:.1f}"


def _table(head: str, levels: list[int], rows: dict[str, list[str]]) -> str:
    lines = [f"| {head} | {' | '.join(f'{level} in flight' for level in levels)} |", f"|---|{'--:|' * len(levels)}"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join(lines) + "\n"
