"""The parts of docs/serving.md, docs/scaling.md and docs/observability.md that come from results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

REPLICAS, SPEEDUP, OVERHEAD, PREFIX = "replicas.json", "live_speedup.json", "serve_overhead.json", "prefix.json"
COST = "observability_overhead.json"
ON_RAY, ON_RAY_BUSY = "replicas_on_ray.json", "replicas_on_ray_busy.json"


def _read(results: Path, name: str) -> tuple[dict[str, Any], str]:
    """A result, and the sentence that says where it comes from."""
    made = json.loads((results / name).read_text(encoding="utf-8"))
    told = made["provenance"]
    source = f"[{name}](../bench/results/{name}), {told['date'][:10]}, `{told['command']}`; {told['cpu']}"
    return made, source


def _replicas(results: Path) -> str:
    made, source = _read(results, REPLICAS)
    settings, cached, seconds, answers = made["settings"], made["cached"], made["seconds"], made["answers"]
    return (
        f"{settings['model']}, {settings['threads']} thread each, {settings['families']} families of "
        f"{settings['turns']} conversations that begin alike, {settings['at_once']} clients ({source}):\n\n"
        "| | |\n|---|--:|\n"
        f"| tokens of prompts found in the cache, one replica | {cached['one']:.1%} |\n"
        f"| with two | {cached['two']:.1%} |\n"
        f"| two over one | {made['hit_ratio']:.2f} |\n"
        f"| from `kill -9` of one of two to full service | {seconds['healed']:.1f} s |\n"
        f"| answers meanwhile: right, broken off, wrong | {_outcomes(answers['killed'])} |\n"
        f"| from SIGTTIN to a third one that takes requests | {seconds['added']:.1f} s |\n"
        f"| from SIGTTOU, twice, until the two are gone | {seconds['removed']:.1f} s |\n"
        f"| answers meanwhile: right, broken off, wrong | {_outcomes(answers['scaled'])} |\n"
    )


def _on_ray(results: Path) -> str:
    """Side by side: the machine left alone, and with processes beside that compute without end."""
    quiet, source = _read(results, ON_RAY)
    busy, busy_source = _read(results, ON_RAY_BUSY)
    settings = quiet["settings"]
    rows = [
        f"| from `kill -9` of {what} to full service: least, median, most | "
        + " | ".join(
            ", ".join(f"{made['seconds'][kind][cut]:.1f}" for cut in ("least", "median", "most")) + " s"
            for made in (quiet, busy)
        )
        + " |\n"
        for kind, what in (("replica", "a process with a model"), ("actor", "an actor"))
    ]
    told = f"{settings['model']}, two engines of {settings['threads']} thread each, {settings['at_once']} clients"
    beside = f"with {busy['settings']['busy']} processes beside that compute without end"
    return (
        f"{told} ({source}; beside others, {busy_source}):\n\n"
        f"| | alone on the machine, {settings['kills']} times each | {beside}, {busy['settings']['kills']} times each |\n"
        "|---|--:|--:|\n"
        + "".join(rows)
        + f"| answers meanwhile: right, broken off, wrong | {_outcomes(quiet['answers'])} | {_outcomes(busy['answers'])} |\n"
        f"| load of the machine at the end | {quiet['load']:.1f} | {busy['load']:.1f} |\n"
        f"| memory of both engines, all their processes | {quiet['megabytes']:,.0f} MB | {busy['megabytes']:,.0f} MB |\n"
    )


def _outcomes(counts: Mapping[str, int]) -> str:
    return ", ".join(str(counts[outcome]) for outcome in ("right", "broken off", "wrong"))


def _speedup(results: Path) -> str:
    made, source = _read(results, SPEEDUP)
    lines = [
        f"| {row['at_once']} | {row['truth']:.3f} | {row['estimate']:.3f} | {row['error']:+.1%} |\n" for row in made["rows"]
    ]
    head = "| requests at once | speed-up, by running the load twice | estimated live | error |\n|--:|--:|--:|--:|\n"
    return f"{source}:\n\n{head}" + "".join(lines)


def _overhead(results: Path) -> str:
    made, source = _read(results, OVERHEAD)
    lines = []
    for row in made["rows"]:
        waits = (f"{row[to][cut]:.1f}" for to in ("to_socket", "to_client") for cut in ("p50_ms", "p90_ms", "p99_ms"))
        lines.append(f"| {row['streams']} | {' | '.join(waits)} | {row['cpu_us_per_frame']:.0f} µs |\n")
    return (
        f"{source}:\n\n"
        "| streams | to the socket, ms: median | 90 % | 99 % | to the client: median | 90 % | 99 % | CPU a frame |\n"
        "|--:|--:|--:|--:|--:|--:|--:|--:|\n" + "".join(lines)
    )


def _cost(results: Path) -> str:
    made, source = _read(results, COST)
    settings, costs = made["settings"], made["costs"]
    asked = f"twice {settings['requests']} requests of {settings['tokens']} tokens a round"
    return (
        f"{source}:\n\n"
        f"| {settings['streams']} streams at once, {asked} | |\n"
        "|---|--:|\n"
        f"| cost in tokens per second, median of {len(costs)} rounds | {made['cost']:.2%} |\n"
        f"| lowest and highest round | {min(costs):.2%}, {max(costs):.2%} |\n"
        f"| standard deviation of a round | {made['deviation']:.2%} |\n"
    )


def _prefix(results: Path) -> str:
    made, source = _read(results, PREFIX)
    return (
        f"{source}:\n\n"
        f"| of {made['prefix_tokens']:,} tokens in the cache | milliseconds to the first frame |\n|---|--:|\n"
        f"| none | {1e3 * made['cold_seconds']:,.0f} |\n| all that fill blocks | {1e3 * made['warm_seconds']:,.0f} |\n"
        f"| ratio | {made['ratio']:.3f} |\n"
    )


PARTS: Mapping[str, Mapping[str, Callable[[Path], str]]] = {
    "serving.md": {"overhead": _overhead, "prefix": _prefix},
    "scaling.md": {"replicas": _replicas, "ray": _on_ray},
    "observability.md": {"speedup": _speedup, "cost": _cost},
}
"""By page and part."""
