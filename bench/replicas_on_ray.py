"""The Ray application with a real model: how long until full service after a death, under load?

Two engines on a local cluster, and clients that do not stop. Several times the process that holds an engine's model is killed,
and several times the engine's actor, the process that Ray has started; each time it counts until both engines take requests.
Answers are compared with those that came before. Exits with 1 where an answer is wrong or a time misses its target.

    python bench/replicas_on_ray.py --json bench/results/replicas_on_ray.json
    python bench/replicas_on_ray.py --busy 2 --kills 3 --json bench/results/replicas_on_ray_busy.json
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve
from replicas import HEALED_SECONDS, Client, bodies, cached, tell, under_load, until

from specdec.config import DEFAULT_MODEL
from specdec.serve.scale.ray_app import app

ENGINES = 2


class Front(Client):
    """A client of the application."""

    def engines(self) -> dict[str, tuple[int, int]]:
        """Of each engine that tells its figures, whether it takes requests, and how often its replica was started again."""
        found: dict[str, dict[str, int]] = {}
        text = self.get("/metrics").decode()
        for figure, engine, value in re.findall(r'^specdec:replica_(up|restarts_total)\{replica="(\w+)"\} (\S+)$', text, re.M):
            found.setdefault(engine, {})[figure] = int(float(value))
        return {engine: (figures["up"], figures["restarts_total"]) for engine, figures in found.items()}


@contextmanager
def served(model: str, threads: int) -> Iterator[Front]:
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")  # it reports nothing, and writes no token
    ray.init(num_cpus=2 * ENGINES, include_dashboard=False, log_to_driver=False)
    try:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        serve.start(http_options={"port": port, "host": "127.0.0.1"})
        application = app({"model": model, "threads": threads, "min_replicas": ENGINES, "max_replicas": ENGINES})
        serve.run(application, route_prefix="/")
        client = Front(f"http://127.0.0.1:{port}")
        until(lambda: whole(client))
        yield client
    finally:
        serve.shutdown()
        ray.shutdown()


def whole(client: Front) -> bool:
    """Do all engines take requests?"""
    engines = client.engines()
    return len(engines) == ENGINES and all(up for up, _ in engines.values())


class Processes:
    """The processes of the application. Those that have lost their parents are known from before."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}

    def _alive(self) -> list[psutil.Process]:
        for parent in [psutil.Process(), *self._known.values()]:
            try:
                self._known |= {process.pid: process for process in parent.children(recursive=True)}
            except psutil.NoSuchProcess:
                continue
        return [process for process in self._known.values() if process.is_running()]

    def actors(self) -> list[psutil.Process]:
        return [process for process in self._alive() if "ServeReplica" in (line := _command(process)) and "Engine" in line]

    def models(self) -> list[psutil.Process]:
        """Those that hold a model and answer: the ones that are forked from keepers and have connections."""
        forks = [process for process in self._alive() if "multiprocessing.forkserver" in _command(process)]
        return [process for process in forks if process.num_threads() > 1 and process.net_connections(kind="inet")]

    def megabytes(self) -> float:
        """Of all that engines consist of; what several share is counted once."""
        keepers = [process for process in self._alive() if "scale.keeper" in _command(process)]
        whole = {p.pid: p for one in [*self.actors(), *keepers] for p in [one, *one.children(recursive=True)]}
        return float(sum(process.memory_full_info().pss for process in whole.values()) / 1e6)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def healed(client: Front, find: Callable[[], list[psutil.Process]], asked: list[dict[str, Any]], at_once: int) -> float:
    """Seconds from the kill of the first process found to full service, under load."""
    with under_load(client, asked, at_once):
        time.sleep(0.5)
        before = client.engines()
        os.kill(find()[0].pid, signal.SIGKILL)
        seconds = until(lambda: client.engines() != before and whole(client))
        time.sleep(0.5)
    return seconds


@contextmanager
def busy(n: int) -> Iterator[None]:
    """So many processes that compute without end, each in a session of its own, as other people's work is."""
    with ExitStack() as stack:
        for _ in range(n):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True))
            stack.callback(process.kill)
        yield


def measure(options: argparse.Namespace) -> dict[str, Any]:
    asked = bodies(options.families, options.turns, options.tokens)
    times: dict[str, list[float]] = {"replica": [], "actor": []}
    with served(options.model, options.threads) as client:
        _, client.right = cached(client, asked, options.at_once)
        processes = Processes()
        megabytes = processes.megabytes()
        with busy(options.busy):
            for kind, find in (("replica", processes.models), ("actor", processes.actors)):
                for _ in range(options.kills):
                    times[kind].append(healed(client, find, asked, options.at_once))
                    print(f"{kind} killed: full service after {times[kind][-1]:.1f} s", file=sys.stderr)
    seconds = {
        kind: {"least": min(found), "median": statistics.median(found), "most": max(found), "all": found}
        for kind, found in times.items()
    }
    return {"seconds": seconds, "answers": client.counts, "megabytes": megabytes, "load": os.getloadavg()[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--families", type=int, default=4)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    parser.add_argument("--kills", type=int, default=5, help="of each kind")
    parser.add_argument("--busy", type=int, default=0, help="processes beside it that compute without end while it is measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure(options)
    result["within_targets"] = all(found["most"] <= HEALED_SECONDS for found in result["seconds"].values()) and not any(
        result["answers"][outcome] for outcome in ("wrong", "refused")
    )
    return tell(result, options)


if __name__ == "__main__":
    sys.exit(main())
