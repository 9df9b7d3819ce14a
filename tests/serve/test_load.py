"""Load: hundreds of requests on a pool far too small for them, clients that go, and memory that stays what it was."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from pathlib import Path
from typing import Any

import psutil
from load import for_seconds, storm
from serving import Running, serving
from test_together import load

SOAK_SECONDS = float(os.environ.get("SPECDEC_SOAK_SECONDS", "10"))
"""``make soak`` makes it ten minutes."""

GROWTH = 16 << 20
"""Bytes that the process may grow by between a third of a soak and its end; buffers and arenas are still filling up."""

POOL = {"max_sequences": 16, "max_len": 128, "kv_tokens": 192}
"""Sixteen sequences of a hundred tokens need 1,600 slots; these are less than an eighth, so that on any machine sequences lose
their blocks time and again."""


def bodies() -> list[dict[str, Any]]:
    """Requests of all kinds, some with a common beginning."""
    rng = random.Random(7)
    made = []
    for i in range(20):
        prompt = [97 + j % 5 for j in range(34)] if i % 3 == 0 else []
        prompt += [rng.randrange(97, 123) for _ in range(rng.randint(1, 24))]
        body = {"prompt": prompt, "max_tokens": rng.randint(16, 60), "temperature": (0, 0.9)[i % 2], "seed": i}
        made.append({**body, "ignore_eos": True, "return_token_ids": True, **({"top_p": 0.9} if i % 4 == 1 else {})})
    return made


def answers_alone(folder: Path) -> list[list[int]]:
    """The tokens of each request's solo run, without speculation or cache."""
    with serving(load(folder, speculation="off", prefix_cache=False)) as server:
        return [server.ask(**body)["choices"][0]["token_ids"] for body in bodies()]


def at_rest(server: Running) -> dict[str, float]:
    """Nothing runs, waits or is held, and every beginning has its end."""
    now = server.settled()
    ends = sum(now[f"specdec:request_success_total{{{reason}}}"] for reason in ("stop", "length", "abort", "error"))
    assert ends == now["specdec:requests_started_total"]
    assert now["specdec:request_success_total{error}"] == 0
    assert server.llm.engine.counts().blocks_used == 0
    assert not server.llm.engine.budget or not len(server.llm.engine.budget._chances)
    return now


def test_five_hundred_requests_on_an_eighth_of_the_pool(tiny_folder: Path) -> None:
    """A fifth of the clients hang up: no answer is lost, each is that of its solo run, and nothing is left behind."""
    expected = answers_alone(tiny_folder)
    with serving(load(tiny_folder, **POOL)) as server:
        tally = asyncio.run(
            storm(server.url, bodies(), expected, clients=24, cancels=0.2, seed=1, more=lambda asked: asked < 500)
        )
        assert not tally.wrong
        assert tally.finished + tally.cancelled == 500
        assert tally.cancelled > 60
        now = at_rest(server)
        assert now["specdec:request_success_total{abort}"] > 10
        assert now["specdec:num_preemptions_total"] > 0, "the pool was meant to run short"


def test_memory_stays_flat(tiny_folder: Path) -> None:
    """Random requests and cancels for a while: what the process holds at a third of the time it holds at the end."""
    expected, process = answers_alone(tiny_folder), psutil.Process()
    held = []
    with serving(load(tiny_folder, **POOL)) as server:
        finished = 0
        for part in range(3):
            more = for_seconds(SOAK_SECONDS / 3)
            tally = asyncio.run(storm(server.url, bodies(), expected, clients=8, cancels=0.3, seed=part, more=more))
            assert not tally.wrong
            finished += tally.finished
            at_rest(server)
            gc.collect()
            held.append(process.memory_info().rss)
        print(f"{finished} answers in {SOAK_SECONDS:.0f} s; megabytes held: {[round(n / 1e6, 1) for n in held]}")
        assert finished > 0
    assert held[-1] - held[0] < GROWTH
