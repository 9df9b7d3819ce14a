"""The text of docs/benchmarks.md: what is said of results, and their tables.

Files of ``specdec bench`` with the modes off and on give the tables of speculation; ``peers.json`` has the same layout with
other programs as its modes, and gives the comparison with them. Files of other layouts belong to other scripts and are left
alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from limits_part import limits_part
from servers import servers_part

from specdec.bench.compare import differences
from specdec.bench.result import ALL, MODES, Report, Summary, load

PEERS = "peers"
DEPTHS = 8
"""Depths of the table of acceptance."""

NOTHING = "–"

HEAD = """# Benchmarks

This page and its plots are generated from the files in [bench/results](../bench/results) by `make benchmarks-doc`; changes
made by hand are lost. Each table says which file and which command it comes from.

## How it is counted

- Off and on run in one process on the same weights and alternate pass by pass; which comes first changes with every
  turn. What drafters learned is forgotten before each turn. The tokens of all runs of a prompt are the same: a run in which
  one differs ends with an error and gives no figures.
- *tokens/s* includes the processing of the prompt. Of a prompt's turns the median counts; a task's figure is all its tokens
  over all its seconds, so a slow prompt weighs as much as it costs. *faster* is on over off.
- *decoding* is the tokens after the first over the time after the first, and *S* is its on over off.
- *first token* is the time from the request to the first token. *between tokens* is what a client waits for a token after
  the one before it: a burst of several tokens arrives at one moment, so its first token has waited since the delivery before
  and its others have not waited at all. A median near zero means that most tokens came in the company of an earlier one; the
  99th percentile is the longest pause that is felt. Both are medians over prompts.
- *τ* is the mean of tokens emitted per pass. *S/τ* is the share of it that became speed: the rest went into wider passes,
  drafting and verification.
- *accepted at depth d* counts only drafts of which the first d − 1 tokens were right.
- With several requests in flight, these are the figures of each request; *all together* is the rate of all of them.
- *v(M)* is what a pass of M rows costs over a pass of one row, at the mean context of the run, measured in the same run.
- *Peak memory* is the most that the process held at once, with both engines in it.
"""

NO_RESULTS = """
## Results

There are none yet: `specdec bench --json bench/results/specdec.json` makes the first.
"""


def read(folder: Path) -> dict[str, Report]:
    """Results by the names of their files, in order of these names."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data, dict) and "schema" in data:
            found[path.stem] = load(path)
    return found


def document(
    results: Mapping[str, Report],
    drafters: Mapping[str, Any] | None = None,
    servers: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None,
) -> str:
    """The whole page.

    Args:
        results: of ``specdec bench`` and bench/peers/run.py.
        drafters, servers, limits: what bench/drafter_table.py, bench/peers/under_load.py and bench/limits.py write.
    """
    own = own_results(results)
    parts = [HEAD] if results else [HEAD, NO_RESULTS]
    if own:
        parts.append("\n## Speculation off and on\n")
    for name, report in own.items():
        parts.append(_source(name, report))
        parts += (_speculation(name, report, temperature) for temperature in report.temperatures)
        parts.append(_costs(name, report))
    if drafters:
        parts.append(_drafters(drafters))
    if PEERS in results:
        parts.append(_peers(results[PEERS], alike(results[PEERS], own)))
    if servers:
        parts.append(servers_part(servers))
    if limits:
        parts.append(limits_part(limits))
    return "".join(parts)


def own_results(results: Mapping[str, Report]) -> dict[str, Report]:
    """Those of speculation off against on."""
    return {name: report for name, report in results.items() if report.modes == MODES}


def alike(peers: Report, own: Mapping[str, Report]) -> dict[str, Report]:
    """This engine's results that can stand beside those of other programs: as many requests at once, of the same length.

    None where the comparison measured this engine itself: only what ran in turns is compared.
    """
    if any(mode.startswith("specdec ") for mode in peers.modes):
        return {}
    asked = ("concurrency", "max_tokens")
    return {name: r for name, r in own.items() if all(r.fact(fact) == peers.fact(fact) for fact in asked)}


def _source(name: str, report: Report) -> str:
    told, settings = report.provenance, report.settings
    commit = f"commit {told['commit'][:12]}" if told.get("commit") else f"version {told.get('specdec', NOTHING)}"
    changed = ", with changes that are not committed" if told.get("modified") else ""
    asked = f"{settings['max_tokens']} tokens at most, {settings['concurrency']} in flight, {settings['repeats']} turns"
    return (
        f"\n### {name}\n\n"
        f"{told['model']}, precision {told['precision']}, kernels {told['kernels']}, {told['threads']} threads, {told['cpu']}, "
        f"torch {told['torch']}; {asked}; drafters {', '.join(settings['speculation'])}, up to {settings['max_nodes']} nodes.\n"
        f"{_made(name, report)}; {commit}{changed}.\n"
    )


def _made(name: str, report: Report) -> str:
    told = report.provenance
    return (
        f"File [{name}.json](../bench/results/{name}.json), made on {str(told.get('date', NOTHING))[:10]} "
        f"by `{told.get('command', NOTHING)}`"
    )


def _speculation(name: str, report: Report, temperature: float) -> str:
    both = [[report.row(mode, task, temperature) for mode in MODES] for task in report.tasks]
    rows = [(off, on) for off, on in both if off and on]
    speed = _table(
        "task | prompts | tokens/s off | on | faster | decoding off | on | S | τ | S/τ",
        (
            [
                _label(on.task),
                str(on.prompts),
                _number(off.tokens_per_second, 1),
                _number(on.tokens_per_second, 1),
                _strong(_number(on.speedup), on),
                _number(off.decode_tokens_per_second, 1),
                _number(on.decode_tokens_per_second, 1),
                _number(on.speedup_decoding),
                _number(on.tau),
                _number(on.speedup_decoding / on.tau if on.speedup_decoding and on.tau else None),
            ]
            for off, on in rows
        ),
    )
    waiting = _table(
        "task | first token off, ms | on | between tokens, median off, ms | on | 99th percentile off, ms | on",
        (
            [_label(on.task)]
            + [
                _number(None if value is None else 1e3 * value, 1)
                for attribute in ("first_token_seconds", "gap_p50", "gap_p99")
                for value in (getattr(off, attribute), getattr(on, attribute))
            ]
            for off, on in rows
        ),
    )
    accepted = _table(
        "accepted at depth | " + " | ".join(map(str, range(1, DEPTHS + 1))),
        (
            [_label(on.task)] + [_number(share) for share in _first(on.acceptance_by_depth or (), DEPTHS)]
            for _, on in rows
            if on.acceptance_by_depth is not None
        ),
    )
    worst = min((on for _, on in rows[:-1]), key=lambda row: row.speedup or 0.0, default=None)
    note = "" if worst is None else f"\nWorst task: {worst.task}, {_number(worst.speedup)} times the speed of off.\n"
    together = [report.throughput(mode, temperature) for mode in MODES]
    if report.settings["concurrency"] > 1 and all(together):
        note += f"\nAll together: {_number(together[0], 1)} tokens/s off, {_number(together[1], 1)} on.\n"
    image = f"![tokens per second by task](images/{speed_image(name, temperature)})"
    return f"\n#### Temperature {temperature:g}\n\n{speed}{note}\n{image}\n\n{waiting}\n{accepted}"


def _drafters(found: Mapping[str, Any]) -> str:
    """Every drafter beside the others: what it is worth on this machine, and what it foresees."""
    free = [row for row in found["free"] if row["temperature"] == 0]
    names = [row["drafter"] for row in free]
    worth = {(row["drafter"], row["temperature"], row["in_flight"]): row for row in found["measured"]}
    kinds = list(dict.fromkeys((row["temperature"], row["in_flight"]) for row in found["measured"]))
    head = " | ".join(f"T = {temperature:g}, {n} in flight: τ | faster" for temperature, n in kinds)
    speed = _table(
        f"drafter | {head}",
        ([name] + [_number(worth[name, *kind][figure]) for kind in kinds for figure in ("tau", "whole")] for name in names),
    )
    batches = sorted({n for _, n in kinds})
    accepted = "".join(
        f"\nAccepted at depth, temperature 0, {n} in flight, as far as drafts were verified:\n\n"
        + _table(
            "drafter | " + " | ".join(map(str, range(1, DEPTHS + 1))),
            (
                [name] + [_number(share) for share in _first(worth[name, 0.0, n]["accepted_at_depth"] or (), DEPTHS)]
                for name in names
            ),
        )
        for n in batches
        if all((name, 0.0, n) in worth for name in names)
    )
    tasks = list(free[0]["tau_by_task"])
    foreseen = "".join(
        f"\nτ at temperature {temperature:g} if rows were free, so that all that is drafted is verified:\n\n"
        + _table(
            "drafter | " + " | ".join([*tasks, "all"]),
            (
                [row["drafter"], *(_number(row["tau_by_task"][task]) for task in tasks), _number(row["tau"])]
                for row in found["free"]
                if row["temperature"] == temperature
            ),
        )
        for temperature in dict.fromkeys(row["temperature"] for row in found["free"])
    )
    told = found["provenance"]
    return (
        f"\n## Drafters side by side\n\nFile [drafters.json](../bench/results/drafters.json), made on "
        f"{str(told['date'])[:10]} by `{told['command']}`; {told['cpu']}, {told['threads']} threads.\n"
        f"*faster* is on over off, prompts included.\n\n{speed}{accepted}{foreseen}"
    )


def _costs(name: str, report: Report) -> str:
    memory = report.peak_memory_bytes
    parts = [] if memory is None else [f"\nPeak memory: {memory / 1e6:,.0f} MB.\n"]
    if report.v:
        table = _table("rows of a pass | " + " | ".join(report.v), [["v(M)", *map(_number, report.v.values())]])
        parts.append(f"\n{table}\n![cost of a pass by its rows](images/{costs_image(name)})\n")
    return "".join(parts)


def _peers(peers: Report, own: Mapping[str, Report]) -> str:
    parts = [f"\n## Other programs\n\n{_made(PEERS, peers)}.\n"]
    for temperature in peers.temperatures:
        rows = peer_rows(peers, own, temperature)
        fastest = max(row.tokens_per_second for _, row in rows)
        tasks = peers.tasks[:-1]
        totals = _table(
            "program | tokens/s | share of the fastest | decoding | first token, ms | τ",
            (
                [
                    label,
                    _number(row.tokens_per_second, 1),
                    _number(row.tokens_per_second / fastest),
                    _number(row.decode_tokens_per_second, 1),
                    _number(None if row.first_token_seconds is None else 1e3 * row.first_token_seconds, 1),
                    _number(row.tau),
                ]
                for label, row in rows
            ),
        )
        reports = {**{mode: (peers, mode) for mode in peers.modes}, **_own_modes(own)}
        by_task = _table(
            "tokens/s | " + " | ".join(tasks),
            (
                [label]
                + [
                    _number(found.tokens_per_second if (found := report.row(mode, task, temperature)) else None, 1)
                    for task in tasks
                ]
                for label, _ in rows
                for report, mode in [reports[label]]
            ),
        )
        image = f"![tokens per second by program](images/{peers_image(temperature)})"
        parts.append(f"\n### Temperature {temperature:g}\n\n{totals}\n{image}\n\n{by_task}")
    if rates := sorted(peers.prompt_processing, key=lambda row: -row["tokens_per_second"]):
        lengths = ", ".join(f"{n:,}" for n in dict.fromkeys(row["prompt_tokens"] for row in rates))
        table = _table("reading prompts | tokens/s", ([row["mode"], _number(row["tokens_per_second"], 0)] for row in rates))
        parts.append(f"\n### Prompts of {lengths} tokens\n\nTo the first token, the median of some prompts.\n\n{table}")
    for name, report in own.items():
        if set(report.temperatures) & set(peers.temperatures) and (lines := differences(report, peers)):
            told = "".join(f"- {line}\n" for line in lines)
            parts.append(f"\nWhat {name}.json and {PEERS}.json were not measured alike in:\n\n{told}")
    return "".join(parts)


def peer_rows(peers: Report, own: Mapping[str, Report], temperature: float) -> list[tuple[str, Summary]]:
    """The totals of all programs and of this engine at one temperature, the fastest first."""
    reports = {**{mode: (peers, mode) for mode in peers.modes}, **_own_modes(own)}
    found = [(label, report.row(mode, ALL, temperature)) for label, (report, mode) in reports.items()]
    return sorted(((label, row) for label, row in found if row), key=lambda item: -item[1].tokens_per_second)


def _own_modes(own: Mapping[str, Report]) -> dict[str, tuple[Report, str]]:
    """This engine's modes by what they are called among those of other programs."""
    return {f"specdec {mode} ({name})": (report, mode) for name, report in own.items() for mode in MODES}


def speed_image(name: str, temperature: float) -> str:
    return f"{name}-speed-{temperature:g}.svg"


def costs_image(name: str) -> str:
    return f"{name}-costs.svg"


def peers_image(temperature: float) -> str:
    return f"{PEERS}-{temperature:g}.svg"


def _table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers. Nothing where there are no rows."""
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    columns = head.count("|") + 1
    return f"| {head} |\n|---|{'--:|' * (columns - 1)}\n" + "".join(lines) if lines else ""


def _first(values: Sequence[float], n: int) -> Iterator[float | None]:
    """The first ``n`` values; None where there are fewer."""
    return (values[i] if i < len(values) else None for i in range(n))


def _number(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _label(task: str) -> str:
    return f"**{task}**" if task == ALL else task


def _strong(text: str, row: Summary) -> str:
    return f"**{text}**" if row.task == ALL else text
