"""Replicas of a real model: does a prefix find its cache, what does a dead replica cost, and do they come and go under load?

``specdec serve`` runs as users start it, first with one replica and then with two. Both get the same conversations, some at a
time, each beginning with one of several long system prompts; the answers of the first are the right ones. Then, under a load
that does not end, one of the two is killed, a third one is added and two are taken away. Exits with 1 where an answer is wrong
or a figure misses its target.

    python bench/replicas.py --json bench/results/replicas.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from specdec.bench.provenance import model_name, provenance
from specdec.config import DEFAULT_MODEL

HIT_RATIO, HEALED_SECONDS = 0.9, 10.0
LIMIT_SECONDS = 60.0

TOPICS = ("rivers", "birds", "bread", "sailing", "bridges", "glass", "bees", "maps")
QUESTIONS = ("What is the most important rule?", "Name two common mistakes.", "How does one begin?", "Tell me something odd.")


def bodies(families: int, turns: int, tokens: int) -> list[dict[str, Any]]:
    """Conversations of several families that begin alike, in a mixed order; sampled, each with a seed."""
    found = []
    for i in range(families * turns):
        topic, turn = TOPICS[i % families], i // families
        system = f"You know everything about {topic} and answer in one short sentence. " + f"Rule of {topic}: stay kind. " * 24
        messages = [{"role": "system", "content": system}]
        for question in QUESTIONS[: 1 + turn % len(QUESTIONS)]:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": f"It is about {topic}."}]
        found.append({"messages": messages[:-1], "max_tokens": tokens, "temperature": 0.8, "seed": i})
    random.Random(0).shuffle(found)
    return found


class Client:
    """Asks a server, and compares what comes with the right answers once these are known."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.right: dict[int, str] = {}
        """Answers by seed."""
        self.counts = dict.fromkeys(("right", "wrong", "refused", "broken off"), 0)
        self._lock = threading.Lock()

    def get(self, path: str) -> bytes:
        body: bytes = urllib.request.urlopen(self.address + path).read()
        return body

    def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.get("/health"))["replicas"]
        return found

    def ready(self) -> int:
        return sum(replica["state"] == "ready" for replica in self.replicas())

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.address}/v1/chat/completions", json.dumps(body).encode())
        answer: dict[str, Any] = json.load(urllib.request.urlopen(request))
        return answer

    def stream(self, body: dict[str, Any]) -> tuple[str, bool]:
        """The text, and whether it came to its end."""
        request = urllib.request.Request(f"{self.address}/v1/chat/completions", json.dumps({**body, "stream": True}).encode())
        text = ""
        for line in urllib.request.urlopen(request):
            if not line.startswith(b"data: {"):
                continue
            frame = json.loads(line.removeprefix(b"data: "))
            if "error" in frame:
                return text, False
            text += frame["choices"][0]["delta"].get("content", "")
        return text, True

    def check(self, body: dict[str, Any], streamed: bool) -> None:
        """Ask, and count what came of it."""
        expected = self.right[body["seed"]]
        try:
            if streamed:
                text, whole = self.stream(body)
            else:
                text, whole = self.ask(body)["choices"][0]["message"]["content"], True
        except urllib.error.HTTPError:
            outcome = "refused"
        else:
            outcome = (
                "right" if whole and text == expected else "wrong" if whole or not expected.startswith(text) else "broken off"
            )
        with self._lock:
            self.counts[outcome] += 1


@contextmanager
def served(model: str, replicas: int, threads: int) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    words = ["serve", "--port", "0", "-m", model, "--replicas", str(replicas), "--threads", str(threads)]
    command = [sys.executable, "-c", "from specdec.cli import main; main()", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if " at http" in line)
            yield process, Client(line.split(" at ")[1].split("/v1")[0])
        finally:
            process.terminate()


def cached(client: Client, asked: list[dict[str, Any]], at_once: int) -> tuple[float, dict[int, str]]:
    """The share of prompts' tokens that prefix caches had, and the answers."""
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(client.ask, asked))
    usage = [answer["usage"] for answer in answers]
    share = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usage) / sum(u["prompt_tokens"] for u in usage)
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    return share, {body["seed"]: text for body, text in zip(asked, texts, strict=True)}


@contextmanager
def under_load(client: Client, asked: list[dict[str, Any]], n: int) -> Iterator[None]:
    """So many clients that go on asking, every other one for streams."""
    over = threading.Event()

    def go_on(which: int) -> None:
        for at in range(which, 10**9, n):
            if over.is_set():
                return
            client.check(asked[at % len(asked)], streamed=which % 2 == 0)

    with ThreadPoolExecutor(n) as pool:
        going = [pool.submit(go_on, which) for which in range(n)]
        try:
            yield
        finally:
            over.set()
    for one in going:
        one.result()


def until(reached: Any) -> float:
    """Seconds until something is so."""
    began = time.perf_counter()
    while not reached():
        if time.perf_counter() - began > LIMIT_SECONDS:
            raise RuntimeError(f"not reached within {LIMIT_SECONDS:g} s")
        time.sleep(0.02)
    return time.perf_counter() - began


def workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The replicas' processes: those that hold a model."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if child.num_threads() > 1 and child.net_connections(kind="inet")]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    asked = bodies(options.families, options.turns, options.tokens)
    shares = {}
    with served(options.model, 1, options.threads) as (_, client):
        shares["one"], right = cached(client, asked, options.at_once)
    with served(options.model, 2, options.threads) as (process, client):
        shares["two"], answers = cached(client, asked, options.at_once)
        client.right = right
        client.counts["wrong"] += sum(answers[seed] != text for seed, text in right.items())
        seconds = {}
        with under_load(client, asked, options.at_once):
            time.sleep(2)
            restarts = sum(replica["restarts"] for replica in client.replicas())
            os.kill(workers(process)[0].pid, signal.SIGKILL)
            seconds["healed"] = until(
                lambda: client.ready() == 2 and sum(replica["restarts"] for replica in client.replicas()) > restarts
            )
        killed, client.counts = client.counts, dict.fromkeys(client.counts, 0)
        with under_load(client, asked, options.at_once):
            process.send_signal(signal.SIGTTIN)
            seconds["added"] = until(lambda: client.ready() == 3)
            time.sleep(2)
            seconds["removed"] = 0.0
            for left in (2, 1):  # signals of one kind that wait together count once
                process.send_signal(signal.SIGTTOU)
                seconds["removed"] += until(lambda left=left: len(client.replicas()) == left)
            time.sleep(2)
    return {
        "cached": shares,
        "hit_ratio": shares["two"] / shares["one"],
        "seconds": seconds,
        "answers": {"killed": killed, "scaled": client.counts},
    }


def tell(result: dict[str, Any], options: argparse.Namespace) -> int:
    """Print a result, keep it where that is asked for, and give the exit status."""
    print(json.dumps(result, indent=2))
    if options.json:
        kept = {name: value for name, value in vars(options).items() if name != "json"} | {"model": model_name(options.model)}
        options.json.write_text(json.dumps({"provenance": provenance(), "settings": kept, **result}, indent=2) + "\n")
    return 0 if result["within_targets"] else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--families", type=int, default=len(TOPICS))
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1, help="of each replica")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure(options)
    result["within_targets"] = (
        result["hit_ratio"] >= HIT_RATIO
        and result["seconds"]["healed"] <= HEALED_SECONDS
        and not any(result["answers"]["killed"][outcome] for outcome in ("wrong", "refused"))
        and not any(result["answers"]["scaled"][outcome] for outcome in ("wrong", "refused", "broken off"))
    )
    return tell(result, options)


if __name__ == "__main__":
    sys.exit(main())
